"""Compare kinds of queries for a probe with labelled queries: which kind agrees best, for small differences too?

For each domain (benchmarks/domains.py), makes one probe corpus from the raw text, and queries of several kinds for it:

    sentence     today's probe: a sentence (or docstring) removed from its passage
    short        its eight consecutive words with the highest idf sum
    keywords     its four rarest words
    dropout      half of its words, shuffled
    unshared     without half of the words that its passage contains
    title        titles of the passages, if any
    question     questions that SmolLM2-135M-Instruct writes for the passages (with --lm)
    resembling   for 20 real queries without labels, the nearest queries of the kinds above (without questions)

Systems: BM25, all-MiniLM-L6-v2, MiniLM with noise, with fewer layers and dimensions, briefly fine-tuned on natural pairs, on crops, and
on labelled questions of SQuAD and MedQuAD, means of the fine-tuned weights with MiniLM's, and the quickstart's retriever. Passages are
cut at 48 words for all of them.

Prints, for each kind: Spearman's correlation with the labels over the dense systems; the fraction of pairs of dense systems closer than
0.03 on the labels that the probe orders as the labels do; by how much it overrates BM25 against MiniLM; and the BM25 weight of a hybrid
by several rules, with its gain on the labels. Vectors are kept in --work, and the script continues where it was stopped; --seconds
stops it.

    python benchmarks/probe_queries.py --data $REVELA_HUB_DATA --work outputs/probe-queries --lm $SMOLLM2
"""

import argparse
import hashlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from domains import DOMAINS, load_domain
from probe_systems import Vectors, systems
from probe_validity import minilm
from scipy.stats import spearmanr

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.synthesis.questions import question_prompt
from revela_hub.data.text.words import words
from revela_hub.evaluation.hybrid_weight import WEIGHTS, fuse_runs
from revela_hub.evaluation.probe import NoProbe, ProbeSettings, build_probe
from revela_hub.evaluation.query_shapes import in_shape, resembling
from revela_hub.evaluation.retrieval import Rankings, bm25_run, score_run

QUERIES, PASSAGES, EXAMPLES, QUESTIONS = 100, 150, 20, 40
MAX_WORDS, SMALL = 48, 0.03
PRIOR = 0.3
HYBRIDS = ("MiniLM", "SQuAD's labels", "quickstart")
Scores = dict[str, np.ndarray]  # system -> nDCG@10 of each query
Curve = dict[float, np.ndarray]  # weight of BM25 -> nDCG@10 of each query


def cut(text: str) -> str:
    return " ".join(text.split(" ")[:MAX_WORDS])


def unshared(text: str, passage: str, seed: str) -> str:
    drawn, there = random.Random(seed), set(words(passage))
    kept = [w for w in text.split() if not set(words(w)) & there or drawn.random() < 0.5]
    return " ".join(kept) or text


def with_queries(task: RetrievalTask, queries: dict[str, str], name: str) -> RetrievalTask:
    return RetrievalTask(task.corpus, queries, {q: task.qrels[q] for q in queries}, name)


def kinds_of_queries(text: list[Any], name: str) -> dict[str, RetrievalTask]:
    settings = ProbeSettings(QUERIES, PASSAGES, kinds=("docstring", "sentence"), shape="whole")
    base = build_probe(text, settings).task
    base = RetrievalTask({id_: cut(text) for id_, text in base.corpus.items()}, base.queries, base.qrels, "sentence")
    passage_of = {q: base.corpus[next(iter(base.qrels[q]))] for q in base.queries}
    found = {"sentence": base}
    for shape in ("short", "keywords", "dropout"):
        found[shape] = with_queries(base, in_shape(shape, base.queries, base.corpus.values()), shape)
    shared = {q: unshared(text, passage_of[q], q) for q, text in base.queries.items()}
    found["unshared"] = with_queries(base, shared, "unshared")
    try:
        titles = build_probe(text, ProbeSettings(QUERIES, PASSAGES, kinds=("title",))).task
        found["title"] = RetrievalTask(base.corpus, titles.queries, titles.qrels, "title")
    except NoProbe as error:
        print(f"{name}: no titles ({error})"[:120])
    return found


