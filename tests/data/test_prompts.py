"""Prompts and answers: the forms they come in, tasks made of raw text, and errors with file and line."""

import json
from pathlib import Path

import pytest

from revela_hub.data.prompts import COLUMNS, KINDS, mix, read_prompts, text_prompts
from revela_hub.data.sources.source import Document
from revela_hub.errors import UserError


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_form_becomes_a_prompt_with_its_answers(tmp_path: Path) -> None:
    file = write(
        tmp_path / "data.jsonl",
        {"prompt": "Who wrote Emma?\n", "answer": "Jane Austen"},
        {"_id": "q2", "question": "Who wrote Emma?", "answers": ["Jane Austen", "Austen", "Austen"]},
        {
            "id": 3,
            "input": "Emma",
            "output": [{"answer": "novel"}, {"provenance": [{"title": "Emma"}]}, {"answer": "", "provenance": []}],
            "task": "dialogue",
        },
        {
            "task": "reading_comprehension",
            "context": "Emma is a novel.",
            "question": "What is Emma?",
            "answer": "a novel",
        },
        {"task": "fact_checking", "input": "Emma is a novel.", "answer": "SUPPORTS", "retrieve": False},
    )
    rows = read_prompts([file]).to_list()
    assert tuple(rows[0]) == COLUMNS
    assert [row["prompt"] for row in rows[:2]] == ["Who wrote Emma?\n", "Question: Who wrote Emma?\nAnswer:"]
    assert [row["answers"] for row in rows[:3]] == [["Jane Austen"], ["Jane Austen", "Austen"], ["novel"]]
    assert [row["id"] for row in rows[1:3]] == ["q2", "3"]
    assert [row["retrieve"] for row in rows] == [True, True, True, False, False]
    assert rows[3]["prompt"] == "Emma is a novel.\nQuestion: What is Emma?\nAnswer:"
    assert rows[4]["where"] == f"{file.as_posix()}:5"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        *(({"question": "Who?", **answers}, "no answer") for answers in ({}, {"answers": []}, {"answer": "  "})),
        ({"input": "Who?", "output": [{"answer": ""}]}, "no answer"),
        ({"question": "Who?", "answer": 3}, "no answer"),
        *((prompt | {"answer": "a"}, "no text in prompt") for prompt in ({}, {"prompt": " "}, {"question": 3})),
        ({"task": "poetry", "input": "x", "answer": "a"}, "poetry"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: dict[str, object], message: str) -> None:
    file = write(tmp_path / "data.jsonl", {"prompt": "a", "answer": "b"}, row)
    with pytest.raises(UserError, match=rf"data\.jsonl:2: .*{message}"):
        read_prompts([file])


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_made_of_raw_text_are_pieces_of_it(kind: str) -> None:
    sentences = [f"The river number {i} flows from Mount Alba {i} to the sea." for i in range(12)]
    documents = [Document("a", " ".join(sentences), None, "text"), Document("b", " ".join(sentences[:6]), None, "text")]
    rows = text_prompts(documents, kind, 5, words=24, seed=1)
    again = text_prompts(documents, kind, 5, words=24, seed=1)
    assert rows.to_list() == again.to_list()
    assert len(rows) == 5
    text = " ".join(sentences)
    for row in rows.to_list():
        assert row["answers"][0] in text
        assert row["retrieve"] is (kind != "plain_text")
        if kind == "phrase_denoising":
            start = row["prompt"].index(": ") + 2
            whole = row["prompt"][start:].removesuffix("\nMissing:").replace("[BLANK]", row["answers"][0])
            assert whole in text
        if kind == "next_sentence":
            given = row["prompt"].removeprefix("Write the sentence that comes next: ").removesuffix("\nNext:")
            assert f"{given} {row['answers'][0]}" in text
        if kind == "previous_sentence":
            given = row["prompt"].removeprefix("Write the sentence that comes before: ").removesuffix("\nBefore:")
            assert f"{row['answers'][0]} {given}" in text
    assert len(mix(rows, [again], seed=0)) == 10
