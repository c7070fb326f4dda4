"""Retrieval tasks for benchmarks, each with the raw text of its domain: a few hundred queries and a bounded corpus.

    scifact   claims -> abstracts                     (BEIR)
    medquad   medical questions -> answers            (dev questions)
    squad     questions -> paragraphs of Wikipedia    (questions on the test articles)
    cosqa     web queries -> Python functions         (dev queries)
    stdlib    held-out docstrings -> functions        (the running Python's library; the text excludes those docstrings)

`--data` is the folder that the section "Data and models" of benchmarks/README.md describes.
"""

import gzip
import json
import random
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

from revela_hub.data.sources.beir import RetrievalTask, read_beir

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "quickstart"))
from task import docstring_task  # noqa: E402

DOMAINS = ("stdlib", "cosqa", "medquad", "scifact", "squad")


class Domain(NamedTuple):
    """A labelled task and unlabelled text, given as sources for `read_documents`."""

    task: RetrievalTask
    text: list[dict[str, Any]]


def load_domain(name: str, data: Path, work: Path, *, queries: int, passages: int) -> Domain:
    """Load a domain, sampling queries and passages with a fixed seed. Generated text is written to `work`."""
    if name == "stdlib":
        made = docstring_task(sysconfig.get_paths()["stdlib"], queries=2 * queries, seed=1, name=name)
        file = work / "stdlib.jsonl"
        rows = ({"_id": path, "text": text} for path, text in made.sources.items())
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return Domain(sample(made.task, queries, passages), [{"path": str(file), "kind": "code"}])
    if name in ("cosqa", "scifact"):
        folder = data / name if name == "cosqa" else data / "beir" / name
        whole = read_beir(folder, "dev" if name == "cosqa" else "test")
        text = {"path": str(folder / "corpus.jsonl.gz")} | ({"kind": "code"} if name == "cosqa" else {})
        return Domain(sample(whole, queries, passages), [text])
    corpus = {row["_id"]: row["text"] for row in read_rows(data / name / "passages.jsonl.gz")}
    asked = read_rows(data / name / "dev.jsonl.gz")
    whole = RetrievalTask(
        corpus,
        {row["_id"]: row["question"] for row in asked},
        {row["_id"]: {row["passage_id"]: 1} for row in asked},
        name,
    )
    return Domain(sample(whole, queries, passages), [{"path": str(data / name / "passages.jsonl.gz")}])


def sample(task: RetrievalTask, queries: int, passages: int) -> RetrievalTask:
    """Draw queries, and passages that include the relevant ones, with a fixed seed."""
    drawn = random.Random(0)
    asked = sorted(drawn.sample(sorted(task.queries), min(queries, len(task.queries))))
    needed = dict.fromkeys(id_ for query in asked for id_ in task.qrels[query] if id_ in task.corpus)
    rest = sorted(task.corpus.keys() - needed)
    chosen = [*needed, *drawn.sample(rest, max(0, min(len(rest), passages - len(needed))))]
    return RetrievalTask(
        {id_: task.corpus[id_] for id_ in chosen},
        {id_: task.queries[id_] for id_ in asked},
        {id_: task.qrels[id_] for id_ in asked},
        task.name,
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
