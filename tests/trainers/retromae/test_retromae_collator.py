from typing import Any

import numpy as np
import pytest
import torch

from revela_hub.data.text.masking import masked_tokens
from revela_hub.errors import UserError
from revela_hub.trainers.retromae.data import MASK_SETS, RetroMAECollator

CLS, SEP, MASK, PAD, UNK = 2, 3, 4, 0, 1  # of wordpiece_tokenizer


def make_rows(lengths: list[int], seed: int = 0, start_share: float = 0.7) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        starts = (generator.random(length) < start_share).astype(int)
        starts[:1] = 1
        tokens = generator.integers(5, 200, size=length)
        rows.append({"span": number, "input_ids": tokens.tolist(), "word_starts": starts.tolist()})
    return rows


def words_of(row: dict[str, Any]) -> list[list[int]]:
    """The positions of each word between [CLS] and [SEP]."""
    words: list[list[int]] = []
    for position, start in enumerate(row["word_starts"], 1):
        if start:
            words.append([])
        words[-1].append(position)
    return words


def same_but_padding(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], length: int) -> None:
    """The first row of both batches agrees in its first `length` tokens."""
    for name in one:
        both = [batch[name][0][:length] for batch in (one, other)]
        if both[0].dim() == 2:
            both = [tensor[:, :length] for tensor in both]
        assert torch.equal(*both), name


def test_encoder_part(wordpiece_tokenizer: Any) -> None:
    rows = make_rows([30, 7, 51, 1])
    batches = [RetroMAECollator(wordpiece_tokenizer, decoder=name)(rows) for name in ("none", "enhanced", "basic")]
    batch = batches[0]
    assert all(torch.equal(other[name], tensor) for other in batches for name, tensor in batch.items())

    for number, row in enumerate(rows):
        length = len(row["input_ids"]) + 2
        original = [CLS, *row["input_ids"], SEP]
        ids, labels = batch["encoder_input_ids"][number].tolist(), batch["encoder_labels"][number].tolist()
        assert batch["encoder_attention_mask"][number].tolist() == [1] * length + [0] * (53 - length)
        chosen = [position for position, label in enumerate(labels) if label != -100]
        assert 0 < len(chosen) <= masked_tokens(length, 0.3)
        assert all(labels[position] == original[position] for position in chosen)
        assert all(set(word) <= set(chosen) or not set(word) & set(chosen) for word in words_of(row))
        assert [token for p, token in enumerate(ids[:length]) if p not in chosen] == [
            token for p, token in enumerate(original) if p not in chosen
        ]
        assert ids[length:] == [PAD] * (53 - length)
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


@pytest.mark.parametrize("ratio", [0.5, 0.7])
def test_visibility_of_enhanced_decoding(wordpiece_tokenizer: Any, ratio: float) -> None:
    rows = make_rows([30, 7, 150])
    batch = RetroMAECollator(wordpiece_tokenizer, decoder_mask_ratio=ratio)(rows)

    visible = batch["decoder_attention_mask"]
    assert (visible.dtype, tuple(visible.shape)) == (torch.bool, (3, 152, 152))
    for number, row in enumerate(rows):
        length = len(row["input_ids"]) + 2
        assert batch["decoder_input_ids"][number].tolist() == [CLS, *row["input_ids"], SEP] + [PAD] * (152 - length)
        assert batch["decoder_labels"][number].tolist() == [-100, *row["input_ids"]] + [-100] * (153 - length)
        words, size = words_of(row), masked_tokens(length, ratio)
        for i in range(152):
            seen = set(visible[number, i].nonzero()[:, 0].tolist())
            if i >= length:
                assert not seen
                continue
            assert seen <= set(range(length)) - {i}
            assert (0 in seen) == (i != 0)
            assert (length - 1 in seen) == (i != length - 1)
            hidden = set(range(length)) - seen - {i}
            assert size - 4 <= len(hidden) <= size  # itself may be one more of them
            for word in words:
                others = set(word) - {i}
                assert others <= hidden or not others & hidden


def test_rows_draw_from_a_limited_number_of_sets(wordpiece_tokenizer: Any) -> None:
    row = {"span": 3, "input_ids": [5] * 1000, "word_starts": [1] * 1000}
    visible = RetroMAECollator(wordpiece_tokenizer)([row])["decoder_attention_mask"][0]
    # Rows of one set differ in the two positions that are their own, at most; others in about half of all.
    first = [(visible != visible[i]).sum(1).le(2).nonzero()[0, 0].item() for i in range(1002)]
    assert 110 < len(set(first)) <= MASK_SETS
    hidden_share = 1 - visible[:, 1:-1].float().mean(1)
    assert hidden_share.min() >= 0.5 and hidden_share.max() <= 0.505
    assert (visible.float().mean(0)[1:-1] - 0.5).abs().max() < 0.3  # each token is hidden from about half of the rows


