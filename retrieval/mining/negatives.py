"""The selection of negatives among the best hits of an anchor, and the report of what each filter removed.

Letters in names: A anchors, K hits per anchor, P pairs, n negatives per pair.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.retrieval.top_k import Hits


@dataclass(frozen=True)
class MiningSettings:
    """The selection of negatives.

    Scores are those of the ranker: cosine, dot product or BM25. The positive's score is the score of the anchor with its
    positive; with several positives, the lowest one.

    Attributes:
        num_negatives: Negatives per pair.
        relative_margin: A negative scores at most `positive - relative_margin * |positive|`; 0.05 means at most 95% of a
            positive score (NV-Embed section 4.1, TopK-PercPos of NV-Retriever). None: no such limit.
        max_score: The maximum score of a negative.
        range_min: Skip this many of the best texts that pass the filters above.
        range_max: Take negatives from at most this many of the best texts. None: `range_min`, plus ten per negative if a
            margin or a maximum is set, otherwise one.
        sampling: "top" takes the best remaining texts, "random" samples among them.
        fewer: The treatment of pairs with too few negatives: "drop" them, or "keep" them with None for missing ones.
        scores: Whether to add the column `scores`: the positive's, then the negatives'.
        seed: The seed of "random".
    """

    num_negatives: int = 1
    relative_margin: float | None = 0.05
    max_score: float | None = None
    range_min: int = 0
    range_max: int | None = None
    sampling: Literal["top", "random"] | str = "top"
    fewer: Literal["drop", "keep"] | str = "drop"
    scores: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UserError for contradictory settings."""
        if self.num_negatives < 1 or self.range_min < 0:
            raise UserError("num_negatives must be at least 1, and range_min at least 0")
        if self.range_max is not None and self.range_max - self.range_min < self.num_negatives:
            raise UserError(
                f"range_max must be at least range_min + num_negatives ({self.range_min + self.num_negatives}), "
                f"not {self.range_max}"
            )
        for name, choices in (("sampling", ("top", "random")), ("fewer", ("drop", "keep"))):
            if getattr(self, name) not in choices:
                raise UserError(f"{name} must be {' or '.join(choices)}, not {getattr(self, name)!r}")

    def depth(self, max_positives: int) -> int:
        """Return how many of the best texts to retrieve, as in `sentence_transformers.util.mine_hard_negatives`."""
        return self.last_rank(max_positives) + max_positives

    def last_rank(self, max_positives: int) -> int:
        """Return `range_max` or its default."""
        if self.range_max is not None:
            return self.range_max
        factor = 1 if self.relative_margin is None and self.max_score is None else 10
        return self.range_min + self.num_negatives * factor + max_positives


