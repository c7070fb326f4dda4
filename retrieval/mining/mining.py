"""Hard-negative mining for pairs of an anchor and a positive, from a corpus of any size, with any ranker.

The negatives are the same as those of `sentence_transformers.util.mine_hard_negatives` (a test compares them). In addition:

- The corpus, its vectors and the hits are on disk. Memory holds at most 256 MiB of vectors, one block of scores, and a few
  numbers per text (BM25 and sparse rankers hold their inverted index in memory). With 50,000 passages and 2,000 anchors the
  process grows by 168 MB, imports included, instead of 669 MB (`benchmarks/mining.py --documents 50000 --rounds 1`).
- An interrupted run resumes.
- BM25, sparse and hybrid rankers mine as well.
- The anchor itself, and the positive in another spelling (`text_key`) or with a title, never become negatives.

Letters in names: A anchors of a block, K hits per anchor, P pairs, n negatives per pair.
"""

import logging
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tqdm.auto import tqdm

from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.files import atomic, claim, key_of, local_path
from revela_hub.retrieval.bm25 import BM25
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.mining.negatives import MiningReport, MiningSettings, choose_negatives
from revela_hub.retrieval.mining.pairs import NumberedPairs, number_pairs
from revela_hub.retrieval.ranker import Ranker
from revela_hub.retrieval.ranking import Own, RankerSettings, build_ranker, ranking_folder
from revela_hub.retrieval.rerank import Reranker
from revela_hub.retrieval.top_k import Hits

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["MinedNegatives", "MiningReport", "MiningSettings", "Model", "RankerSettings", "mine", "mine_negatives"]

logger = logging.getLogger(__name__)

ANCHOR_BLOCK = 4096
"""Anchors searched together; an interruption loses the hits of at most one block."""

Model: TypeAlias = Encoder | type[BM25] | Literal["bm25"]
"""A SentenceTransformer or any other `Encoder`; or BM25, as the class or the string."""


@dataclass(frozen=True)
class MinedNegatives:
    """The result of `mine_negatives`.

    Attributes:
        dataset: The columns `anchor`, `positive` (as in the corpus), `negative_1` to `negative_n`, and with
            `MiningSettings.scores` a list of the scores of the positive and the negatives. Pairs are in the order of their anchors' first appearance.
        report: Counts of mined and skipped pairs.
    """

    dataset: "Dataset"
    report: MiningReport


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
    """Mines hard negatives for pairs.

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
        UserError: No pairs or no text, no negatives within the limits, vectors with NaN or infinity, a full disk.
        ValueError: The numbers of anchors and positives differ; a cache without the model's identity.
    """
    from datasets import Dataset

    if len(anchors) != len(positives):
        raise ValueError(f"{len(anchors)} anchors and {len(positives)} positives")
    settings = settings or MiningSettings()
    with ranking_folder(cache_dir, ranking or RankerSettings()) as (folder, ranking):
        pairs = zip(anchors, positives, strict=True)
        mined = mine(pairs, corpus, ranker, settings, ranking, folder=folder, sparse=sparse)
        # In Arrow batches, because a list of Python rows needs more memory.
        batches = iter(lambda: list(islice(mined.rows, ANCHOR_BLOCK)), [])
        schema = _schema(settings)
        table = pa.Table.from_batches((pa.RecordBatch.from_pylist(rows, schema) for rows in batches), schema)
    return MinedNegatives(Dataset(table), mined.report)


def _schema(settings: MiningSettings) -> pa.Schema:
    """Return the schema of `MinedNegatives.dataset`."""
    from datasets import Features, Value

    names = ["anchor", "positive", *_negative_names(settings)]
    scores = {"scores": [Value("float32")]} if settings.scores else {}
    return Features({name: Value("string") for name in names} | scores).arrow_schema


@dataclass(frozen=True)
class MinedRows:
    """The rows of `MinedNegatives.dataset` as an iterator; `report` is complete when it is exhausted."""

    rows: Iterator[dict[str, Any]]
    report: MiningReport


def mine(
    pairs: Iterable[tuple[str, str]],
    corpus: Iterable[str] | None,
    ranker: Model,
    settings: MiningSettings,
    ranking: RankerSettings,
    *,
    folder: str | Path,
    sparse: Any = None,
    reranker: Reranker | Own | None = None,
) -> MinedRows:
    """`mine_negatives` for more pairs than fit in memory: yields rows instead of returning a data set.

    `folder` holds texts, vectors and hits. A reranker scores candidates and positives again; the limits then apply to its scores.
    """
    folder = claim(local_path(folder))
    report = MiningReport(dropped=settings.fewer == "drop")
    numbered = number_pairs(pairs, corpus, folder, report)
    if settings.range_min + settings.num_negatives >= len(numbered.corpus):  # before anything is encoded
        raise UserError(
            f"the corpus is too small for {counted(settings.num_negatives, 'negative')} per pair: it has"
            f" {counted(len(numbered.corpus), 'different document')}"
        )
    if ranker == "bm25" or ranker is BM25:
        ranking, ranker = replace(ranking, mode="bm25"), None  # type: ignore[assignment]
    # Candidates' scores are compared with the positives': both are scaled over the same hits, and all are the reranker's.
    depth = max(ranking.rerank_depth, settings.depth(int(np.bincount(numbered.anchors_P).max())))
    ranking = replace(ranking, depth=max(ranking.depth, depth), rerank_depth=depth, rerank_weight=1.0)
    built = build_ranker(
        numbered.corpus,
        ranking,
        folder,
        dense=ranker,  # type: ignore[arg-type]
        sparse=sparse,
        reranker=reranker,
    )
    return MinedRows(_Miner(numbered, built, settings, folder, report).rows(ranking.show_progress_bar), report)


