from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from revela_hub.data.text.masking import (
    Vocabulary,
    masked_tokens,
    replace_chosen,
    visibility,
    whole_word_masks,
)
from revela_hub.errors import UserError


def words_of(starts: list[int], maskable: list[int]) -> list[list[int]]:
    """The positions of each word, by a plain loop."""
    words: list[list[int]] = []
    for position, (start, inside) in enumerate(zip(starts, maskable, strict=True)):
        if start or not words:
            words.append([])
        if inside:
            words[-1].append(position)
    return [word for word in words if word]


def greedy(words: list[list[int]], order: tuple[int, ...], size: int) -> frozenset[int]:
    """The original algorithm, words in the order given."""
    taken: list[int] = []
    for number in order:
        if len(taken) >= size:
            break
        if len(taken) + len(words[number]) <= size:
            taken += words[number]
    return frozenset(taken)


def draw(starts: list[int], maskable: list[int], sizes: list[int], seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return whole_word_masks(np.array(starts, bool), np.array(maskable, bool), np.array(sizes), generator)


def test_words_stay_whole_and_fill_the_mask() -> None:
    generator = np.random.default_rng(1)
    for seed in range(40):
        length = int(generator.integers(3, 200))
        starts = (generator.random(length) < generator.choice([0.2, 0.6, 0.95])).astype(int).tolist()
        maskable = (generator.random(length) < 0.95).astype(int).tolist()
        maskable[0] = maskable[-1] = 0
        sizes = generator.integers(1, length, size=30).tolist()

        masks = draw(starts, maskable, sizes, seed)

        words = words_of(starts, maskable)
        assert masks.shape == (30, length) and masks.dtype == np.bool_
        assert not masks[:, ~np.array(maskable, bool)].any()
        for mask, size in zip(masks, sizes, strict=True):
            assert all(mask[word].all() or not mask[word].any() for word in words)
            room = size - mask.sum()
            assert room >= 0
            assert room == 0 or all(mask[word].all() or len(word) > room for word in words)


@pytest.mark.parametrize(
    ("starts", "size"),
    [
        ([0, 1, 1, 0, 1, 0, 0, 1, 1, 0], 4),  # words of 1, 2, 3, 1 tokens, and one of 1 before [SEP]
        ([0, 1, 0, 0, 1, 0, 1, 0, 1, 0], 3),
        ([0, 1, 0, 0, 0, 1, 0, 0, 1, 0], 5),
    ],
)
def test_distribution_is_that_of_the_original_algorithm(starts: list[int], size: int) -> None:
    maskable = [0, *[1] * 8, 0]
    words = words_of(starts, maskable)
    orders = list(permutations(range(len(words))))
    expected = Counter(greedy(words, order, size) for order in orders)
    draws = 40_000

    masks = draw(starts, maskable, [size] * draws)

    found = Counter(frozenset(np.flatnonzero(mask).tolist()) for mask in masks)
    assert found.keys() == expected.keys()
    for chosen, count in expected.items():
        share = count / len(orders)
        deviation = (share * (1 - share) / draws) ** 0.5
        assert abs(found[chosen] / draws - share) < 5 * deviation


@pytest.mark.parametrize(
    ("starts", "maskable", "size", "expected"),
    [
        ([0, 1, 0, 0, 0], [0, 1, 1, 1, 0], 2, {()}),  # one word of three tokens does not fit
        ([0, 1, 0, 0, 0], [0, 1, 1, 1, 0], 3, {(1, 2, 3)}),
        ([1, 1, 1], [0, 0, 0], 2, {()}),  # special tokens alone
        ([0, 0, 0, 1, 0], [0, 1, 1, 1, 0], 2, {(1, 2), (3,)}),  # tokens before the first start are a word
        ([0, 1, 0, 0, 1, 0], [0, 1, 0, 1, 1, 0], 2, {(1, 3), (4,)}),  # a word around a special token is one word
    ],
)
def test_words_that_can_be_masked(starts: list[int], maskable: list[int], size: int, expected: set[Any]) -> None:
    masks = draw(starts, maskable, [size] * 50)
    assert {tuple(np.flatnonzero(mask).tolist()) for mask in masks} == expected


def test_size_of_a_mask() -> None:
    assert draw([1] * 50, [1] * 50, list(range(1, 51))).sum(axis=1).tolist() == list(range(1, 51))
    assert [masked_tokens(length, 0.3) for length in (2, 3, 5, 6, 10, 128, 512)] == [1, 1, 2, 2, 3, 38, 154]
    assert masked_tokens(5, 0.5) == 2  # Python's rounding, as in the original
    assert masked_tokens(2, 0.1) == 1


def test_replacements_by_their_draws() -> None:
    tokens = np.array([10, 11, 12, 13, 14])
    chosen = np.array([True, True, True, True, False])
    draws = np.array([0.0, 0.79, 0.81, 0.91, 0.0])
    replaced = replace_chosen(tokens, chosen, draws, np.array([20, 21, 22, 23, 24]), 3)
    assert replaced.tolist() == [3, 3, 22, 13, 14]


def test_visibility_by_rows() -> None:
    hidden = np.array([[0, 1, 0, 0], [0, 0, 1, 0]], bool)
    visible = visibility(hidden, np.array([0, 1, 1, 0]))
    assert visible.astype(int).tolist() == [[0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 1], [1, 0, 1, 0]]


def test_tokenizers_that_do_not_suit(bpe_tokenizer: Any, wordpiece_tokenizer: Any) -> None:
    assert len(Vocabulary.of(wordpiece_tokenizer).is_special) == len(wordpiece_tokenizer)
    with pytest.raises(UserError, match="has no mask token"):
        Vocabulary.of(bpe_tokenizer)
    bpe_tokenizer.add_special_tokens({"mask_token": "<mask>"})
    with pytest.raises(UserError, match="does not add one special token before and one after a text"):
        Vocabulary.of(bpe_tokenizer)
    wordpiece_tokenizer.pad_token = None
    with pytest.raises(UserError, match="has no padding token; set its pad_token"):
        Vocabulary.of(wordpiece_tokenizer)
