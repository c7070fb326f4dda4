"""Hard-negative mining for pairs of an anchor and a positive, from a corpus of any size, with any ranker.

The negatives are the same as those of `sentence_transformers.util.mine_hard_negatives` (a test compares them). In addition:

- The corpus, its vectors and the hits are on disk. Memory holds the pairs, at most 256 MiB of vectors, one block of scores, and a few
  numbers per text (BM25 and sparse rankers hold their inverted index in memory).
- An interrupted run resumes.
- BM25, sparse and hybrid rankers mine as well.
- The anchor itself, and the positive in another spelling (`text_key`) or with a title, never become negatives.

Letters in names: A anchors of a block, K hits per anchor, P pairs, N texts of the corpus, n negatives per pair.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.files import atomic, claim, key_of, local_path
from revela_hub.output import progress_bar
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.hits import Hits, Ranker
from revela_hub.retrieval.mining_input import NumberedPairs, number_pairs
from revela_hub.retrieval.ranking import Own, RankerSettings, build_ranker, ranking_folder
from revela_hub.retrieval.rerank import Reranker

if TYPE_CHECKING:
    from datasets import Dataset

ANCHOR_BLOCK = 16_384
"""Anchors searched together; an interruption loses the hits of at most one block."""

Model: TypeAlias = Encoder | Literal["bm25"]
"""A SentenceTransformer or any other `Encoder`; or BM25."""


@dataclass(frozen=True)
class MiningSettings:
    """The selection of negatives.

    Scores are those of the ranker: cosine, dot product or BM25. The positive's score is the score of the anchor with its
    positive; with several positives, the lowest one.

    Attributes:
        num_negatives: Negatives per pair.
        relative_margin: A negative scores at most `positive - relative_margin * |positive|`; 0.05 means at most 95% of a
            positive score (NV-Embed section 4.1, TopK-PercPos of NV-Retriever). None: no such limit.
        range_min: Skip this many of the best texts that pass the filters above.
        range_max: Take negatives from at most this many of the best texts. None: `range_min`, plus ten per negative if a
            margin is set, otherwise one.
        sampling: "top" takes the best remaining texts, "random" samples among them.
        fewer: The treatment of pairs with too few negatives: "drop" them, or "keep" them with None for missing ones.
        scores: Whether to add the column `scores`: the positive's, then the negatives'.
        seed: The seed of "random".
    """

    num_negatives: int = 1
    relative_margin: float | None = 0.05
    range_min: int = 0
    range_max: int | None = None
    sampling: Literal["top", "random"] | str = "top"
    fewer: Literal["drop", "keep"] | str = "drop"
    scores: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise a `UserError` for an unknown choice."""
        if self.sampling not in ("top", "random") or self.fewer not in ("drop", "keep"):
            raise UserError(f"sampling is top or random, and fewer is drop or keep, not {self.sampling}, {self.fewer}")

    def last_rank(self, max_positives: int = 1) -> int:
        """Return `range_max` or its default, as in `sentence_transformers.util.mine_hard_negatives`."""
        if self.range_max is not None:
            return self.range_max
        factor = 1 if self.relative_margin is None else 10
        return self.range_min + self.num_negatives * factor + max_positives

    @property
    def columns(self) -> list[str]:
        """The columns of text."""
        return ["anchor", "positive", *(f"negative_{number}" for number in range(1, self.num_negatives + 1))]


@dataclass
class MiningReport:
    """Counts of mined and skipped pairs; `str(report)` is printed by the command."""

    pairs: int = 0
    """Distinct pairs with text on both sides."""
    anchors: int = 0
    """Their distinct anchors."""
    documents: int = 0
    """Distinct texts that were searched, including the positives."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Skipped input: `empty pairs`, `duplicate pairs`, `empty documents`, `duplicate documents`."""
    candidates: int = 0
    """Hits that were considered, over all anchors."""
    removed: Counter[str] = field(default_factory=Counter)
    """Candidates removed by each filter, in the order of the filters; each candidate is counted once."""
    mined: int = 0
    """Pairs with all their negatives."""
    fewer: int = 0
    """Pairs with too few negatives."""
    without: int = 0
    """Pairs without any negative."""

    def __str__(self) -> str:
        """Four lines: the pairs, the corpus, the filters, the result."""
        parts = [f"{number:,} {reason}" for reason, number in self.skipped.items() if number]
        skipped = f"; skipped: {', '.join(parts)}" if parts else ""
        removed = ", ".join(f"{number:,} by {reason}" for reason, number in self.removed.items()) or "none"
        remedy = " (raise range_max to consider more candidates)" if self.fewer else ""
        return "\n".join(
            [
                f"{counted(self.pairs, 'pair')} of {counted(self.anchors, 'anchor')}",
                f"{counted(self.documents, 'document')}{skipped}",
                f"{counted(self.candidates, 'candidate')}, removed: {removed}",
                f"{counted(self.mined, 'pair')} with all negatives, {self.fewer:,} with fewer{remedy}",
            ]
        )


