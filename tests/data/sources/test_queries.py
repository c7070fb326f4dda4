"""Reading queries without judgements."""

from pathlib import Path

import pytest

from revela_hub.data.sources.queries import read_queries
from revela_hub.errors import UserError


def test_lines_json_lines_and_beir_folders_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "log.txt"
    lines.write_text("how do  rivers bend\n\nwhy is the sea salty\nhow do rivers bend\n")
    assert list(read_queries(lines).values()) == ["how do rivers bend", "why is the sea salty"]
    rows = tmp_path / "log.jsonl"
    rows.write_text('{"query": "one"}\n{"_id": "q7", "question": "two"}\n{"text": "three", "query": "unused"}\n')
    assert list(read_queries(rows).values()) == ["one", "two", "three"]
    assert read_queries(rows)["q7"] == "two"
    (tmp_path / "beir").mkdir()
    (tmp_path / "beir" / "queries.jsonl").write_text('{"_id": "a", "text": "four"}\n')
    assert read_queries(tmp_path / "beir") == {"a": "four"}


def test_mistakes_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file .*nothing.txt: give a file with one query per line"):
        read_queries(tmp_path / "nothing.txt")
    with pytest.raises(UserError, match=r"is a folder without queries\.jsonl"):
        read_queries(tmp_path)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n  \n")
    with pytest.raises(UserError, match="empty.txt has no queries"):
        read_queries(empty)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "x"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl:1: .* text, query, question, anchor"):
        read_queries(rows)


@pytest.mark.parametrize("name", ["log.txt", "log.jsonl"])
def test_invalid_utf8_is_reported(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / name).write_bytes('{"query": "caf\xe9"}\n'.encode("latin-1"))
    assert len(read_queries(tmp_path / name)) == 1
    assert f"{name}: invalid UTF-8" in caplog.text
