"""Hard negatives for pairs of an anchor and a positive, from a corpus of any size, with any retriever or BM25.

The method is that of `sentence_transformers.util.mine_hard_negatives`, whose results these are, text for text, on a corpus
that both can search (`tests/search/test_mining.py` compares them). It is not called here, because it

- holds the corpus and its vectors in memory, and the hits of all anchors;
- loses what was encoded when it is interrupted: its cache is written when everything is encoded;
- needs a `SentenceTransformer`, so that there is no BM25;
- compares texts letter by letter, so that the positive with another line break is its own negative, and an anchor that is
  itself in the corpus (a duplicate question) too;
- always compares by cosine, also for a model made for dot products.

What happens here: anchors, positives and corpus are written to an Arrow file and each text is kept once (`texts`); their
vectors are written in blocks (`vector_store`), or their words are counted (`bm25_scores`); block by block of the anchors,
the best texts of the whole corpus are found and saved; the limits are applied to those (`negatives`). Every step finds on
disk what an earlier run has done. With other limits only the last is done again.

Letters in names: A anchors of a block, K hits of each, P pairs, n negatives of each.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from revela_hub.errors import UserError
from revela_hub.retrieval.bm25 import BM25
from revela_hub.retrieval.bm25_scores import BM25Scores
from revela_hub.retrieval.disk import make_folder
from revela_hub.retrieval.encoder import Encoder, as_vectors
from revela_hub.retrieval.mining.hits import HitsOnDisk
from revela_hub.retrieval.mining.negatives import Found, MiningReport, MiningSettings, choose_negatives
from revela_hub.retrieval.mining.pairs import NumberedPairs, number_pairs
from revela_hub.retrieval.scores import Scores, VectorScores
from revela_hub.retrieval.texts import Texts
from revela_hub.retrieval.vector_store import VectorStore

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["MinedNegatives", "MiningReport", "MiningSettings", "Ranker", "RankerSettings", "mine", "mine_negatives"]

ANCHOR_BLOCK = 4096
"""Anchors for which the corpus is read once, and whose hits an interruption can cost."""

Ranker: TypeAlias = Encoder | type[BM25] | Literal["bm25"]
"""A SentenceTransformer or anything like `Encoder`; or BM25, as the class or as the word."""


@dataclass(frozen=True)
class RankerSettings:
    """How the ranker is used. To BM25 only `show_progress_bar` says something.

    Attributes:
        identity: What identifies the model in a cache folder (`revela_hub.retrieval.encoder.model_identity`).
        similarity: "cosine" or "dot".
        query_prompt: Goes before every anchor, instead of the model's own prompt for queries.
        document_prompt: Goes before every text, instead of the model's own prompt for documents.
        batch_size: Texts per forward pass.
        dtype: "float32" or "float16": what vectors are kept as.
        device: Where scores are computed.
        show_progress_bar: Whether to show progress bars on standard error.
    """

    identity: str = ""
    similarity: Literal["cosine", "dot"] | str = "cosine"
    query_prompt: str | None = None
    document_prompt: str | None = None
    batch_size: int = 32
    dtype: Literal["float32", "float16"] | str = "float32"
    device: str | torch.device = "cpu"
    show_progress_bar: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a similarity or a type that there is not."""
        for name, choices in (("similarity", ("cosine", "dot")), ("dtype", ("float32", "float16"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(choices)}, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class MinedNegatives:
    """The result of `mine_negatives`.

    Attributes:
        dataset: Columns `anchor`, `positive`, `negative_1` to `negative_n`, and with `scores` in the settings a list of
            the scores of positive and negatives. The pairs come in the order of their anchors' first appearance.
        report: What was mined and what was not.
    """

    dataset: "Dataset"
    report: MiningReport


def mine_negatives(
    anchors: Sequence[str],
    positives: Sequence[str],
    corpus: Iterable[str] | None,
    ranker: Ranker,
    settings: MiningSettings | None = None,
    ranking: RankerSettings | None = None,
    *,
    cache_dir: str | Path | None = None,
) -> MinedNegatives:
    """Finds hard negatives for pairs.

    Args:
        anchors: The queries. One that comes several times has several positives, none of which becomes its negative.
        positives: The positive of each.
        corpus: The texts to look in, read once and not held in memory; the positives are searched with it. None: only
            the positives.
        ranker: A SentenceTransformer, or anything like `Encoder`; or "bm25".
        settings: Which texts become negatives; by default one, at most 95% as similar as the positive.
        ranking: How the ranker is used.
        cache_dir: Where texts, vectors and hits are kept for the next run; None keeps nothing. An encoder needs its
            `RankerSettings.identity` then.

    Raises:
        UserError: No pair and no text, no negatives within the limits, vectors that are not numbers, a full disk.
        ValueError: As many anchors as positives are needed; a cache without the model's identity.
    """
    from datasets import Dataset, Features, Value

    if len(anchors) != len(positives):
        raise ValueError(f"{len(anchors)} anchors and {len(positives)} positives")
    settings = settings or MiningSettings()
    with tempfile.TemporaryDirectory(prefix="revela-hub-mining-") as temporary:
        folder = Path(temporary if cache_dir is None else cache_dir)
        ranking = ranking or RankerSettings()
        if cache_dir is None and not ranking.identity:
            ranking = replace(ranking, identity="the only one in this folder")
        mined = mine(zip(anchors, positives, strict=True), corpus, ranker, settings, ranking, folder=folder)
        rows = list(mined.rows)
    features: dict[str, Any] = {name: Value("string") for name in rows[0]}
    if settings.scores:
        features["scores"] = [Value("float32")]
    return MinedNegatives(Dataset.from_list(rows, features=Features(features)), mined.report)


@dataclass(frozen=True)
class MinedRows:
    """Rows as `MinedNegatives.dataset` has them, made as they are asked for, and what is counted meanwhile."""

    rows: Iterator[dict[str, Any]]
    report: MiningReport


def mine(
    pairs: Iterable[tuple[str, str]],
    corpus: Iterable[str] | None,
    ranker: Ranker,
    settings: MiningSettings,
    ranking: RankerSettings,
    *,
    folder: str | Path,
) -> MinedRows:
    """`mine_negatives` for more pairs than fit in memory: reads them once, encodes, and returns rows one by one.

    Args:
        pairs: Anchor and positive.
        corpus: As for `mine_negatives`.
        ranker: As for `mine_negatives`.
        settings: As for `mine_negatives`.
        ranking: How the ranker is used.
        folder: Where texts, vectors and hits are kept.

    Raises:
        UserError: As for `mine_negatives`; that no negatives are left is raised by the rows.
        ValueError: The ranker is an encoder and has no identity.
    """
    folder = make_folder(Path(folder).expanduser())
    report = MiningReport(dropped=settings.fewer == "drop")
    numbered = number_pairs(pairs, corpus, folder, report)
    scores = _scores(ranker, ranking, numbered, folder)
    return MinedRows(_rows(numbered, scores, settings, folder, report, ranking.show_progress_bar), report)


def _scores(ranker: Ranker, ranking: RankerSettings, numbered: NumberedPairs, folder: Path) -> Scores:
    parts = numbered.corpus.parts
    if ranker == "bm25" or ranker is BM25:
        return BM25Scores(folder, numbered.anchors, parts, show_progress_bar=ranking.show_progress_bar)
    if not isinstance(ranker, Encoder):
        raise ValueError(f"the ranker must be an encoder or bm25, not {ranker!r}")
    if not ranking.identity:
        raise ValueError("a cache needs the model's identity: RankerSettings(identity=model_identity(name))")

    def store(texts: Texts, encode: Any, prompt: str | None, kind: str) -> VectorStore:
        options = {} if prompt is None else {"prompt": prompt}

        def vectors(batch: list[str]) -> NDArray[np.float32]:
            encoded = encode(batch, batch_size=ranking.batch_size, show_progress_bar=False, **options)
            return as_vectors(encoded, len(batch), normalize=ranking.similarity == "cosine")

        return VectorStore(
            folder,
            texts,
            vectors,
            identity=f"{ranking.identity} {kind} {prompt!r} {ranking.similarity}",
            dtype=ranking.dtype,
            description=f"Encoding {kind}s" if ranking.show_progress_bar else None,
        )

    anchors = store(numbered.anchors, ranker.encode_query, ranking.query_prompt, "anchor")
    documents = [store(part, ranker.encode_document, ranking.document_prompt, "document") for part in parts]
    return VectorScores(anchors, documents, ranking.device)


def _rows(
    numbered: NumberedPairs, scores: Scores, settings: MiningSettings, folder: Path, report: MiningReport, show: bool
) -> Iterator[dict[str, Any]]:
    """Searches and filters block by block of the anchors."""
    max_positives = int(np.bincount(numbered.anchors_P).max())
    depth = min(settings.depth(max_positives), len(numbered.corpus))
    hits = HitsOnDisk(folder, scores, depth)
    with tqdm(total=len(numbered.anchors), desc="Mining", unit=" anchors", disable=not show) as bar:
        for start in range(0, len(numbered.anchors), ANCHOR_BLOCK):
            stop = min(start + ANCHOR_BLOCK, len(numbered.anchors))
            found = hits.best(start, stop)
            report.candidates += int((found.rows_AK >= 0).sum())
            first, last = np.searchsorted(numbered.anchors_P, [start, stop])
            pairs = slice(int(first), int(last))
            scores_P = scores.pair_scores(numbered.anchors_P[pairs], numbered.positives_P[pairs])
            chosen_An = choose_negatives(
                found,
                _forbidden(found, numbered, start, stop, pairs),
                # As in mine_hard_negatives: of several positives, the one that scores lowest sets the margin.
                np.minimum.reduceat(scores_P, np.searchsorted(numbered.anchors_P[pairs], np.arange(start, stop))),
                settings,
                last_rank=settings.last_rank(max_positives),
                first_anchor=start,
                removed=report.removed,
            )
            yield from _block_rows(numbered, found, chosen_An, start, pairs, scores_P, settings, report)
            bar.update(stop - start)
    _finish(report, settings)


def _forbidden(
    found: Found, numbered: NumberedPairs, start: int, stop: int, pairs: slice
) -> dict[str, NDArray[np.bool_]]:
    """The hits (A, K) that are no negatives whatever they score."""
    size = len(numbered.corpus)
    codes_AK = found.rows_AK + np.arange(stop - start)[:, None] * size
    codes_P = (numbered.anchors_P[pairs] - start) * size + numbered.positives_P[pairs]
    return {
        "being a positive": np.isin(codes_AK, codes_P),
        "being the anchor": found.rows_AK == numbered.anchors_in_corpus[start:stop, None],
    }


def _block_rows(
    numbered: NumberedPairs,
    found: Found,
    chosen_An: NDArray[np.int64],
    start: int,
    pairs: slice,
    scores_P: NDArray[np.float32],
    settings: MiningSettings,
    report: MiningReport,
) -> Iterator[dict[str, Any]]:
    """The rows of the pairs of one block of anchors."""
    names = [f"negative_{number}" for number in range(1, settings.num_negatives + 1)]
    for pair, positive_score in zip(range(pairs.start, pairs.stop), scores_P.tolist(), strict=True):
        anchor = int(numbered.anchors_P[pair])
        columns = [column for column in chosen_An[anchor - start].tolist() if column >= 0]
        enough = len(columns) == settings.num_negatives
        report.mined += enough
        report.fewer += not enough
        report.found += bool(columns)
        if not enough and settings.fewer == "drop":
            continue
        negative_scores = found.scores_AK[anchor - start, columns].tolist()
        report.count(positive_score, negative_scores)
        texts = numbered.corpus.read(found.rows_AK[anchor - start, columns].tolist())
        [anchor_text] = numbered.anchors.read([anchor])
        [positive_text] = numbered.texts.read([int(numbered.given_P[pair])])
        negatives = dict.fromkeys(names) | dict(zip(names, texts, strict=False))
        row = {"anchor": anchor_text, "positive": positive_text, **negatives}
        yield row | ({"scores": [positive_score, *negative_scores]} if settings.scores else {})


def _finish(report: MiningReport, settings: MiningSettings) -> None:
    """Raises UserError where there is nothing to train on."""
    if report.negatives:
        return
    if report.found:
        raise UserError(
            f"no pair has {settings.num_negatives} negatives, though {report.found:,} have fewer: ask for fewer "
            f"(num_negatives), keep such pairs (fewer: keep), or look further down (range_max)"
        )
    if not report.candidates:
        raise UserError("no negatives left: no document shares a word with any anchor; use another ranker than bm25")
    reasons = ", ".join(f"{number:,} by {reason}" for reason, number in report.removed.most_common() if number)
    raise UserError(
        f"no negatives left of {report.candidates:,} candidates: removed {reasons or 'none'}; widen the limits "
        f"(relative_margin, range_max, max_score, min_score), or give a larger corpus"
    )