class MinedNegatives(NamedTuple):
    """The result of `mine_negatives`."""

    dataset: "Dataset"
    """The columns `anchor`, `positive` (as in the corpus), `negative_1` to `negative_n`, and with `MiningSettings.scores` a list of the
    scores of the positive and the negatives. Pairs are in the order of their anchors' first appearance."""
    report: MiningReport
    """Counts of mined and skipped pairs."""


def mine_negatives(
    anchors: Sequence[str],
    positives: Sequence[str],
    corpus: Iterable[str] | None,
    ranker: Model,
    settings: MiningSettings | None = None,
    ranking: RankerSettings | None = None,
    *,
    cache_dir: str | Path | None = None,
    sparse: Any = None,
) -> MinedNegatives:
    """Mine hard negatives for pairs.

    Args:
        anchors: The queries. A repeated anchor has several positives, none of which becomes its negative.
        positives: The positive of each anchor.
        corpus: The texts to search, read once; the positives are searched as well. None: only the positives.
        ranker: A SentenceTransformer, or any other `Encoder`; or "bm25".
        settings: Selection of negatives; default: one per pair, with at most 95% of the positive's score.
        ranking: Settings of the ranker.
        cache_dir: A folder to keep texts, vectors and hits in for the next run; None keeps nothing. With an encoder it
            requires `RankerSettings.identity`.
        sparse: A `SparseEncoder`, for the mode "sparse" or a hybrid with it.

    Raises:
        UserError: No pairs or no text, no negatives within the limits, vectors with NaN or infinity.
        ValueError: The numbers of anchors and positives differ; a cache without the model's identity.
    """
    from datasets import Dataset, Features, Value

    settings, report = settings or MiningSettings(), MiningReport()
    scores = {"scores": [Value("float32")]} if settings.scores else {}
    features = Features(dict.fromkeys(settings.columns, Value("string")) | scores)
    with ranking_folder(cache_dir, ranking or RankerSettings()) as (folder, ranking):
        pairs = zip(anchors, positives, strict=True)
        rows = list(mine(pairs, corpus, ranker, settings, ranking, report, folder=folder, sparse=sparse))
    return MinedNegatives(Dataset.from_list(rows, features=features), report)


