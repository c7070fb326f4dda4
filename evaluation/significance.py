"""Testing whether one model is better than another on the same queries, with a paired bootstrap over queries.

Let d_q = b_q - a_q be the difference of a query's two scores, and m the mean of d over the Q queries. The bootstrap draws Q
queries with replacement many times; m* is the mean of one sample (Efron and Tibshirani 1993, chapters 13 and 16):

    interval  the percentiles of m*
    p-value   twice the fraction of samples with m* on the other side of 0 (or at 0): below 0.05 if the interval excludes 0

Queries of one document are alike: with `groups`, whole documents are drawn instead, each with all its queries, and m* is the
mean over the queries drawn. Of fewer than 10 documents, a sample of documents says little, and single queries are drawn.

P-values are not corrected for multiple comparisons: with n comparisons, use a threshold of 0.05 / n.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

SAMPLES = 10_000
FEWEST_QUERIES = 50
"""With fewer queries, no difference is claimed, whatever its interval."""
FEWEST_GROUPS = 10
USUAL_GAIN = 0.02
"""A gain in nDCG@10 that late interaction or a short training usually brings (benchmarks/adaptation)."""


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference between two models, with a confidence interval.

    Attributes:
        difference: The mean of b's score minus a's over the queries.
        low: The lower end of the interval.
        high: The upper end of the interval.
        p_value: The two-sided p-value, at least 2 / (samples + 1).
        queries: The number of queries.
        confidence: The confidence level of the interval.
    """

    difference: float
    low: float
    high: float
    p_value: float
    queries: int
    confidence: float = 0.95

    @property
    def verdict(self) -> str:
        """Return "better", "worse", or "no significant difference" if the interval contains 0 or the queries are too few."""
        if self.queries < FEWEST_QUERIES:
            return "no significant difference"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no significant difference"

    def __str__(self) -> str:
        """`+0.0123 [+0.0010, +0.0240], p = 0.031: better`."""
        p = "p < 0.001" if self.p_value < 0.001 else f"p = {self.p_value:.3f}"
        verdict = self.verdict if self.queries >= FEWEST_QUERIES else "too few queries"
        return f"{self.difference:+.4f} [{self.low:+.4f}, {self.high:+.4f}], {p}: {verdict}"

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, for JSON."""
        return asdict(self) | {"verdict": self.verdict}


def paired_bootstrap(
    a: ArrayLike,
    b: ArrayLike,
    *,
    groups: Sequence[str] | None = None,
    samples: int = SAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> PairedDifference:
    """Compare the scores of two models for the same queries, in the same order.

    Args:
        a: Scores (Q,) of the baseline.
        b: Scores (Q,) of the other model.
        groups: The document of each query, if several queries may share one.
        samples: Number of bootstrap samples.
        confidence: Confidence level of the interval.
        seed: The seed of the samples.

    Raises:
        ValueError: Fewer than two queries, different numbers of queries, or a score that is not finite.
    """
    a_Q, b_Q = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a_Q.shape != b_Q.shape or a_Q.ndim != 1 or len(a_Q) < 2 or not np.isfinite(b_Q - a_Q).all():
        raise ValueError(
            f"scores {a_Q.shape} and {b_Q.shape}: a paired test needs a finite one for each of several queries"
        )
    d_Q = b_Q - a_Q
    numbers = {name: number for number, name in enumerate(dict.fromkeys(groups or ()))}
    group_Q = [numbers[name] for name in groups or ()] if len(numbers) >= FEWEST_GROUPS else np.arange(len(d_Q))
    sums_G, sizes_G = np.bincount(group_Q, d_Q), np.bincount(group_Q)
    result = stats.bootstrap(
        (sums_G, sizes_G),
        lambda sums, sizes, axis: sums.sum(axis) / sizes.sum(axis),
        paired=True,
        n_resamples=samples,
        batch=max(1, 4_000_000 // len(sums_G)),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    mean = float(d_Q.mean())
    # Rounded, without errors of the sums: otherwise, two equal models could differ "significantly".
    other_side = (np.sign(mean) * result.bootstrap_distribution.round(12) <= 0).sum()
    p_value = float(min(1.0, 2 * (other_side + 1) / (samples + 1)))
    low, high = (round(float(end), 12) for end in result.confidence_interval)
    return PairedDifference(mean, low, high, p_value, len(d_Q), confidence)


def compare_queries(
    a: Mapping[str, float], b: Mapping[str, float], groups: Mapping[str, str] | None = None
) -> PairedDifference:
    """`paired_bootstrap` for scores by query id, such as one metric of `RetrievalScores.per_query`.

    `groups` are those of `RetrievalTask`; a query without one is a group.

    Raises:
        ValueError: The queries differ, or there are fewer than two.
    """
    if a.keys() != b.keys():
        raise ValueError(f"{len(a.keys() ^ b.keys())} queries have a score from only one of the models")
    # Sorted, so that the samples do not depend on the order of the queries.
    scores_of_a, scores_of_b = ([scores[query] for query in sorted(a)] for scores in (a, b))
    return paired_bootstrap(scores_of_a, scores_of_b, groups=[(groups or {}).get(query, query) for query in sorted(a)])


def too_few_queries(differences: Iterable[PairedDifference]) -> str:
    """Return how many queries are needed for a claim, or would show `USUAL_GAIN` if an interval around 0 is wider; else "".

    The width of an interval falls with the square root of the number of queries.

    >>> too_few_queries([PairedDifference(0.01, -0.03, 0.05, 0.6, 50)])
    '50 queries are too few to show a difference of 0.02: about 200 would suffice, estimated from this run.'
    """
    differences = list(differences)
    if few := [each.queries for each in differences if each.queries < FEWEST_QUERIES]:
        return f"{few[0]} queries are too few to claim a difference: at least {FEWEST_QUERIES} are needed."
    unclear = [each for each in differences if each.low <= 0 <= each.high]
    widest = max(unclear, key=lambda each: each.high - each.low, default=None)
    if widest is None or (ratio := (widest.high - widest.low) / 2 / USUAL_GAIN) <= 1:
        return ""
    enough = math.ceil(widest.queries * round(ratio, 3) ** 2)
    found = f"{widest.queries:,} queries are too few to show a difference of {USUAL_GAIN}"
    return f"{found}: about {enough:,} would suffice, estimated from this run."
