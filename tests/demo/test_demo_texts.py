"""Text that visitors paste or upload, and what is shown of paths."""

import json
import pickle
from pathlib import Path

import pytest

from revela_hub.demo.texts import (
    MAX_BYTES,
    card_text,
    documents_of_text,
    documents_of_upload,
    sample,
    sample_documents,
    without_paths,
)
from revela_hub.errors import UserError


def upload(tmp_path: Path, name: str, content: str | bytes) -> Path:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def test_the_sample_has_passages_and_queries() -> None:
    documents = list(sample_documents())
    assert len(documents) == len({document.id for document in documents}) >= 20
    assert all(len(document.text.split()) > 15 for document in documents)
    assert len(sample()["queries"]) >= 6


def test_text_and_markdown_are_one_document(tmp_path: Path) -> None:
    for name in ("notes.txt", "NOTES.MD"):
        [document] = documents_of_upload(upload(tmp_path, name, "# Täglich\n\nRivers reach the sea.\n"))
        assert (document.id, document.path, document.text) == (name, None, "# Täglich\n\nRivers reach the sea.\n")


def test_json_lines_are_rows(tmp_path: Path) -> None:
    rows = [{"title": "Water", "text": "Rivers."}, {"text": "Hills.", "other": 1}]
    file = upload(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert [(row.id, row.text) for row in documents_of_upload(file)] == [
        ("a.jsonl:1", "Water\n\nRivers."),
        ("a.jsonl:2", "Hills."),
    ]


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> object:
        return Path.write_text, (self.file, "executed")


@pytest.mark.parametrize(
    "name", ["model.pkl", "model.bin", "run.py", "page.html", "data.json", "x.txt.gz", "noextension"]
)
def test_other_files_are_not_read(tmp_path: Path, name: str) -> None:
    file = upload(tmp_path, name, pickle.dumps(Harmful(tmp_path / "trace")))
    with pytest.raises(UserError, match=rf"^{name}: only \.txt, \.md, \.jsonl files are read"):
        documents_of_upload(file)
    assert not (tmp_path / "trace").exists()


def test_a_pickle_that_is_named_text_is_not_loaded(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        with pytest.raises(UserError, match=r"^a\.(txt|jsonl) is not UTF-8 text|^a\.(txt|jsonl) is a binary file"):
            documents_of_upload(upload(tmp_path, name, pickle.dumps(Harmful(tmp_path / "trace"))))
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "the text is empty"),
        ("a.txt", " \n\t", "the text is empty"),
        ("a.txt", b"\xff\xfe", "a.txt is not UTF-8"),
        ("a.txt", b"a\0b", "a.txt is a binary file"),
        ("a.txt", "x" * (MAX_BYTES + 1), "a.txt has more than the 1,000,000 bytes"),
        ("a.jsonl", "\n\n", "a.jsonl is empty"),
        ("a.jsonl", '{"text": "  "}', "a.jsonl is empty"),
        ("a.jsonl", '{"text": "x"}\n{', "a.jsonl:2: invalid JSON"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: invalid JSON"),
        ("a.jsonl", '["text"]', "a.jsonl:1: no field text"),
        ("a.jsonl", '{"text": 3}', "a.jsonl:1: no field text"),
    ],
)
def test_what_is_wrong_with_an_upload(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(UserError) as raised:
        documents_of_upload(upload(tmp_path, name, content))
    assert str(raised.value).startswith(message)
    assert str(tmp_path) not in str(raised.value)


def test_pasted_text() -> None:
    assert [document.text for document in documents_of_text("Rivers.")] == ["Rivers."]
    assert documents_of_text("a\udcffb")[0].text == "a?b"
    with pytest.raises(UserError, match="the text is empty"):
        documents_of_text("  ")
    with pytest.raises(UserError, match="more than the 1,000,000 allowed"):
        documents_of_text("ä" * MAX_BYTES)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("cannot read /tmp/gradio/ab12/a.txt: broken", "cannot read a.txt: broken"),
        ("'/home/me/my model/x.json' is damaged", "'my model/x.json' is damaged"),
        (r"C:\Users\me\x.txt is missing", "x.txt is missing"),
        ("~/models/a/b is missing", "b is missing"),
        ("org/model at https://huggingface.co/org/model", "org/model at https://huggingface.co/org/model"),
    ],
)
def test_paths_are_shortened(message: str, shown: str) -> None:
    assert without_paths(message) == shown


def test_a_card_loses_metadata_and_pictures() -> None:
    card = "---\ntags: [x]\n---\n\n# Model\n\n![curve](figures/a.png)\n\nTrained from /home/me/base/model.\n"
    assert card_text(card) == "\n# Model\n\n\n\nTrained from model.\n"
