"""`Searcher` finds what the command finds, and raises its errors."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from sentence_transformers import SentenceTransformer

from revela_hub import Searcher, UserError
from revela_hub.cli.main import main
from revela_hub.search.models import fitted_settings


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.md").write_text(text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


def test_it_finds_what_the_command_finds(
    docs: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--mode", "hybrid", "--weights", "0.5", "0.5", "--rerank", "self", "--top_k", "3", "--json"]
    assert main(["search", str(retriever_folder), "rivers and the sea", "--corpus", str(docs), *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    with Searcher(retriever_folder, docs, weights=[0.5, 0.5], rerank="self") as searcher:
        assert printed["score_name"] == searcher.score_name == "relative score"
        assert len(searcher) == 6
        hits = searcher.search("rivers and the sea", top_k=3)
        several = searcher.search(["rivers and the sea", "the capital of Japan"], top_k=3)
        single = [hits, searcher.search("the capital of Japan", top_k=3)]
        assert [[hit.text for hit in found] for found in several] == [[hit.text for hit in found] for found in single]
        assert searcher.search([]) == []
        for wrong, top_k in ((" ", 5), (["rivers", ""], 5), ("rivers", 0)):
            with pytest.raises(UserError):
                searcher.search(wrong, top_k)  # type: ignore[call-overload]
    assert [hit.to_dict() for hit in hits] == printed["hits"]
    assert not list(docs.parent.glob("revela-hub-search-*"))


def test_an_index_is_searched(docs: Path, tmp_path: Path, retriever_folder: Path) -> None:
    index = tmp_path / "index"
    assert main(["index", str(retriever_folder), "--corpus", str(docs), "--output_dir", str(index)]) == 0
    [hit] = Searcher(retriever_folder, index=str(index)).search("rivers", top_k=1)  # without BM25
    [same] = Searcher(retriever_folder, [docs], mode="dense").search("rivers", top_k=1)
    assert hit.text == same.text and hit.score == pytest.approx(same.score, abs=1e-6)


def test_hits_of_a_hybrid_have_the_cosine_which_encodes_nothing_again(
    docs: Path, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = ["rivers and the sea", "zebra"]
    with Searcher(retriever_folder, docs, mode="dense") as dense:
        expected = [{hit.text: hit.score for hit in hits} for hits in dense.search(queries, top_k=6)]
    with Searcher(retriever_folder, docs) as searcher:
        encode = Mock(wraps=SentenceTransformer.encode_query)
        monkeypatch.setattr(SentenceTransformer, "encode_query", lambda *args, **options: encode(*args, **options))
        found = [{hit.text: hit.cosine for hit in hits} for hits in searcher.search(queries, top_k=6)]
    assert [pytest.approx(each, abs=1e-6) for each in expected] == found and encode.call_count == 1
    assert dense.score_name == "cosine"
    assert [hit.cosine for hit in Searcher("bm25", docs).search("rivers")] == [None]


def test_an_unknown_hybrid_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("revela_hub.loading.model_json", lambda *_: None)
    for offline, said in ((True, 0), (False, 1), (False, 0)):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        assert fitted_settings("someone/adapted") == {} and capsys.readouterr().err.count("BM25") == said
