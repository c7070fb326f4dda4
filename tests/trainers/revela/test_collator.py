import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from revela_hub.errors import UserError
from revela_hub.trainers import RevelaCollator

Row = dict[str, Any]


def group(number: int, texts: list[str], size: int = 4) -> Row:
    """A row of `build_groups`: every chunk has its own document, and the last rows are absent."""
    absent = [""] * (size - len(texts))
    return {"group": number, "document": [f"{number}-{n}" for n in range(len(texts))] + absent, "text": texts + absent}


@pytest.fixture
def rows(texts: list[str]) -> list[Row]:
    return [group(0, texts[:4]), group(1, [*texts[3:], "Seven.\n"]), group(2, texts[:2])]


@pytest.fixture
def decoder(bpe_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A decoder's tokenizer whose post-processor ends each text with the EOS."""
    eos = str(bpe_tokenizer.eos_token)
    template = TemplateProcessing(single=f"$A {eos}", special_tokens=[(eos, bpe_tokenizer.eos_token_id)])
    bpe_tokenizer.backend_tokenizer.post_processor = template
    return bpe_tokenizer


@pytest.fixture
def plain(decoder: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokenizer as the language model has it, with nothing added."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(decoder.backend_tokenizer.to_str())
    tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>")


def row_tokens(batch: dict[str, torch.Tensor], prefix: str = "") -> list[list[int]]:
    pairs = zip(batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def orders(collate: RevelaCollator, epoch: int, texts: list[str]) -> tuple[str, ...]:
    collate.epoch = epoch
    batch = collate([group(5, texts, size=len(texts))])
    return tuple(collate.lm_tokenizer.decode(tokens) for tokens in row_tokens(batch))


def test_order_depends_on_seed_epoch_and_group_alone(texts: list[str], plain: PreTrainedTokenizerFast) -> None:
    collate = RevelaCollator(plain, plain, seed=1)
    epochs = [orders(collate, epoch, texts) for epoch in range(6)]

    assert len(set(epochs)) > 4
    assert {tuple(sorted(order)) for order in epochs} == {tuple(sorted(texts))}
    resumed = RevelaCollator(plain, plain, seed=1, epoch=4)
    assert resumed.epoch == 4
    assert orders(resumed, 4, texts) == epochs[4]
    assert orders(RevelaCollator(plain, plain, seed=2), 4, texts) != epochs[4]
    first, second = group(5, texts, 6), group(6, texts, 6)
    collate.epoch = 2
    alone, together = collate([first]), collate([second, first])
    assert row_tokens(alone) == row_tokens(together)[6:]
    assert row_tokens(together)[:6] != row_tokens(together)[6:]  # the other group in another order


def test_workers_see_the_epoch(rows: list[Row], plain: PreTrainedTokenizerFast) -> None:
    collate = RevelaCollator(plain, plain)
    loader = DataLoader(rows, batch_size=1, collate_fn=collate, num_workers=1, persistent_workers=True)
    expected = RevelaCollator(plain, plain)

    for epoch in range(3):
        collate.epoch = expected.epoch = epoch
        for row, batch in zip(rows, loader, strict=True):
            assert torch.equal(batch["input_ids"], expected([row])["input_ids"])


def test_language_model_sees_the_bos_that_its_tokenizer_adds(
    texts: list[str], plain: PreTrainedTokenizerFast, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    bos = "<|endoftext|>"
    template = TemplateProcessing(single=f"{bos} $A {bos}", special_tokens=[(bos, plain.eos_token_id)])
    bpe_tokenizer.backend_tokenizer.post_processor = template
    bpe_tokenizer.bos_token = bos

    batch = RevelaCollator(plain, bpe_tokenizer, max_length=20)([group(0, ["Tokyo", texts[1]], size=2)])

    short, long = sorted(row_tokens(batch), key=len)
    assert short == [plain.eos_token_id, *plain("Tokyo")["input_ids"]]  # and no end token
    assert long == [plain.eos_token_id, *plain(texts[1])["input_ids"]][:20]


@pytest.mark.parametrize("max_length", [12, 25, 160])
@pytest.mark.parametrize("span", ["full", "first_half"])
def test_end_token_stays_when_a_chunk_is_cut(
    texts: list[str], decoder: PreTrainedTokenizerFast, plain: PreTrainedTokenizerFast, max_length: int, span: Any
) -> None:
    collate = RevelaCollator(decoder, plain, max_length=max_length, similarity_span=span, passage_prompt="P: ")

    batch = collate([group(0, [texts[1] * 9, texts[0], "a"], size=3)])

    tokens = row_tokens(batch, "retriever_")
    assert [row[-1] for row in tokens] == [decoder.eos_token_id] * 3
    assert max(len(row) for row in row_tokens(batch)) == max_length
    prompt = plain("P: ")["input_ids"]
    room = max_length - len(prompt) - 1
    longest = len(prompt) + 1 + (room if span == "full" else math.ceil(room / 2))
    assert max(len(row) for row in tokens) == longest


def halved(tokens: list[int]) -> list[int]:
    return tokens[: math.ceil(len(tokens) / 2)]


@pytest.mark.parametrize("prompt", ["Passage: ", "", "passage:"])
def test_first_half_of_the_chunk(
    texts: list[str], wordpiece_tokenizer: BertTokenizerFast, plain: PreTrainedTokenizerFast, prompt: str
) -> None:
    collate = RevelaCollator(wordpiece_tokenizer, plain, similarity_span="first_half", passage_prompt=prompt)

    batch = collate([group(0, [*texts, "the", "the fox", "Paris Paris Paris"], size=9)])

    def own(text: str) -> list[int]:
        ids: list[int] = wordpiece_tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    cls, sep = wordpiece_tokenizer.cls_token_id, wordpiece_tokenizer.sep_token_id
    lm_texts = [plain.decode(tokens) for tokens in row_tokens(batch)]
    assert row_tokens(batch, "retriever_") == [[cls, *own(prompt), *halved(own(text)), sep] for text in lm_texts]
    whole = RevelaCollator(wordpiece_tokenizer, plain)([group(0, texts, size=6)])
    assert [plain.decode(tokens) for tokens in row_tokens(whole)] != texts  # shuffled, and the LM sees all of them
    assert sorted(plain.decode(tokens) for tokens in row_tokens(whole)) == sorted(texts)


def test_a_row_may_have_its_own_span(
    texts: list[str], decoder: PreTrainedTokenizerFast, plain: PreTrainedTokenizerFast
) -> None:
    prose, code = group(0, texts[:4]), group(1, texts[:4]) | {"similarity_span": "full"}
    collate = RevelaCollator(decoder, plain, similarity_sides="query_passage", similarity_span="first_half")

    batch = collate([prose, code])

    for rows, span in ((slice(4), "first_half"), (slice(4, 8), "full")):
        own: Any = span
        only = RevelaCollator(decoder, plain, similarity_sides="query_passage", similarity_span=own)([prose, code])
        for side in ("retriever_", "retriever_query_"):
            assert row_tokens(batch, side)[rows] == row_tokens(only, side)[rows]


class ForgetfulTokenizer(PreTrainedTokenizerFast):
    """Adds its end token itself, before cutting."""

    def __call__(self, text: Any, **options: Any) -> Any:
        encoded = super().__call__(text, add_special_tokens=False)
        limit = options.get("max_length") if options.get("truncation") else None
        encoded["input_ids"] = [*encoded["input_ids"], self.eos_token_id][:limit]
        return encoded


def loses_its_end(tokenizer: PreTrainedTokenizerFast) -> RevelaCollator:
    backend = tokenizer.backend_tokenizer
    forgetful = ForgetfulTokenizer(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|pad|>")
    return RevelaCollator(forgetful, tokenizer)


def no_room(tokenizer: PreTrainedTokenizerFast) -> RevelaCollator:
    return RevelaCollator(tokenizer, tokenizer, max_length=5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (loses_its_end, "drops its end token when it cuts"),
        (no_room, "max_length is 5, but the retriever.s prompt alone has"),
    ],
)
def test_tokenizers_that_will_not_do(
    plain: PreTrainedTokenizerFast, build: Callable[[PreTrainedTokenizerFast], RevelaCollator], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(plain)
