r"""How far apart the embeddings of queries and of passages lie: the measure of CoT-MoTE (arXiv 2304.10195, appendix A.1)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PairDivergence(NamedTuple):
    """The divergences of N query-passage pairs, in nats."""

    kl: float
    js: float


def pair_divergence(queries_ND: NDArray[np.floating], passages_ND: NDArray[np.floating]) -> PairDivergence:
    r"""Return the KL and JS divergences between the distances from queries to passages and from passages to queries.

        d_ij = 1 - cos(q_i, p_j)                                          (14)
        p1 = exp(-d) / sum exp(-d),   p2 = exp(-d^T) / sum exp(-d^T)      (15, 16)
        KL = sum p1 log(p1 / p2)                                          (17)
        JS = (KL(p1, a) + KL(p2, a)) / 2,   a = (p1 + p2) / 2             (18, 19)

    Row i of both matrices is a pair; the paper uses 400 pairs. The sums are over all N^2 entries. The measure compares a matrix with
    its transpose, so it is 0 for a model that embeds a query as its passage, and it is small if all distances are alike.
    """
    queries_ND, passages_ND = (np.asarray(each, dtype=np.float64) for each in (queries_ND, passages_ND))
    lengths_NN = np.linalg.norm(queries_ND, axis=1)[:, None] * np.linalg.norm(passages_ND, axis=1)
    p1_NN = np.exp(queries_ND @ passages_ND.T / lengths_NN - 1)
    p1_NN /= p1_NN.sum()
    average_NN = (p1_NN + p1_NN.T) / 2
    # a is its own transpose, so both terms of JS are equal.
    kl, js = (float((p1_NN * np.log(p1_NN / q_NN)).sum()) for q_NN in (p1_NN.T, average_NN))
    return PairDivergence(kl, js)
