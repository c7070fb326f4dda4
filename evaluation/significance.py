"""Whether one model is better than another on the same queries: the paired bootstrap over queries.

With d_q = b_q - a_q, the difference of a query's two scores, and m the mean of d over the Q queries, the queries are drawn
again, Q with replacement, many times; m* is the mean of such a draw (Efron and Tibshirani 1993, chapters 13 and 16):

    interval  the percentiles of m*
    p-value   how often |m* - m| >= |m|: how often chance alone moves the mean as far as it is from 0

P-values are those of one comparison: who compares a model with many divides 0.05 by their number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

SAMPLES = 10_000


@dataclass(frozen=True)
class PairedDifference:
    """How much better b is than a, in the unit of the scores.

    Attributes:
        difference: The mean over the queries of b's score less a's.
        low: The lower end of the interval.
        high: The upper end.
        p_value: Two-sided; never 0, the smallest is 1 / (samples + 1).
        queries: How many there were.
        confidence: The interval's, 0.95 by default.
    """

    difference: float
    low: float
    high: float
    p_value: float
    queries: int
    confidence: float = 0.95

    @property
    def verdict(self) -> str:
        """Says "better", "worse", or "no difference" where the interval holds 0."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no difference"

    def __str__(self) -> str:
        """`+0.0123 [+0.0010, +0.0240], p = 0.031: better`."""
        p = "p < 0.001" if self.p_value < 0.001 else f"p = {self.p_value:.3f}"
        return f"{self.difference:+.4f} [{self.low:+.4f}, {self.high:+.4f}], {p}: {self.verdict}"

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        return asdict(self) | {"verdict": self.verdict}


def paired_bootstrap(
    a: ArrayLike, b: ArrayLike, *, samples: int = SAMPLES, confidence: float = 0.95, seed: int = 0
) -> PairedDifference:
    """Compares the scores of two models for the same queries, in the same order.

    Args:
        a: Scores (Q,) of the one that is compared with.
        b: Scores (Q,) of the other.
        samples: How often the queries are drawn again.
        confidence: Of the interval.
        seed: Of the draws.

    Raises:
        ValueError: Fewer than two queries, two numbers of them, or a score that is not a number.
    """
    a_Q, b_Q = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a_Q.shape != b_Q.shape or a_Q.ndim != 1:
        raise ValueError(f"scores of shape {a_Q.shape} and {b_Q.shape}: both models need one for each query")
    if len(a_Q) < 2:
        raise ValueError(f"{len(a_Q)} queries: at least two are needed to say how much chance there is")
    d_Q = b_Q - a_Q
    if not np.isfinite(d_Q).all():
        raise ValueError("a score is not a number")
    result = stats.bootstrap(
        (d_Q,),
        np.mean,
        n_resamples=samples,
        batch=max(1, 4_000_000 // len(d_Q)),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    mean = float(d_Q.mean())
    # Rounding must not part a mean from itself: without it two equal models could differ "significantly".
    as_far = np.abs(result.bootstrap_distribution - mean) >= abs(mean) - 1e-12
    interval = result.confidence_interval
    return PairedDifference(
        mean,
        float(interval.low),
        float(interval.high),
        float((as_far.sum() + 1) / (samples + 1)),
        len(d_Q),
        confidence,
    )


def compare_queries(
    a: Mapping[str, float], b: Mapping[str, float], *, samples: int = SAMPLES, confidence: float = 0.95, seed: int = 0
) -> PairedDifference:
    """`paired_bootstrap` for scores by query id, as `RetrievalScores.per_query` has them for each metric.

    Raises:
        ValueError: The two do not have the same queries, or fewer than two.
    """
    if a.keys() != b.keys():
        raise ValueError(f"{len(a.keys() ^ b.keys())} queries have a score from one of the models only")
    queries: Sequence[str] = sorted(a)  # the draws do not depend on the order in which they were asked
    return paired_bootstrap(
        [a[query] for query in queries],
        [b[query] for query in queries],
        samples=samples,
        confidence=confidence,
        seed=seed,
    )
