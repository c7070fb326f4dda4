"""Questions held out of a mixture: none of them is trained on, and the same ones whatever else is in it."""

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

from datasets import Dataset

from revela_hub.data.mixture.held_out import hold_out, without_queries, without_texts
from revela_hub.data.mixture.mixture import load_mixture


def rows(questions: int, *, kind: str = "retrieval", first: int = 0) -> list[dict[str, Any]]:
    return [
        {"anchor": f"Question {n}?", "positive": f"answer {n}.{part}", "negative_1": f"no answer {n}", "kind": kind}
        for n in range(first, first + questions)
        for part in range(1 + n % 2)
    ]


def test_every_row_of_a_held_out_question_is_left_out_and_answers_it() -> None:
    given = [*rows(300), {**rows(1)[0], "anchor": "QUESTION  7?"}]  # one of them in other spelling
    left, task = hold_out(Dataset.from_list(given), queries=200, passages=400)
    assert task is not None and len(task.queries) == 30 and len(task.corpus) == 400
    asked = {" ".join(text.casefold().split()) for text in task.queries.values()}
    assert not asked & {" ".join(row["anchor"].casefold().split()) for row in left}
    assert len(left) + sum(" ".join(r["anchor"].casefold().split()) in asked for r in given) == len(given)
    for query, text in task.queries.items():
        number = int(text.split()[1].rstrip("?"))
        found = {task.corpus[passage] for passage in task.qrels[query]}
        assert {f"answer {number}.{part}" for part in range(1 + number % 2)} <= found
        assert f"no answer {number}" in task.corpus.values()


def test_the_choice_depends_on_the_questions_alone() -> None:
    one = hold_out(Dataset.from_list(rows(400)), queries=40).task
    other = hold_out(Dataset.from_list([*rows(50, kind="other", first=900), *reversed(rows(400))]), queries=40).task
    assert one is not None and other is not None
    assert set(one.queries.values()) == set(other.queries.values())


def test_both_stages_hold_out_the_same_questions(tmp_path: Path) -> None:
    tasks: list[dict[str, Any]] = [
        {"name": "first", "stages": [1]},
        {"name": "both"},
        {"name": "few", "max_samples": 100},
    ]
    for number, task in enumerate(tasks):
        path = tmp_path / f"{number}.jsonl"
        given = rows(800, first=1000 * number)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in given))
        task |= {"type": "retrieval", "source": str(path)}
    made = [load_mixture(tasks, stage=stage, cache_dir=tmp_path / "cache") for stage in (1, 2)]
    held = [hold_out(mixture.dataset, queries=50, among=mixture.retrieval) for mixture in made]
    assert len(made[1].dataset) < len(made[1].retrieval or ())
    first, second = ([sorted(part.task.queries.values()), part.task.qrels] for part in held if part.task)
    assert first == second and len(first[0]) == 50
    assert not {row["anchor"] for part in held for row in part.rows} & {*first[0]}


def test_few_questions_or_passages_are_no_evaluation() -> None:
    few = Dataset.from_list([*rows(199), *rows(500, kind="other", first=1000)])
    same = Dataset.from_list([{**row, "positive": "the answer", "negative_1": "no answer"} for row in rows(300)])
    for given in (few, same):
        left, task = hold_out(given)
        assert task is None and left is given


def test_queries_of_another_task_are_not_trained_on() -> None:
    left = without_queries(Dataset.from_list(rows(10)), ["question 3?", "something else"])
    assert {row["anchor"] for row in left} == {f"Question {n}?" for n in range(10) if n != 3}


def test_texts_are_removed_from_passages_but_not_from_questions() -> None:
    held = "The Dart flows to the caf\u00e9."
    mixed = [
        {"anchor": held, "positive": f"{held} Long", "negative_1": "No", "kind": "retrieval"},
        {"anchor": "one", "positive": "One", "negative_1": normalize("NFD", held.upper()), "kind": "retrieval"},
        {"anchor": f"A river. The Dart\nflows to {held[18:]}", "positive": "Two", "negative_1": "No", "kind": "other"},
        {"anchor": "two", "positive": "Three", "negative_1": "No", "kind": "other"},
    ]
    left, removed = without_texts(Dataset.from_list(mixed), [held, "Three"])
    assert removed == 3
    expected = [{**mixed[0], "positive": "  Long"}, {**mixed[2], "anchor": "A river.  "}, mixed[3]]
    assert left.to_list() == expected
    assert without_texts(left, [held]) == (left, 0)
