"""Draws how one or two models lay out queries and passages, as CoT-MoTE's paper does (arXiv 2304.10195, analysis).

    python embedding_space.py outputs/cot-mote/dense outputs/siamese/dense --queries dev.jsonl --query-column question \
        --passages passages.jsonl.gz --output analysis

Writes analysis.png, a t-SNE plane per model, and analysis.json with the Kullback-Leibler and Jensen-Shannon divergences
between queries and passages. As in MAUVE (Pillutla et al. 2021), k-means groups all vectors into K cells; P and Q are the
fractions of the queries and of the passages in each cell, with 1/2 added to every count. JS is between 0 (same distribution)
and log 2 = 0.693 (no cell in common). Distances in the picture mean little; the numbers are computed from the vectors.
Needs scikit-learn.
"""

import argparse
import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.manifold import TSNE

from revela_hub.retrieval.encoder import as_vectors, load_encoder, similarity_of
from revela_hub.retrieval.mining_input import read_corpus

Vectors = NDArray[np.float32]


def divergences(queries_QD: Vectors, passages_ND: Vectors, cells: int = 50, seed: int = 0) -> dict[str, float]:
    """KL(P | Q), KL(Q | P) and JS in nats, over `cells` clusters (at most a tenth of all vectors)."""
    together = np.concatenate([queries_QD, passages_ND]).astype(np.float32)
    cells = max(2, min(cells, len(together) // 10))
    labels = KMeans(cells, n_init=4, random_state=seed).fit_predict(together)
    counts = [np.bincount(part, minlength=cells) + 0.5 for part in np.split(labels, [len(queries_QD)])]
    p, q = (count / count.sum() for count in counts)
    m = (p + q) / 2
    return {"kl_query_passage": kl(p, q), "kl_passage_query": kl(q, p), "js": (kl(p, m) + kl(q, m)) / 2}


def kl(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    return float((p * np.log(p / q)).sum())


def plane(queries_QD: Vectors, passages_ND: Vectors, seed: int = 0) -> list[Vectors]:
    """Both sets in one t-SNE plane: (Q, 2) and (N, 2)."""
    together = np.concatenate([queries_QD, passages_ND])
    tsne = TSNE(2, perplexity=min(30.0, (len(together) - 1) / 3), init="pca", random_state=seed)
    return np.split(np.asarray(tsne.fit_transform(together), np.float32), [len(queries_QD)])


def draw(planes: dict[str, list[Vectors]], captions: dict[str, str], path: Path) -> None:
    canvas = Figure(figsize=(4.6 * len(planes), 4.6), layout="constrained")
    panels = canvas.subplots(1, len(planes), squeeze=False)[0]
    for axes, (title, (queries, passages)) in zip(panels, planes.items(), strict=True):
        axes.scatter(*passages.T, s=6, alpha=0.5, linewidths=0, color="#2a6f97", label="passages")
        axes.scatter(*queries.T, s=6, alpha=0.5, linewidths=0, color="#e76f51", label="queries")
        axes.set(title=title, xlabel=captions[title], xticks=[], yticks=[])
    panels[0].legend(loc="best", markerscale=2)
    canvas.savefig(path, dpi=150)


def encode(name: str, queries: list[str], passages: list[str]) -> tuple[Vectors, Vectors]:
    model = load_encoder(name)
    normalize = similarity_of(model, name) == "cosine"
    pairs = ((model.encode_query, queries), (model.encode_document, passages))
    first, second = (
        as_vectors(call(texts, show_progress_bar=True), len(texts), normalize=normalize) for call, texts in pairs
    )
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="one or two sentence-transformers folders or Hub ids")
    parser.add_argument("--queries", required=True, help="JSON lines or hf:owner/name")
    parser.add_argument("--passages", required=True, help="JSON lines, hf:owner/name or a BEIR folder")
    parser.add_argument("--query-column", default="text")
    parser.add_argument("--passage-column", default="text")
    parser.add_argument("--output", type=Path, default=Path("analysis"), help="without .png and .json")
    parser.add_argument("--max-texts", type=int, default=1000, help="texts of each kind, sampled")
    parser.add_argument("--cells", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    texts = []
    for source, column in ((options.queries, options.query_column), (options.passages, options.passage_column)):
        found = [text for text in islice(read_corpus(source, column), 1_000_000) if text.strip()]
        if len(found) < 10:
            parser.error(f"{source} has {len(found)} texts: at least 10 are needed")
        texts.append(random.Random(options.seed).sample(found, min(len(found), options.max_texts)))
    results, planes, captions = {}, {}, {}
    for name in options.models:
        vectors = encode(name, *texts)
        results[name] = divergences(*vectors, cells=options.cells, seed=options.seed)
        planes[name], captions[name] = plane(*vectors, seed=options.seed), f"JS divergence {results[name]['js']:.3f}"
        print(f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in results[name].items()))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(planes, captions, options.output.with_name(f"{options.output.name}.png"))
    options.output.with_name(f"{options.output.name}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