def mine(
    pairs: Iterable[tuple[str, str]],
    corpus: Iterable[str] | None,
    ranker: Model | None,
    settings: MiningSettings,
    ranking: RankerSettings,
    report: MiningReport,
    *,
    folder: str | Path,
    sparse: Any = None,
    reranker: Reranker | Own | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `mine_negatives`, and update the report.

    `folder` holds texts, vectors and hits. A reranker scores candidates and positives again; the limits then apply to its scores.
    """
    folder = claim(local_path(folder))
    numbered = number_pairs(pairs, corpus, folder, report.skipped)
    report.pairs, report.anchors = len(numbered.anchors_P), len(numbered.anchors)
    report.documents = len(numbered.corpus)
    last = settings.range_min + settings.num_negatives
    if last >= min(report.documents, (settings.range_max or last) + 1):  # before anything is encoded
        raise UserError(
            f"the corpus ({counted(report.documents, 'different document')}) or range_max ({settings.range_max}) is too small for"
            f" {counted(settings.num_negatives, 'negative')} per pair and range_min {settings.range_min}"
        )
    if ranker == "bm25":
        ranking, ranker = replace(ranking, mode="bm25"), None
    max_positives = int(np.bincount(numbered.anchors_P).max())
    settings = replace(settings, range_max=settings.last_rank(max_positives))
    # Candidates' scores are compared with the positives': both are scaled over the same hits, and all are the reranker's.
    depth = max(settings.last_rank() + max_positives, ranking.rerank_depth if reranker else 0)
    ranking = replace(ranking, depth=max(ranking.depth, depth), rerank_depth=depth, rerank_weight=1.0)
    built = build_ranker(numbered.corpus, ranking, folder, dense=ranker, sparse=sparse, reranker=reranker)
    of_hits = replace(ranking, device="", batch_size=1, show_progress_bar=False)
    reranked = getattr(reranker, "identity", reranker)
    pairs_P = [numbered.anchors_P.tolist(), numbered.positives_P.tolist()]
    key = key_of(repr(of_hits), reranked, numbered.corpus.fingerprint, numbered.anchors, pairs_P, ANCHOR_BLOCK)
    with progress_bar(desc="Mining", total=report.anchors, unit=" anchors", show=ranking.show_progress_bar) as bar:
        for start in range(0, report.anchors, ANCHOR_BLOCK):
            block = numbered.block(start, start + ANCHOR_BLOCK)
            found, scores_P = _found(built, block, depth, folder / f"hits-{key}" / f"{start}.npz")
            yield from _rows(block, start, found, scores_P, settings, report)
            bar.update(len(block.anchors))
    if report.without == report.pairs or (settings.fewer == "drop" and not report.mined):
        reasons = ", ".join(f"{number:,} by {reason}" for reason, number in report.removed.most_common() if number)
        raise UserError(
            f"no pair has {counted(settings.num_negatives, 'negative')}, of {counted(report.candidates, 'candidate')} (removed:"
            f" {reasons or 'none'}): relax the limits, keep pairs with fewer (fewer='keep'), or use a larger corpus"
        )


def _found(ranker: Ranker, block: NumberedPairs, depth: int, path: Path) -> tuple[Hits, NDArray[np.float32]]:
    """Return the best texts of a block of anchors and the scores (P,) of its pairs, from the disk if they are there."""
    if path.is_file():
        with np.load(path, allow_pickle=False) as arrays:
            return Hits(arrays["scores"], arrays["rows"]), arrays["pairs"]
    hits = ranker.search(block.anchors, depth)
    scores_P = ranker.pair_scores(block.anchors, block.anchors_P, block.positives_P)
    with atomic(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, scores=hits.scores_QK, rows=hits.rows_QK, pairs=scores_P)
    return hits, scores_P


def _rows(
    block: NumberedPairs,
    start: int,
    found: Hits,
    scores_P: NDArray[np.float32],
    settings: MiningSettings,
    report: MiningReport,
) -> Iterator[dict[str, Any]]:
    """Yield the rows for the pairs of a block of anchors, of which `start` is the number of the first one."""
    # Of several positives, the one that scores lowest sets the margin.
    lowest_A = np.minimum.reduceat(scores_P, np.searchsorted(block.anchors_P, np.arange(len(block.anchors))))
    allowed_AK = _allowed(block, found, lowest_A, settings, report)
    for anchor, positive, score in zip(block.anchors_P.tolist(), block.positives_P.tolist(), scores_P, strict=True):
        columns = np.flatnonzero(allowed_AK[anchor])
        if settings.sampling == "random" and len(columns) > settings.num_negatives:
            # One generator per anchor, so that a resumed run draws the same numbers as an uninterrupted one.
            random = np.random.default_rng([settings.seed, start + anchor])
            columns = np.sort(random.choice(columns, settings.num_negatives, replace=False))
        columns = columns[: settings.num_negatives]
        enough = len(columns) == settings.num_negatives
        report.mined += enough
        report.fewer += not enough
        report.without += not len(columns)
        if not enough and settings.fewer == "drop":
            continue
        # The positive as it is in the corpus: like the negatives, with its title.
        texts: list[Any] = block.corpus.read([positive, *found.rows_QK[anchor, columns].tolist()])
        texts += [None] * (1 + settings.num_negatives - len(texts))
        row: dict[str, Any] = dict(zip(settings.columns, [block.anchors[anchor], *texts], strict=True))
        scores = {"scores": [float(score), *found.scores_QK[anchor, columns].tolist()]}
        yield row | (scores if settings.scores else {})


def _allowed(
    block: NumberedPairs, found: Hits, lowest_A: NDArray[np.float32], settings: MiningSettings, report: MiningReport
) -> NDArray[np.bool_]:
    """Return which hits (A, K) may become negatives, and count the others, in the order of `mine_hard_negatives`."""
    rows_AK, scores_AK, lowest_A1 = found.rows_QK, found.scores_QK, lowest_A[:, None]
    size = len(block.corpus)
    codes_AK = rows_AK + np.arange(len(rows_AK))[:, None] * size
    limits = {
        "being a positive": np.isin(codes_AK, block.anchors_P * size + block.positives_P),
        "being the anchor": block.same_N[rows_AK] == block.same_A[:, None],
    }
    if settings.relative_margin is not None:
        margin = np.float32(settings.relative_margin)
        limits["relative margin"] = scores_AK > lowest_A1 - np.abs(lowest_A1) * margin
    left_AK = rows_AK >= 0
    report.candidates += int(left_AK.sum())
    for reason, mask_AK in limits.items():
        report.removed[reason] += int((left_AK & mask_AK).sum())
        left_AK &= ~mask_AK
    rank_AK = left_AK.cumsum(axis=1) - 1
    return left_AK & (rank_AK >= settings.range_min) & (rank_AK < settings.last_rank())