@dataclass
class MiningReport:
    """Counts of mined and skipped pairs; `str(report)` is printed by the command."""

    pairs: int = 0
    """Distinct pairs with text on both sides."""
    anchors: int = 0
    """Their distinct anchors."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Skipped input: `empty pairs`, `duplicate pairs`, `empty documents`."""
    documents: int = 0
    """Distinct texts that were searched, including the positives."""
    copies: int = 0
    """Skipped duplicates in the corpus."""
    added: int = 0
    """Positives that were not in the corpus and were added to it."""
    unanswered: int = 0
    """Anchors without any hit, because no document shares a term with them."""
    candidates: int = 0
    """Hits that were considered, over all anchors."""
    removed: Counter[str] = field(default_factory=Counter)
    """Candidates removed by each filter, in the order of the filters; each candidate is counted once."""
    mined: int = 0
    """Pairs with all their negatives."""
    fewer: int = 0
    """Pairs with too few negatives."""
    found: int = 0
    """Pairs with at least one negative."""
    dropped: bool = True
    """Whether pairs with too few negatives were dropped."""
    negatives: int = 0
    """Negatives of all pairs in the output."""
    positive_score: float = 0.0
    """Mean score of the positives in the output."""
    negative_score: float = 0.0
    """Mean score of the negatives in the output."""

    def count(self, positive_score: float, negative_scores: list[float]) -> None:
        """Updates the means with the scores of a pair of the output."""
        pairs = self.mined + (0 if self.dropped else self.fewer)  # including this one
        self.positive_score += (positive_score - self.positive_score) / pairs
        for score in negative_scores:
            self.negatives += 1
            self.negative_score += (score - self.negative_score) / self.negatives

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, for a JSON file."""
        return asdict(self) | {"skipped": dict(self.skipped), "removed": dict(self.removed)}

    def __str__(self) -> str:
        """Five lines: the input, the corpus, the filters, the pairs, the scores."""
        parts = [f"{number:,} {reason}" for reason, number in self.skipped.items() if number]
        skipped = f"; skipped: {', '.join(parts)}" if parts else ""
        added = f", including {counted(self.added, 'positive')} from outside the corpus" if self.added else ""
        copies = f"; skipped {counted(self.copies, 'duplicate')}" if self.copies else ""
        removed = ", ".join(f"{number:,} by {reason}" for reason, number in self.removed.items()) or "none"
        unanswered = f"; {counted(self.unanswered, 'anchor')} without a term in the corpus" if self.unanswered else ""
        kept = "dropped" if self.dropped else "kept"
        remedy = "; raise range_max to consider more candidates" if self.fewer else ""
        return "\n".join(
            [
                f"{counted(self.pairs, 'pair')} of {counted(self.anchors, 'anchor')}{skipped}",
                f"{counted(self.documents, 'document')}{added}{copies}",
                f"{counted(self.candidates, 'candidate')}, removed: {removed}{unanswered}",
                f"{counted(self.mined, 'pair')} with all negatives, {self.fewer:,} with fewer ({kept}{remedy})",
                f"mean score: positive {self.positive_score:.4f}, negative {self.negative_score:.4f}",
            ]
        )


def choose_negatives(
    found: Hits,
    forbidden: dict[str, NDArray[np.bool_]],
    positive_scores_A: NDArray[np.float32],
    settings: MiningSettings,
    *,
    last_rank: int,
    first_anchor: int,
    removed: Counter[str],
) -> NDArray[np.int64]:
    """Choose negatives among the hits.

    Args:
        found: The best texts of A anchors.
        forbidden: By reason, the hits (A, K) that must not become negatives.
        positive_scores_A: The positive's score for each anchor.
        settings: The limits.
        last_rank: `settings.last_rank`.
        first_anchor: The number of the first of these anchors, which together with the seed determines random choices.
        removed: Counts of removed candidates by reason, updated here.

    Returns:
        The chosen columns of `found` (A, n), best first, padded with -1.
    """
    left_AK = found.rows_QK >= 0
    for reason, mask_AK in {**forbidden, **_outside(found.scores_QK, positive_scores_A, settings)}.items():
        removed[reason] += int((left_AK & mask_AK).sum())
        left_AK &= ~mask_AK
    rank_AK = left_AK.cumsum(axis=1) - 1
    in_range_AK = left_AK & (rank_AK >= settings.range_min) & (rank_AK < last_rank)
    if settings.range_min or settings.range_max is not None:
        removed["rank"] += int((left_AK & ~in_range_AK).sum())
    chosen_An = np.full((len(left_AK), settings.num_negatives), -1, dtype=np.int64)
    for anchor, in_range_K in enumerate(in_range_AK):
        columns = np.flatnonzero(in_range_K)
        if settings.sampling == "random" and len(columns) > settings.num_negatives:
            # One generator per anchor, so that a resumed run draws the same numbers as an uninterrupted one.
            random = np.random.default_rng([settings.seed, first_anchor + anchor])
            columns = np.sort(random.choice(columns, settings.num_negatives, replace=False))
        columns = columns[: settings.num_negatives]
        chosen_An[anchor, : len(columns)] = columns
    return chosen_An


def _outside(
    scores_AK: NDArray[np.float32], positive_scores_A: NDArray[np.float32], settings: MiningSettings
) -> dict[str, NDArray[np.bool_]]:
    """Return the hits that each limit removes, in the order and with the inequalities of `mine_hard_negatives`."""
    positive_A1 = positive_scores_A[:, None]
    limits: dict[str, NDArray[np.bool_]] = {}
    if settings.relative_margin is not None:
        limits["relative margin"] = scores_AK > positive_A1 - np.abs(positive_A1) * np.float32(settings.relative_margin)
    if settings.max_score is not None:
        limits["maximum score"] = scores_AK > settings.max_score
    return limits
