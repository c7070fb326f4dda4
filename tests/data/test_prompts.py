"""Prompts and answers: the forms they come in, tasks made of raw text, and errors with file and line."""

import json
import re
from pathlib import Path

import pytest

from revela_hub.data.prompts import COLUMNS, KINDS, read_prompts, text_prompts
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
            "task": "slot_filling",
        },
        {"task": "reading_comprehension", "context": "Emma is old.", "question": "How is Emma?", "answer": "old"},
        {"task": "fact_checking", "input": "Emma is a novel.", "answer": "SUPPORTS", "retrieve": False},
    )
    rows = read_prompts([file]).to_list()
    assert tuple(rows[0]) == COLUMNS
    assert [row["prompt"] for row in rows[:2]] == ["Who wrote Emma?\n", "Q: Who wrote Emma? A:"]
    assert [row["answers"] for row in rows[:3]] == [["Jane Austen"], ["Jane Austen", "Austen"], ["novel"]]
    assert [row["id"] for row in rows[1:3]] == ["q2", "3"]
    assert [row["retrieve"] for row in rows] == [True, True, True, False, False]
    assert rows[3]["prompt"] == "Emma is old. Q: How is Emma? A:"
    assert rows[4]["where"] == f"{file.as_posix()}:5"
    assert rows[4]["answers"] == ["True"]  # the paper's verdict for KILT's


@pytest.mark.parametrize(
    ("row", "message"),
    [
        *(({"question": "Who?", **answers}, "no answer") for answers in ({}, {"answers": []}, {"answer": "  "})),
        ({"input": "Who?", "output": [{"answer": ""}]}, "no answer"),
        ({"question": "Who?", "answer": 3}, "no answer"),
        *((prompt | {"answer": "a"}, "no text in prompt") for prompt in ({}, {"prompt": " "}, {"question": 3})),
        ({"task": "poetry", "input": "x", "answer": "a"}, "poetry"),
        ({"input": "x", "context": [[{"content": "y"}]], "answer": "a"}, "column 'context' holds list, not text"),
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
        given, answer = row["prompt"].split(" [SEP] ")[0], row["answers"][0]
        assert answer in text and not row["retrieve"]
        if kind == "phrase_denoising":
            given, rest = given.split(" Recover the original")
            before, other, after = re.split(r"\[START\] | \[END\]", given)
            assert before + answer + after in text and other in text and other != answer
            assert rest == " phrases marked between [START] and [END] in the given text A:"
        if kind.endswith("sentence"):
            assert (f"{given} {answer}" if kind == "next_sentence" else f"{answer} {given}") in text
            assert f"[SEP] {kind.replace('_', ' ')} Generate" in row["prompt"]


def test_columns_of_other_data_sets(tmp_path: Path) -> None:
    """A nested column, a choice, a conversation about a text, messages that name the one before, and the marks of KILT."""
    choice = {"q": {"text": "What is Emma?"}, "answers": ["a song", "a novel"], "correct": 1}
    said = {"text": ["Jane Austen", "1815"]}
    story = {"story": "Emma is a novel.", "asked": ["Who wrote it?", "When?"], "said": said}
    linked = {"input": "Read [START_ENT] Emma [END_ENT] now.", "output": [{"answer": "Emma (novel)"}]}
    turns = [("a", None, "Hi", "user"), ("b", "a", "Hello", "bot"), ("c", "b", "Bye", "user"), ("d", "b", "No", "bot")]
    messages = [dict(zip(("me", "before", "text", "role"), turn, strict=True)) for turn in turns]
    names = ("choice", "story", "linked", "messages")
    file = {name: str(tmp_path / f"{name}.jsonl") for name in names}
    for name, rows in zip(names, ([choice], [story], [linked], messages), strict=True):
        write(Path(file[name]), *rows)
    columns = {"context": "story", "input": "asked", "answers": "said.text"}
    roles = {"id": "me", "parent": "before", "input": "text"}
    sources = [
        {"path": file["choice"], "columns": {"input": "q.text", "choice": "correct"}},
        {"path": file["story"], "task": "reading_comprehension", "columns": columns},
        {"path": file["linked"], "task": "entity_linking"},
        {"path": file["messages"], "task": "dialogue", "columns": roles, "where": {"role": "bot"}},
    ]
    rows = [(row["prompt"].split(" Output")[0], row["answers"][0]) for row in read_prompts(sources).to_list()]
    assert rows == [
        ("Q: What is Emma? A:", "a novel"),
        ("Emma is a novel. Q: Who wrote it? A:", "Jane Austen"),
        ("Emma is a novel. Q: Who wrote it? A: Jane Austen Q: When? A:", "1815"),
        ("Read [START] Emma [END] now.", "Emma (novel)"),
        ("Hi", "Hello"),
        ("Hi Hello", "No"),
    ]
    with pytest.raises(UserError, match="no column role question"):
        read_prompts([{"path": file["choice"], "columns": {"question": "q.text"}}])
    file = str(write(tmp_path / "many.jsonl", *({"prompt": str(n), "answer": "a"} for n in range(99))))
    drawn = [int(row["prompt"]) for row in read_prompts([{"path": file, "max_samples": 9}])]
    assert len(set(drawn)) == 9 and max(drawn) > 30
