"""Labelled queries that `adapt` holds out."""

import json
from pathlib import Path

from datasets import Dataset

from revela_hub.adaptation.labels import hold_out_labels


def rows(queries: int, per_passage: int = 1) -> Dataset:
    return Dataset.from_list(
        [{"anchor": f"question {n}", "positive": f"passage {n // per_passage}"} for n in range(queries)]
    )


def test_a_half_is_held_out_and_the_rest_is_left_to_train_on(tmp_path: Path) -> None:
    left = tmp_path / "work" / "labels.jsonl"
    task = hold_out_labels(rows(400, 2), {"p0": "passage 3", "p1": "other text"}, 100, 1000, left)
    assert task is not None
    assert len(task.queries) == 100
    kept = [json.loads(line) for line in left.read_text().splitlines()]
    assert len(kept) == 300
    # No query and no relevant passage is on both sides.
    relevant = {task.corpus[passage] for gold in task.qrels.values() for passage in gold}
    assert not {row["anchor"] for row in kept} & set(task.queries.values())
    assert not {row["positive"] for row in kept} & relevant
    # All labelled passages and those of the text are searched, each once.
    assert sorted(task.corpus.values()) == sorted([f"passage {n}" for n in range(200)] + ["other text"])
    assert all(task.queries[query].startswith("question") for query in task.qrels)


def test_a_query_with_several_passages_has_them_all(tmp_path: Path) -> None:
    pairs = [*rows(300), *({"anchor": f"question {n}", "positive": f"second {n}"} for n in range(300))]
    task = hold_out_labels(Dataset.from_list(list(pairs)), {}, 50, 120, tmp_path / "left.jsonl")
    assert task is not None
    assert len(task.corpus) == 120
    for query, gold in task.qrels.items():
        number = task.queries[query].split()[1]
        assert {task.corpus[passage] for passage in gold} == {f"passage {number}", f"second {number}"}


def test_a_second_passage_is_not_on_both_sides(tmp_path: Path) -> None:
    pairs = [*rows(300), *({"anchor": f"question {n}", "positive": f"passage {n ^ 1}"} for n in range(300))]
    left = tmp_path / "left.jsonl"
    task = hold_out_labels(Dataset.from_list(pairs), {}, 100, 1000, left)
    assert task is not None
    relevant = {task.corpus[passage] for gold in task.qrels.values() for passage in gold}
    assert not {json.loads(line)["positive"] for line in left.read_text().splitlines()} & relevant


def test_other_spellings_are_held_out_together(tmp_path: Path) -> None:
    given = rows(300)
    pairs = [*given, *({"anchor": f" QUESTION  {n}\n", "positive": f"another passage {n}"} for n in range(300))]
    pairs += [{"anchor": f"more {n}", "positive": f"another\npassage {n}"} for n in range(300)]
    left = tmp_path / "left.jsonl"
    task = hold_out_labels(Dataset.from_list(pairs), {"p0": "Passage\n5", "p1": "other text"}, 100, 2000, left)
    assert task is not None
    assert len(task.queries) == 100
    kept = [json.loads(line) for line in left.read_text().splitlines()]
    assert len(kept) == 900 - 150  # three pairs of each two queries
    relevant = {task.corpus[passage] for gold in task.qrels.values() for passage in gold}
    for asked, trained in ((task.queries.values(), "anchor"), (relevant, "positive")):
        assert not {same(text) for text in asked} & {same(row[trained]) for row in kept}
    # A relevant passage is not searched in a second spelling.
    assert len(relevant) == sum(same(text) in set(map(same, relevant)) for text in task.corpus.values())


def same(text: str) -> str:
    return " ".join(text.lower().split())


def test_a_frequent_passage_leaves_pairs_to_train_on(tmp_path: Path) -> None:
    pairs = [*rows(100), *({"anchor": f"more {n}", "positive": "frequent"} for n in range(150))]
    left = tmp_path / "left.jsonl"
    task = hold_out_labels(Dataset.from_list(pairs), {}, 1000, 1000, left)
    assert task is not None
    assert len(task.queries) == 100
    assert len(left.read_text().splitlines()) == 150


def test_chunks_that_share_most_of_their_text_with_an_answer_are_not_searched(tmp_path: Path) -> None:
    words = {n: [f"w{n}x{place}" for place in range(40)] for n in range(300)}
    pairs = [{"anchor": f"question {n}", "positive": " ".join(words[n])} for n in words]
    chunks = {f"part {n}": " ".join(words[n][5:15] + words[n][20:35]) for n in words}  # a sentence became a query
    chunks |= {
        f"whole {n}": " ".join([*"abcdefgh", *words[n], *(f"more{n}y{place}" for place in range(90))]) for n in words
    }
    chunks |= {f"half {n}": " ".join(words[n][:20] + [f"other{n}y{place}" for place in range(20)]) for n in words}
    task = hold_out_labels(Dataset.from_list(pairs), chunks, 100, 2000, tmp_path / "left.jsonl")
    assert task is not None
    relevant = {task.queries[query].split()[1] for query in task.qrels}
    found = [name for name, text in chunks.items() if text in set(task.corpus.values())]
    assert found == [name for name in chunks if name.startswith("half") or name.split()[1] not in relevant]
    assert len(task.corpus) == 300 + 200 + 200 + 300


def test_few_labels_are_all_trained_on(tmp_path: Path) -> None:
    left = tmp_path / "labels.jsonl"
    said: list[str] = []
    assert hold_out_labels(rows(199), {}, 400, 1000, left, said.append) is None
    assert hold_out_labels(rows(400, 100), {}, 400, 1000, left, said.append) is None  # of four passages
    assert not left.exists()
    assert [line.partition(";")[0] for line in said] == [
        "labelled queries: 199, fewer than 200",
        "labelled queries: 400, in 4 groups without a common passage, fewer than 100",
    ]
