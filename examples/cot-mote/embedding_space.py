"""Draws how models embed queries and their passages, as in figures 2 and 4 of CoT-MoTE's paper (arXiv 2304.10195).

    python embedding_space.py outputs/cot-mote/dense outputs/siamese/dense --pairs pairs.jsonl --output analysis

Writes analysis.png, a t-SNE plane per model with cosine distances, and analysis.json with the Kullback-Leibler and Jensen-Shannon
divergences of appendix A.1 (`revela_hub.evaluation.pair_divergence`). Needs scikit-learn and matplotlib.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.manifold import TSNE

from revela_hub.evaluation import pair_divergence
from revela_hub.retrieval.encoder import as_vectors, load_encoder
from revela_hub.retrieval.mining_input import read_pairs

Vectors = NDArray[np.float32]


def plane(queries_ND: Vectors, passages_ND: Vectors, seed: int = 0) -> list[Vectors]:
    """Both in one t-SNE plane: (N, 2) each."""
    together = np.concatenate([queries_ND, passages_ND])
    perplexity = min(30.0, (len(together) - 1) / 3)
    tsne = TSNE(2, metric="cosine", perplexity=perplexity, init="random", random_state=seed)
    return np.split(np.asarray(tsne.fit_transform(together), np.float32), 2)


def draw(planes: dict[str, list[Vectors]], captions: dict[str, str], path: Path) -> None:
    canvas = Figure(figsize=(4.6 * len(planes), 4.6), layout="constrained")
    panels = canvas.subplots(1, len(planes), squeeze=False)[0]
    for axes, (title, (queries, passages)) in zip(panels, planes.items(), strict=True):
        axes.scatter(*passages.T, s=6, alpha=0.5, linewidths=0, color="#2a6f97", label="passages")
        axes.scatter(*queries.T, s=6, alpha=0.5, linewidths=0, color="#e76f51", label="queries")
        axes.set(title=title, xlabel=captions[title], xticks=[], yticks=[])
    panels[0].legend(loc="best", markerscale=2)
    canvas.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="sentence-transformers folders or Hub ids")
    parser.add_argument("--pairs", required=True, help="JSON lines or hf:owner/name")
    parser.add_argument("--anchor-column", default="anchor")
    parser.add_argument("--positive-column", default="positive")
    parser.add_argument("--output", type=Path, default=Path("analysis"), help="without .png and .json")
    parser.add_argument("--number", type=int, default=400, help="pairs, sampled (the paper: 400)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    pairs = list(read_pairs(options.pairs, options.anchor_column, options.positive_column))
    pairs = random.Random(options.seed).sample(pairs, min(len(pairs), options.number))
    results, planes, captions = {}, {}, {}
    for name in options.models:
        model, (queries, passages) = load_encoder(name), map(list, zip(*pairs, strict=True))
        vectors = [model.encode_query(queries), model.encode_document(passages)]
        vectors = [as_vectors(each, len(pairs), normalize=False) for each in vectors]
        found = pair_divergence(*vectors)
        results[name], planes[name] = found._asdict(), plane(*vectors, seed=options.seed)
        captions[name] = f"KL {found.kl:.2e}, JS {found.js:.2e}"
        print(f"{name}: {captions[name]}, of {len(pairs)} pairs")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(planes, captions, options.output.with_name(f"{options.output.name}.png"))
    options.output.with_name(f"{options.output.name}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
