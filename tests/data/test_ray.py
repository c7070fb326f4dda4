"""Cutting passages on a Ray cluster of this machine."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from revela_hub.data import read_documents
from revela_hub.data.text.passage_rows import cut_rows
from revela_hub.errors import UserError
from revela_hub.retrieval import read_passages

ray = pytest.importorskip("ray", reason="ray is not installed")


def test_passages_cut_on_ray_are_those_of_encode(ray_cluster: None, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    text = "River {0} is long. It carries {0} stones to the sea every year.\n\nNobody counts its {0} bends."
    for part in range(3):  # titles, and numbers as ids; the texts of the second file are empty
        rows = [{"_id": 10 * part + n, "title": f"Title {n}", "text": text.format(10 * part + n)} for n in range(4)]
        rows = [row | {"text": ""} for row in rows] if part == 1 else [*rows[:3], rows[3] | {"title": None}]
        (corpus / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [tmp_path / "here", tmp_path / "again"]
    for folder in folders:
        folder.mkdir()
    expected = read_passages(read_documents(corpus), folders[0], max_words=12)
    cut = ray.data.read_json(str(corpus), lines=True).map_batches(cut_rows, fn_kwargs={"max_words": 12})
    cut.write_parquet(str(tmp_path / "passages"))
    found = pq.read_table(tmp_path / "passages").to_pylist()
    hits = [expected.hit(row, 0.0) for row in range(len(expected))]
    assert {(row["text"], row["document"], row["start_line"], row["end_line"]) for row in found} == {
        (hit.text, hit.document, hit.start_line, hit.end_line) for hit in hits
    }
    assert len(found) == len(hits) == 24
    ids = [row["_id"] for row in found]  # unique, also for passages of the same line
    assert len(set(ids)) == 24 and {name.partition("#")[0] for name in ids} == {hit.location for hit in hits}

    # `encode --corpus` reads the files, and leaves the passages whole.
    pattern = str(tmp_path / "passages" / "*.parquet")
    again = read_passages(read_documents(pattern), folders[1], max_words=12)
    assert {again.hit(row, 0.0).text for row in range(len(again))} == {hit.text for hit in hits}
    assert {again.hit(row, 0.0).document for row in range(len(again))} == set(ids)


def test_rows_without_an_id_are_rejected() -> None:
    with pytest.raises(UserError, match=r"no column '_id'; the columns are 'text'"):
        cut_rows({"text": ["Rivers carry sediment."]})
