"""Which of the best hits of an anchor may be negatives: the filters, and what each of them removed.

Letters in names: A anchors, K hits of each, P pairs, n negatives of each.
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
    """Which texts become negatives.

    The scores are those of the ranker: cosines, dot products or BM25's. The positive's score is that of the anchor with
    the positive or, where an anchor has several, with the one that scores lowest.

    Attributes:
        num_negatives: Negatives for each pair.
        relative_margin: A negative scores at most the positive's score less this share of it: 0.05 is "at most 95% of the
            positive's score" (NV-Embed section 4.1, NV-Retriever's TopK-PercPos). With a negative score the margin is a
            share of its amount, so that the negative is always below. None: no such limit.
        absolute_margin: A negative scores at least this much less than the positive.
        max_score: A negative scores at most this.
        min_score: A negative scores at least this.
        range_min: Leave out this many of the best texts that pass the filters above.
        range_max: Take negatives from this many of the best texts at most. None: `range_min`, and ten for each negative
            where a margin or a maximum is set.
        sampling: "top" takes the best that are left, "random" any of them.
        fewer: What becomes of a pair with fewer negatives than asked for: "drop" it, or "keep" it with None for those
            that are missing.
        scores: Whether rows have the column `scores`: the positive's, then the negatives'.
        seed: For "random".
    """

    num_negatives: int = 1
    relative_margin: float | None = 0.05
    absolute_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None
    range_min: int = 0
    range_max: int | None = None
    sampling: Literal["top", "random"] | str = "top"
    fewer: Literal["drop", "keep"] | str = "drop"
    scores: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UserError for settings that no text can fulfil."""
        if self.num_negatives < 1:
            raise UserError(f"num_negatives must be at least 1, not {self.num_negatives}")
        if self.range_min < 0:
            raise UserError(f"range_min must be at least 0, not {self.range_min}")
        if self.range_max is not None and self.range_max - self.range_min < self.num_negatives:
            raise UserError(
                f"range_max must be at least range_min + num_negatives ({self.range_min + self.num_negatives}), "
                f"not {self.range_max}"
            )
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise UserError(f"min_score ({self.min_score}) is above max_score ({self.max_score})")
        for name, choices in (("sampling", ("top", "random")), ("fewer", ("drop", "keep"))):
            if getattr(self, name) not in choices:
                raise UserError(f"{name} must be {' or '.join(choices)}, not {getattr(self, name)!r}")

    def depth(self, max_positives: int) -> int:
        """How many of the best texts to look at, which may have as many positives among them.

        The numbers are those of `sentence_transformers.util.mine_hard_negatives`.
        """
        return self.last_rank(max_positives) + max_positives

    def last_rank(self, max_positives: int) -> int:
        """`range_max`, or what it is by default."""
        if self.range_max is not None:
            return self.range_max
        limits = (self.relative_margin, self.absolute_margin, self.max_score)
        factor = 1 if all(limit is None for limit in limits) else 10
        return self.range_min + self.num_negatives * factor + max_positives


@dataclass
class MiningReport:
    """What was mined, and what was not; `str(report)` is what the command prints."""

    pairs: int = 0
    """Pairs with text on both sides, each once."""
    anchors: int = 0
    """Distinct anchors of those."""
    skipped: Counter[str] = field(default_factory=Counter)
    """What was not used: `empty pairs`, `pairs given twice`, `empty documents`."""
    documents: int = 0
    """Distinct texts that negatives were looked for in, the positives among them."""
    copies: int = 0
    """Documents that were left out because their text had been there."""
    added: int = 0
    """Positives that were not in the corpus, and were searched with it."""
    unanswered: int = 0
    """Anchors for which nothing was found: no document has a term of theirs."""
    candidates: int = 0
    """Hits that were looked at, over all anchors."""
    removed: Counter[str] = field(default_factory=Counter)
    """Candidates that a filter removed, each counted at the first filter that did; in the order of the filters."""
    mined: int = 0
    """Pairs with all their negatives."""
    fewer: int = 0
    """Pairs with fewer than asked for."""
    found: int = 0
    """Pairs with any."""
    dropped: bool = True
    """Whether those were left out."""
    negatives: int = 0
    """Negatives of the pairs that were kept."""
    positive_score: float = 0.0
    """The mean score of the positives of those pairs."""
    negative_score: float = 0.0
    """The mean score of those negatives."""

    def count(self, positive_score: float, negative_scores: list[float]) -> None:
        """Counts the scores of a pair that is kept into the means."""
        pairs = self.mined + (0 if self.dropped else self.fewer)  # this one included
        self.positive_score += (positive_score - self.positive_score) / pairs
        for score in negative_scores:
            self.negatives += 1
            self.negative_score += (score - self.negative_score) / self.negatives

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for a JSON file."""
        return asdict(self) | {"skipped": dict(self.skipped), "removed": dict(self.removed)}

    def __str__(self) -> str:
        """Five lines: the input, the corpus, the filters, the pairs, the scores."""
        parts = [f"{number:,} {reason}" for reason, number in self.skipped.items() if number]
        skipped = f"; skipped: {', '.join(parts)}" if parts else ""
        added = f", {self.added:,} of them positives from outside the corpus" if self.added else ""
        copies = f"; {counted(self.copies, 'copy').replace('copys', 'copies')} left out" if self.copies else ""
        removed = ", ".join(f"{number:,} by {reason}" for reason, number in self.removed.items()) or "none"
        unanswered = (
            f"; none for {counted(self.unanswered, 'anchor')} without a term in the corpus" if self.unanswered else ""
        )
        kept = "dropped" if self.dropped else "kept"
        remedy = "; a larger range_max looks further down" if self.fewer else ""
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
    """Chooses negatives among what was found.

    Args:
        found: The best texts of A anchors.
        forbidden: Reason to the texts (A, K) that are no negatives whatever they score.
        positive_scores_A: What the positive of each anchor scores.
        settings: The limits.
        last_rank: `settings.last_rank`.
        first_anchor: The number of the first of these anchors, which with the seed makes its random numbers.
        removed: Is counted up.

    Returns:
        The columns of `found` (A, n) that were chosen, best first, -1 where there are fewer.
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
            # For each anchor its own, so that a resumed run draws what an uninterrupted one would have.
            random = np.random.default_rng([settings.seed, first_anchor + anchor])
            columns = np.sort(random.choice(columns, settings.num_negatives, replace=False))
        columns = columns[: settings.num_negatives]
        chosen_An[anchor, : len(columns)] = columns
    return chosen_An


def _outside(
    scores_AK: NDArray[np.float32], positive_scores_A: NDArray[np.float32], settings: MiningSettings
) -> dict[str, NDArray[np.bool_]]:
    """Which texts each limit removes, in the order and with the inequalities of `mine_hard_negatives`."""
    positive_A1 = positive_scores_A[:, None]
    limits: dict[str, NDArray[np.bool_]] = {}
    if settings.absolute_margin is not None:
        limits["absolute margin"] = scores_AK + np.float32(settings.absolute_margin) > positive_A1
    if settings.relative_margin is not None:
        limits["relative margin"] = scores_AK > positive_A1 - np.abs(positive_A1) * np.float32(settings.relative_margin)
    if settings.max_score is not None:
        limits["maximum score"] = scores_AK > settings.max_score
    if settings.min_score is not None:
        limits["minimum score"] = scores_AK < settings.min_score
    return limits
