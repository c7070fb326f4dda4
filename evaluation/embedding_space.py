r"""How a model lays out queries and passages: a picture of both, and how far apart their distributions are.

CoT-MoTE's paper (arXiv 2304.10195, analysis and appendix) shows t-SNE pictures of query and passage vectors and says by
Kullback-Leibler and Jensen-Shannon divergences how alike the two distributions are. A divergence needs densities, of which
the vectors are samples in hundreds of dimensions; here, as MAUVE does (Pillutla et al. 2021), all vectors of a model are
grouped into K cells by k-means, and P and Q are the shares of the queries and of the passages in each cell, every count
raised by 1/2 so that none is 0:

    KL(P | Q) = sum_k P_k log(P_k / Q_k),   JS = (KL(P | M) + KL(Q | M)) / 2,   M = (P + Q) / 2       in nats

JS is between 0, the same cells in the same shares, and log 2 = 0.693, no cell in common. The picture's distances between
groups mean little, as t-SNE's always do; the numbers are of the vectors, not of the picture.

Letters: Q queries, N passages, D dimensions.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError

CELLS = 50
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Divergences:
    """How far the queries' distribution P is from the passages' Q, in nats.

    Attributes:
        kl_query_passage: KL(P | Q).
        kl_passage_query: KL(Q | P).
        js: Jensen-Shannon divergence, between 0 and log 2.
        cells: K.
        queries: how many there were.
        passages: how many there were.
    """

    kl_query_passage: float
    kl_passage_query: float
    js: float
    cells: int
    queries: int
    passages: int

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        return asdict(self)


def divergences(queries_QD: Vectors, passages_ND: Vectors, *, cells: int = CELLS, seed: int = 0) -> Divergences:
    """Compares the two sets of vectors of a model.

    Args:
        queries_QD: vectors of queries.
        passages_ND: vectors of passages.
        cells: K, at most a tenth of all vectors.
        seed: of k-means.

    Raises:
        UserError: too few vectors, of other dimensions, or that are not numbers.
    """
    from sklearn.cluster import KMeans

    together = _together(queries_QD, passages_ND)
    if cells < 2:
        raise UserError(f"the number of cells must be at least 2, not {cells}")
    cells = max(2, min(cells, len(together) // 10))
    labels = KMeans(cells, n_init=4, random_state=seed).fit_predict(together)
    counts = [np.bincount(part, minlength=cells) + 0.5 for part in np.split(labels, [len(queries_QD)])]
    p, q = (count / count.sum() for count in counts)
    m = (p + q) / 2
    return Divergences(_kl(p, q), _kl(q, p), (_kl(p, m) + _kl(q, m)) / 2, cells, len(queries_QD), len(passages_ND))


def plane(queries_QD: Vectors, passages_ND: Vectors, *, seed: int = 0) -> tuple[Vectors, Vectors]:
    """Both sets in one t-SNE plane, (Q, 2) and (N, 2).

    Raises:
        UserError: as `divergences`.
    """
    from sklearn.manifold import TSNE

    together = _together(queries_QD, passages_ND)
    perplexity = min(30.0, (len(together) - 1) / 3)
    placed = TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(together)
    queries, passages = np.split(np.asarray(placed, dtype=np.float32), [len(queries_QD)])
    return queries, passages


def draw_planes(planes: Mapping[str, tuple[Vectors, Vectors]], captions: Mapping[str, str], path: Path) -> None:
    """Draws the planes of models side by side.

    Args:
        planes: title -> queries (Q, 2) and passages (N, 2).
        captions: title -> what stands below it.
        path: of the PNG to write.
    """
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(4.6 * len(planes), 4.6), layout="constrained")
    panels = canvas.subplots(1, len(planes), squeeze=False)[0]
    for axes, (title, (queries, passages)) in zip(panels, planes.items(), strict=True):
        axes.scatter(*passages.T, s=6, alpha=0.5, linewidths=0, color="#2a6f97", label="passages")
        axes.scatter(*queries.T, s=6, alpha=0.5, linewidths=0, color="#e76f51", label="queries")
        axes.set(title=title, xlabel=captions[title], xticks=[], yticks=[])
    panels[0].legend(loc="best", markerscale=2)
    canvas.savefig(path, dpi=150)


def _kl(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    return float((p * np.log(p / q)).sum())


def _together(queries_QD: Vectors, passages_ND: Vectors) -> Vectors:
    """(Q + N, D)."""
    for name, vectors in (("queries", queries_QD), ("passages", passages_ND)):
        if len(vectors) < 10:
            raise UserError(f"{len(vectors)} {name}: at least 10 are needed to speak of a distribution")
        if not np.isfinite(vectors).all():
            raise UserError(f"the vectors of the {name} are not all numbers")
    if queries_QD.shape[1] != passages_ND.shape[1]:
        raise UserError(
            f"queries have {queries_QD.shape[1]} dimensions and passages {passages_ND.shape[1]}: they are of two spaces"
        )
    return np.concatenate([queries_QD, passages_ND]).astype(np.float32)