def written(passage_of: dict[str, str], lm: str) -> dict[str, str]:
    from revela_hub.data.synthesis.backends import LocalModel, Request, Sampling

    model = LocalModel(lm, Sampling(temperature=0.7, max_new_tokens=32), batch_size=10)
    asked = list(passage_of)[:QUESTIONS]
    requests = [Request(question_prompt(passage_of[q]), i) for i, q in enumerate(asked)]
    replies = [reply.text.strip().split("\n")[0].strip(" \"'*") for _, reply in model.replies(requests)]
    return {q: text for q, text in zip(asked, replies, strict=True) if 3 <= len(text.split()) <= 60}


def rankings(task: RetrievalTask, vectors: Vectors, size: int | None = None) -> Rankings:
    parts = [vectors.of(list(texts.values()))[:, :size] for texts in (task.queries, task.corpus)]
    queries, corpus = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts)
    ids = list(task.corpus)
    found = {}
    for query, row in zip(task.queries, queries @ corpus.T, strict=True):
        found[query] = {ids[i]: float(row[i]) for i in np.argsort(-row, kind="stable")[:100]}
    return found


def made_like(tasks: dict[str, RetrievalTask], examples: list[str]) -> RetrievalTask:
    """Return one query for each passage, of the kinds made from sentences, so that all together resemble the examples."""
    base = tasks["sentence"]
    return with_queries(base, resembling(base.queries, examples, list(base.corpus.values())), "resembling")


def with_resembling(tasks: dict[str, RetrievalTask]) -> dict[str, RetrievalTask]:
    """Return the tasks, with 20 queries of the labels moved from these to the examples of `resembling`."""
    labels = tasks["labels"]
    ids = sorted(labels.queries, key=lambda q: hashlib.sha256(q.encode()).digest())
    rest = with_queries(labels, {q: labels.queries[q] for q in ids[EXAMPLES:]}, "labels")
    return tasks | {"labels": rest, "resembling": made_like(tasks, [labels.queries[q] for q in ids[:EXAMPLES]])}


def prepared(name: str, given: argparse.Namespace) -> tuple[list[Any], dict[str, RetrievalTask]]:
    """Return the text of a domain, and its tasks: `labels`, and one for each kind of probe."""
    file = given.work / f"tasks-{name}.json"
    if not file.exists():
        domain = load_domain(name, given.data, given.work, queries=QUERIES + EXAMPLES, passages=PASSAGES)
        tasks = kinds_of_queries(domain.text, name)
        corpus = {id_: cut(text) for id_, text in domain.task.corpus.items()}
        tasks["labels"] = RetrievalTask(corpus, domain.task.queries, domain.task.qrels, "labels")
        made = {kind: [task.corpus, task.queries, task.qrels] for kind, task in tasks.items()}
        file.write_text(json.dumps({"text": domain.text, "tasks": made}))
    kept = json.loads(file.read_text())
    tasks = {kind: RetrievalTask(*parts, kind) for kind, parts in kept["tasks"].items()}
    questions = given.work / f"questions-{name}.json"
    if given.lm and not questions.exists():
        base = tasks["sentence"]
        made = written({q: base.corpus[next(iter(base.qrels[q]))] for q in base.queries}, given.lm)
        questions.write_text(json.dumps(made))
    if questions.exists():
        tasks["question"] = with_queries(tasks["sentence"], json.loads(questions.read_text()), "question")
    return kept["text"], tasks


def scores(run: Rankings, task: RetrievalTask) -> np.ndarray:
    found = score_run(run, task).per_query["ndcg_at_10"]
    return np.array([found[query] for query in task.queries])


