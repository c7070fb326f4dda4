"""The rows of a source: files of several forms in one folder, and BEIR folders as they are met."""

import gzip
import json
import logging
from pathlib import Path

import pytest

from revela_hub.data.sources.beir import read_beir_pairs
from revela_hub.data.sources.rows import read_rows
from revela_hub.data.sources.source import Source
from revela_hub.errors import UserError
from revela_hub.retrieval.mining.sources import read_corpus


def test_other_files_of_a_folder_are_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "README.md").write_text("About these rows.")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with caplog.at_level(logging.WARNING):
        assert [row.columns["text"] for row in read_rows(Source(str(tmp_path), max_documents=1))] == ["a"]
    assert "skipped 1 files that are not JSON lines" in caplog.text
    with pytest.raises(UserError, match=r"README\.md: rows are read from \.jsonl, \.jsonl\.gz, a BEIR folder"):
        list(read_rows(Source(str(tmp_path / "README.md"))))


def test_a_compressed_beir_folder_is_one(tmp_path: Path) -> None:
    """Only queries.jsonl told one: the queries of a folder with queries.jsonl.gz were taken for passages of its corpus."""
    corpus = [{"_id": "d1", "title": "Rivers", "text": "carry sediment."}, {"_id": "d2", "text": "Mud."}]
    for name, rows in {"corpus": corpus, "queries": [{"_id": "q", "text": "what do rivers carry?"}]}.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\td1\t1\nq\td2\t0\n")
    assert list(read_corpus(str(tmp_path), "text")) == ["Rivers carry sediment.", "Mud."]
    assert list(read_beir_pairs(tmp_path, "train")) == [("what do rivers carry?", "Rivers carry sediment.")]