def test_basic_decoding(wordpiece_tokenizer: Any) -> None:
    rows = make_rows([60, 7])
    batch = RetroMAECollator(wordpiece_tokenizer, decoder="basic", decoder_mask_ratio=0.8)(rows)

    assert torch.equal(batch["decoder_attention_mask"], batch["encoder_attention_mask"])
    for number, row in enumerate(rows):
        original = [CLS, *row["input_ids"], SEP]
        ids, labels = batch["decoder_input_ids"][number].tolist(), batch["decoder_labels"][number].tolist()
        masked = [position for position, label in enumerate(labels) if label != -100]
        size = masked_tokens(len(original), 0.8)
        assert size - 3 <= len(masked) <= size
        assert all(labels[position] == original[position] for position in masked)
        expected = [MASK if position in masked else token for position, token in enumerate(original)]
        assert ids[: len(original)] == expected
        assert all(set(word) <= set(masked) or not set(word) & set(masked) for word in words_of(row))
    assert not torch.equal(batch["decoder_labels"], batch["encoder_labels"])


def test_one_span_is_the_same_in_every_batch(wordpiece_tokenizer: Any) -> None:
    rows = make_rows([20, 90, 5, 20])
    collator = RetroMAECollator(wordpiece_tokenizer, seed=3)
    alone, together = collator([rows[0]]), collator(rows)
    same_but_padding(alone, together, 22)
    same_but_padding(RetroMAECollator(wordpiece_tokenizer, seed=3, pad_to_multiple_of=64)([rows[0]]), together, 22)

    def masks(batch: dict[str, torch.Tensor]) -> list[list[int]]:
        return batch["encoder_labels"].tolist() + batch["decoder_attention_mask"].flatten(1).int().tolist()

    assert masks(collator([rows[0]])) == masks(alone)
    assert masks(RetroMAECollator(wordpiece_tokenizer, seed=4)([rows[0]])) != masks(alone)
    assert masks(collator([rows[0] | {"span": 9}])) != masks(alone)
    collator.epoch = 1
    assert masks(collator([rows[0]])) != masks(alone)
    assert masks(RetroMAECollator(wordpiece_tokenizer, seed=3, epoch=1)([rows[0]])) == masks(collator([rows[0]]))


def test_spans_of_one_token_and_of_none(wordpiece_tokenizer: Any) -> None:
    rows = [
        {"span": 0, "input_ids": [7], "word_starts": [1]},
        {"span": 1, "input_ids": [], "word_starts": []},
        {"span": 2, "input_ids": [7, 8], "word_starts": [1, 0]},  # a word that is longer than the encoder may mask
    ]
    batch = RetroMAECollator(wordpiece_tokenizer)(rows)
    assert batch["encoder_labels"].tolist() == [[-100, 7, -100, -100], [-100] * 4, [-100] * 4]
    assert batch["decoder_labels"].tolist() == [[-100, 7, -100, -100], [-100] * 4, [-100, 7, 8, -100]]
    visible = batch["decoder_attention_mask"].int().tolist()
    assert visible[0] == [[0, 0, 1, 0], [1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert visible[1] == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert visible[2] == [[0, 0, 0, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 0, 0, 0]]


def test_lengths(wordpiece_tokenizer: Any) -> None:
    rows = make_rows([20, 30])
    assert RetroMAECollator(wordpiece_tokenizer, pad_to_multiple_of=8)(rows)["encoder_labels"].shape == (2, 32)
    collator = RetroMAECollator(wordpiece_tokenizer, pad_to_multiple_of=64, max_length=32)
    batch = collator(rows)  # no wider than there are positions
    assert batch["decoder_attention_mask"].shape == (2, 32, 32)
    with pytest.raises(ValueError):
        collator(make_rows([31]))


def test_what_would_be_masked_wrongly_is_rejected(wordpiece_tokenizer: Any, bpe_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="decoder must be"):
        RetroMAECollator(wordpiece_tokenizer, decoder="other")
    with pytest.raises(UserError, match="from 0 to 1"):
        RetroMAECollator(wordpiece_tokenizer, encoder_mask_ratio=30)
    with pytest.raises(UserError, match="has no mask token"):
        RetroMAECollator(bpe_tokenizer)
    with pytest.raises(IndexError):
        RetroMAECollator(wordpiece_tokenizer)([{"span": 5, "input_ids": [7, 9000], "word_starts": [1, 1]}])