def dense_runs(name: str, task: RetrievalTask, work: Path) -> dict[str, Rankings]:
    """Return the rankings of all finished systems; MiniLM also with fewer dimensions."""
    found = {}
    for file in sorted(work.glob(f"{name}-*.npz")):
        vectors = Vectors(file, minilm)
        system = file.stem.removeprefix(f"{name}-").replace("_", " ")
        found[system] = rankings(task, vectors)
        if system == "MiniLM":
            found |= {f"{size} dimensions": rankings(task, vectors, size) for size in (256, 128)}
    return found


def small_pairs(label: np.ndarray, probe: np.ndarray) -> tuple[int, float]:
    """Return the number of pairs of systems with a small difference on the labels, and how many the probe orders alike."""
    pairs = [(a, b) for a in range(len(label)) for b in range(a) if 0 < abs(label[a] - label[b]) < SMALL]
    right = [0.5 if probe[a] == probe[b] else float((label[a] > label[b]) == (probe[a] > probe[b])) for a, b in pairs]
    return len(pairs), sum(right)


def agreement(name: str, work: Path) -> dict[str, dict[str, Any]]:
    """Return the numbers of one domain for each kind of query."""
    tasks = with_resembling(prepared(name, argparse.Namespace(work=work, lm=None))[1])
    means, curves = {}, {}
    for kind, task in tasks.items():
        bm25, dense = bm25_run(task), dense_runs(name, task, work)
        means[kind] = {"BM25": scores(bm25, task)} | {system: scores(run, task) for system, run in dense.items()}
        curves[kind] = {
            system: {w: scores(fuse_runs(dense[system], bm25, task, w), task) for w in WEIGHTS}
            for system in HYBRIDS
            if system in dense
        }
    systems = [system for system in means["labels"] if system != "BM25"]
    label = np.array([means["labels"][system].mean() for system in systems])
    label_bm25 = means["labels"]["BM25"].mean() - means["labels"]["MiniLM"].mean()
    found: dict[str, dict[str, Any]] = {}
    for kind in tasks:
        table = np.stack([means[kind][system] for system in systems])
        pairs, right = small_pairs(label, table.mean(1))
        found[kind] = {
            "queries": table.shape[1],
            "rho": spearmanr(label, table.mean(1)).statistic,
            "pairs": pairs,
            "right": right,
            "bm25": means[kind]["BM25"].mean() - means[kind]["MiniLM"].mean() - label_bm25,
            "curves": curves[kind],
            "best": {system: best(curve) for system, curve in curves[kind].items()},
            "means": dict(zip(systems, table.mean(1), strict=True)) | {"BM25": means[kind]["BM25"].mean()},
        }
    halves = [table_of(means["labels"], systems, part) for part in (0, 1)]
    pairs, right = small_pairs(halves[0], halves[1])
    found["labels"] |= {"pairs": pairs, "right": right, "rho": spearmanr(*halves).statistic}
    return found


def table_of(found: Scores, systems: list[str], part: int) -> np.ndarray:
    return np.array([found[system][part::2].mean() for system in systems])


def best(curve: Curve) -> float:
    return max(curve, key=lambda w: (round(float(curve[w].mean()), 9), -abs(w - PRIOR)))


def supported(curve: Curve, up: float, down: float) -> float:
    """Return the prior, or the weight nearest to it that is as good as the best, if the best is better by enough standard errors."""
    top = best(curve)
    gain = curve[top] - curve[PRIOR]
    if gain.mean() <= (up if top > PRIOR else down) * gain.std(ddof=1) / len(gain) ** 0.5:
        return PRIOR
    between = [w for w in WEIGHTS if min(top, PRIOR) <= w <= max(top, PRIOR)]
    lost = {w: curve[top] - curve[w] for w in between}
    good = [w for w in between if lost[w].mean() <= lost[w].std(ddof=1) / len(gain) ** 0.5]
    return min(good, key=lambda w: abs(w - PRIOR))