@dataclass(frozen=True)
class _Miner:
    numbered: NumberedPairs
    ranker: Ranker
    settings: MiningSettings
    folder: Path
    report: MiningReport

    def rows(self, show: bool) -> Iterator[dict[str, Any]]:
        """Search and filter one block of anchors after the other."""
        numbered, settings, report = self.numbered, self.settings, self.report
        anchors, size = len(numbered.anchors_A), len(numbered.corpus)
        max_positives = int(np.bincount(numbered.anchors_P).max())
        depth = min(settings.depth(max_positives), size)
        texts = numbered.texts.fingerprint
        kept = self.folder / f"hits-{key_of(self.ranker.key, numbered.corpus.fingerprint, texts, depth, 'same text')}"
        with tqdm(total=anchors, desc="Mining", unit=" anchors", disable=not show) as bar:
            for start in range(0, anchors, ANCHOR_BLOCK):
                stop = min(start + ANCHOR_BLOCK, anchors)
                pairs = slice(*map(int, np.searchsorted(numbered.anchors_P, [start, stop])))
                found, scores_P = self._found(start, stop, pairs, depth, kept / f"{start}-{stop}.npz")
                report.candidates += int((found.rows_QK >= 0).sum())
                report.unanswered += int((found.rows_QK < 0).all(axis=1).sum())
                anchors_P = numbered.anchors_P[pairs] - start
                codes_AK = found.rows_QK + np.arange(stop - start)[:, None] * size
                forbidden = {
                    "being a positive": np.isin(codes_AK, anchors_P * size + numbered.positives_P[pairs]),
                    "being the anchor": (found.rows_QK >= 0)
                    & (numbered.same_N[found.rows_QK] == numbered.same_A[start:stop, None]),
                }
                chosen_An = choose_negatives(
                    found,
                    forbidden,
                    # As in mine_hard_negatives: of several positives, the one that scores lowest sets the margin.
                    np.minimum.reduceat(scores_P, np.searchsorted(anchors_P, np.arange(stop - start))),
                    settings,
                    last_rank=settings.last_rank(max_positives),
                    first_anchor=start,
                    removed=report.removed,
                )
                yield from self._block_rows(found, chosen_An, start, pairs, scores_P)
                bar.update(stop - start)
        self._check_found()

    def _found(self, start: int, stop: int, pairs: slice, depth: int, path: Path) -> tuple[Hits, NDArray[np.float32]]:
        """Return the best texts of a block of anchors and the scores (P,) of its pairs, from the disk if an intact file exists."""
        if path.is_file():
            try:
                with np.load(path, allow_pickle=False) as arrays:
                    return Hits(arrays["scores"], arrays["rows"]), arrays["pairs"]
            except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
                logger.warning("%s is damaged (%s): searching for its anchors again", path, error)
        numbered = self.numbered
        queries = self.ranker.encode(numbered.texts.read(numbered.anchors_A[start:stop].tolist()))
        hits = self.ranker.search(queries, depth)
        scores_P = self.ranker.pair_scores(queries, numbered.anchors_P[pairs] - start, numbered.positives_P[pairs])
        with atomic(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, scores=hits.scores_QK, rows=hits.rows_QK, pairs=scores_P)
        return hits, scores_P

    def _block_rows(
        self, found: Hits, chosen_An: NDArray[np.int64], start: int, pairs: slice, scores_P: NDArray[np.float32]
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows for the pairs of one block of anchors."""
        numbered, settings, report = self.numbered, self.settings, self.report
        names = _negative_names(settings)
        for pair, positive_score in zip(range(pairs.start, pairs.stop), scores_P.tolist(), strict=True):
            anchor = int(numbered.anchors_P[pair])
            columns = [column for column in chosen_An[anchor - start].tolist() if column >= 0]
            enough = len(columns) == settings.num_negatives
            report.mined += enough
            report.fewer += not enough
            report.found += bool(columns)
            if not enough and settings.fewer == "drop":
                continue
            negative_scores = found.scores_QK[anchor - start, columns].tolist()
            report.count(positive_score, negative_scores)
            # The positive as it is in the corpus: like the negatives, with its title.
            rows = [int(numbered.positives_P[pair]), *found.rows_QK[anchor - start, columns].tolist()]
            [text] = numbered.texts.read([int(numbered.anchors_A[anchor])])
            row: dict[str, Any] = {"anchor": text, "positive": None, **dict.fromkeys(names)}
            row |= dict(zip(("positive", *names), numbered.corpus.read(rows), strict=False))
            yield row | ({"scores": [positive_score, *negative_scores]} if settings.scores else {})

    def _check_found(self) -> None:
        """Raises UserError if there is nothing to train on."""
        report = self.report
        if not report.candidates:
            raise UserError("no negatives: no document shares a term with any anchor; use a dense or hybrid ranker")
        if not report.negatives:
            reasons = ", ".join(f"{number:,} by {reason}" for reason, number in report.removed.most_common() if number)
            raise UserError(
                f"no pair has {counted(self.settings.num_negatives, 'negative')}, of {counted(report.candidates, 'candidate')} (removed:"
                f" {reasons or 'none'}): relax the limits, keep pairs with fewer (fewer='keep'), or use a larger corpus"
            )


def _negative_names(settings: MiningSettings) -> list[str]:
    return [f"negative_{number}" for number in range(1, settings.num_negatives + 1)]
