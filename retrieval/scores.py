"""How well each of many texts on disk fits each of many anchors: by vectors here, by BM25 in `bm25_scores`.

Both answer the same two questions, in blocks, so that neither the corpus nor all its scores are ever in memory: the scores
of some anchors against all texts, and of pairs of an anchor and a text.

Letters in names: A anchors, N texts of a block, P pairs, D the vectors' dimension.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from revela_hub.retrieval.disk import key_of
from revela_hub.retrieval.texts import Texts
from revela_hub.retrieval.vector_store import VectorStore

if TYPE_CHECKING:
    from torch import Tensor

SCORE_COLUMNS = 2048
"""Texts scored at a time: with 4,096 anchors 32 MiB of float32 scores."""


class Corpus:
    """Several collections of texts, numbered as one; no text is in two of them."""

    def __init__(self, parts: Sequence[Texts]) -> None:
        """Takes the collections in their order."""
        self.parts = parts
        self.starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, rows: Iterable[int]) -> list[str]:
        """The texts of these numbers."""
        wanted = np.fromiter(rows, dtype=np.int64)
        texts = np.empty(len(wanted), dtype=object)
        for part, chosen, local in split_rows(wanted, self.starts):
            texts[chosen] = self.parts[part].read(local.tolist())
        return list(texts)

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The number of the text with each of these keys, -1 where there is none."""
        rows = np.full(len(keys), -1, dtype=np.int64)
        for start, part in zip(self.starts.tolist(), self.parts, strict=False):
            found = part.find(keys)
            rows = np.where(found >= 0, found + start, rows)
        return rows


def split_rows(
    rows: NDArray[np.int64], starts: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.bool_], NDArray[np.int64]]]:
    """For each part that numbers fall in: which part, which of the numbers, and what they are within the part."""
    parts = np.searchsorted(starts, rows, side="right") - 1
    for part in np.unique(parts).tolist():
        chosen = parts == part
        yield part, chosen, rows[chosen] - starts[part]


class Scores(Protocol):
    """What a search for negatives asks of a ranker.

    Attributes:
        key: Changes when any score may have changed.
        floor: A text with this score or less is no hit.
    """

    key: str
    floor: float

    def score_blocks(self, start: int, stop: int) -> "Iterator[tuple[int, Tensor]]":
        """The anchors from `start` to before `stop` against all texts: the first text's number, and scores (A, N)."""
        ...

    def pair_scores(self, anchors_P: NDArray[np.int64], rows_P: NDArray[np.int64]) -> NDArray[np.float32]:
        """The scores (P,) of pairs: an anchor's number and a text's number each."""
        ...


class VectorScores:
    """Dot products of vectors on disk (of unit vectors: cosines).

    Args:
        anchors: The anchors' vectors.
        parts: The vectors of the parts of the corpus.
        device: Where the products are computed.
    """

    def __init__(self, anchors: VectorStore, parts: Sequence[VectorStore], device: str | torch.device = "cpu") -> None:
        """Opens nothing yet."""
        self.key = key_of(anchors.key, [part.key for part in parts])
        self.floor = -np.inf
        self._anchors = anchors
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])
        self._device = device

    def score_blocks(self, start: int, stop: int) -> "Iterator[tuple[int, Tensor]]":
        """See `Scores`."""
        anchors_AD = torch.from_numpy(self._anchors.read(start, stop)).to(self._device)
        for first, part in zip(self._starts.tolist(), self._parts, strict=False):
            for column in range(0, len(part), SCORE_COLUMNS):
                block_ND = part.read(column, min(column + SCORE_COLUMNS, len(part)))
                yield first + column, anchors_AD @ torch.from_numpy(block_ND).to(self._device).T

    def pair_scores(self, anchors_P: NDArray[np.int64], rows_P: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Scores`."""
        scores_P = np.empty(len(rows_P), dtype=np.float32)
        for part, chosen, local in split_rows(rows_P, self._starts):
            anchors_PD = self._anchors.take(anchors_P[chosen])
            scores_P[chosen] = np.einsum("pd,pd->p", anchors_PD, self._parts[part].take(local))
        return scores_P