def rules(found: dict[str, dict[str, Any]], system: str) -> dict[str, float]:
    """Return the weight that each rule chooses without labels."""
    kinds = {kind: found[kind]["curves"][system] for kind in found if kind != "labels"}
    chosen = {"0.0": 0.0, "0.3": PRIOR}
    for kind, curve in kinds.items():
        chosen[f"best on {kind}"] = best(curve)
        for up, down in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2)):
            chosen[f"prior, {up}/{down} errors, {kind}"] = supported(curve, up, down)
    moves = [supported(kinds[kind], 2, 1) - PRIOR for kind in ("sentence", "short", "keywords", "unshared")]
    same = min(moves) > 0 or max(moves) < 0
    chosen["prior, all kinds agree"] = PRIOR + min(moves, key=abs) if same else PRIOR
    return {rule: round(weight, 1) for rule, weight in chosen.items()}


def report(given: argparse.Namespace) -> None:
    names = [name for name in given.domains if (given.work / f"{name}-quickstart.npz").exists()]
    results = {name: agreement(name, given.work) for name in names}
    print("| kind | queries | Spearman | small differences ordered alike | BM25 overrated by | best weight, MiniLM |")
    print("|---|---|---|---|---|---|")
    for kind in dict.fromkeys(kind for found in results.values() for kind in found):
        rows = {name: found[kind] for name, found in results.items() if kind in found}
        right, pairs = (sum(row[key] for row in rows.values()) for key in ("right", "pairs"))
        rho = ", ".join(f"{row['rho']:.2f}" for row in rows.values())
        over = ", ".join(f"{row['bm25']:+.3f}" for row in rows.values())
        weights = ", ".join(f"{row['best']['MiniLM']:.1f}" for row in rows.values())
        number = ", ".join(str(row["queries"]) for row in rows.values())
        mean = np.mean([row["rho"] for row in rows.values()])
        print(f"| {kind} | {number} | {mean:.2f} ({rho}) | {right / pairs:.0%} of {pairs} | {over} | {weights} |")
    print(f"\n({', '.join(names)}; of the labels: one half against the other)\n")
    chosen: dict[str, list[tuple[float, float]]] = {}
    for found in results.values():
        for system, curve in found["labels"]["curves"].items():
            for rule, weight in (rules(found, system) | {"labels": found["labels"]["best"][system]}).items():
                chosen.setdefault(rule, []).append((weight, curve[weight].mean() - curve[PRIOR].mean()))
    cells = [f"{name}, {system}" for name, found in results.items() for system in found["labels"]["curves"]]
    print(f"| rule | mean | worst | {' | '.join(cells)} |\n|{'---|' * (len(cells) + 3)}")
    for rule, made in sorted(chosen.items(), key=lambda item: -np.mean([gain for _, gain in item[1]])):
        gains = [gain for _, gain in made]
        print(
            f"| {rule} | {np.mean(gains):+.4f} | {min(gains):+.3f} | {' | '.join(f'{w:.1f} ({g:+.3f})' for w, g in made)} |"
        )
    for name, found in results.items():
        print(
            f"\n{name}: "
            + "; ".join(f"{s} {m:.3f}" for s, m in sorted(found["labels"]["means"].items(), key=lambda i: -i[1]))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("outputs/probe-queries"))
    parser.add_argument("--domains", nargs="+", default=DOMAINS, choices=DOMAINS)
    parser.add_argument("--lm", help="Folder or Hub id of the model that writes questions.")
    parser.add_argument("--seconds", type=float, default=1e9, help="Stop encoding after this number of seconds.")
    parser.add_argument("--report", action="store_true", help="Only print the finished results.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    if given.report:
        report(given)
        return
    end = time.monotonic() + given.seconds
    for name in given.domains:
        text, tasks = prepared(name, given)
        for system, load in systems(name, text, given.data, given.work).items():
            vectors = Vectors(given.work / f"{name}-{system.replace(' ', '_')}.npz", load)
            vectors.of(
                [text for task in tasks.values() for part in (task.queries, task.corpus) for text in part.values()]
            )
            if time.monotonic() > end:
                sys.exit("stopped: repeat the command to continue")
        print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main()
