"""Labelled queries that `adapt` holds out."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from datasets import Dataset

from revela_hub.adaptation.labels import hold_out_labels
from revela_hub.data.sources.beir import RetrievalTask


def pairs(queries: int, per_passage: int = 1) -> list[dict[str, str]]:
    return [{"anchor": f"question {n}", "positive": f"passage {n // per_passage}"} for n in range(queries)]


class Held(NamedTuple):
    """The task, its relevant passages, and the rows to train on."""

    task: RetrievalTask
    relevant: set[str]
    left: list[dict[str, str]]


def hold_out(rows: list[dict[str, str]], corpus: dict[str, str], most: int, passages: int, folder: Path) -> Held:
    left = folder / "work" / "labels.jsonl"
    task = hold_out_labels(Dataset.from_list(rows), corpus, most, passages, left, print)
    assert task is not None
    relevant = {task.corpus[passage] for gold in task.qrels.values() for passage in gold}
    kept = [json.loads(line) for line in left.read_text().splitlines()]
    # No query and no relevant passage is on both sides, in any spelling.
    for held, trained in ((task.queries.values(), "anchor"), (relevant, "positive")):
        assert not {same(text) for text in held} & {same(row[trained]) for row in kept}
    return Held(task, relevant, kept)


def same(text: str) -> str:
    return " ".join(text.lower().split())


def test_a_half_is_held_out_and_the_rest_is_left_to_train_on(tmp_path: Path) -> None:
    held = hold_out(pairs(400, 2), {"p0": "passage 3", "p1": "other text"}, 100, 1000, tmp_path)
    assert len(held.task.queries) == 100 and len(held.left) == 300
    # All labelled passages and those of the text are searched, each once.
    assert sorted(held.task.corpus.values()) == sorted([f"passage {n}" for n in range(200)] + ["other text"])


def test_shared_passages_and_other_spellings_are_on_one_side(tmp_path: Path) -> None:
    hold_out(
        pairs(300) + [{"anchor": f"question {n}", "positive": f"passage {n ^ 1}"} for n in range(300)],
        {},
        100,
        1000,
        tmp_path,
    )
    rows = [*pairs(300), *({"anchor": f" QUESTION  {n}\n", "positive": f"another passage {n}"} for n in range(300))]
    rows += [{"anchor": f"more {n}", "positive": f"another\npassage {n}"} for n in range(300)]
    held = hold_out(rows, {"p0": "Passage\n5", "p1": "other text"}, 100, 2000, tmp_path)
    assert len(held.task.queries) == 100 and len(held.left) == 900 - 150  # three pairs of each two queries
    # A relevant passage is not searched in a second spelling.
    assert len(held.relevant) == sum(same(text) in set(map(same, held.relevant)) for text in held.task.corpus.values())
    frequent = [*pairs(100), *({"anchor": f"more {n}", "positive": "frequent"} for n in range(150))]
    held = hold_out(frequent, {}, 1000, 1000, tmp_path)
    assert len(held.task.queries) == 100 and len(held.left) == 150


def test_chunks_that_share_most_of_their_text_with_an_answer_are_not_searched(tmp_path: Path) -> None:
    words = {n: [f"w{n}x{place}" for place in range(40)] for n in range(300)}
    rows = [{"anchor": f"question {n}", "positive": " ".join(words[n])} for n in words]
    chunks = {f"part {n}": " ".join(words[n][5:15] + words[n][20:35]) for n in words}  # a sentence became a query
    chunks |= {
        f"whole {n}": " ".join([*"abcdefgh", *words[n], *(f"more{n}y{place}" for place in range(90))]) for n in words
    }
    chunks |= {f"half {n}": " ".join(words[n][:20] + [f"other{n}y{place}" for place in range(20)]) for n in words}
    task = hold_out(rows, chunks, 100, 2000, tmp_path).task
    relevant = {query.split()[1] for query in task.queries.values()}
    found = [name for name, text in chunks.items() if text in set(task.corpus.values())]
    assert found == [name for name in chunks if name.startswith("half") or name.split()[1] not in relevant]
    assert len(task.corpus) == 300 + 200 + 200 + 300


@pytest.mark.parametrize("rows", [pairs(199), pairs(400, 100)])
def test_few_labels_are_all_trained_on(rows: list[dict[str, str]], tmp_path: Path) -> None:
    """Fewer than 200 queries, or queries of four passages."""
    said: list[str] = []
    assert hold_out_labels(Dataset.from_list(rows), {}, 400, 1000, tmp_path / "left.jsonl", said.append) is None
    assert not list(tmp_path.iterdir()) and "they are trained on" in said[0]
