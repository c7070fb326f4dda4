"""Paths with `~`: the home folder in Python, too, and names of files that only begin with a tilde."""

import re
from pathlib import Path

import pytest
from datasets import Dataset

from revela_hub.data import read_beir, read_documents, write_beir
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.hub_cards.metadata import ModelCardMetadata, describe
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.baselines.language_models import load_lm

LOCK = "~$report.txt"  # of Office, next to an open document


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_only_the_home_folder_is_expanded(home: Path) -> None:
    assert local_path("~/a") == home / "a"
    for name in (LOCK, "~no-such-user/a", "a/~/b"):
        assert local_path(name) == Path(name)


def test_the_product_expands_with_local_path(repository: Path) -> None:
    """`Path.expanduser` ends in a traceback for other names with a tilde."""
    folders = ("data", "evaluation", "hub_cards", "retrieval", "src", "trainers")
    files = [file for folder in folders for file in sorted((repository / folder).rglob("*.py"))]
    assert [file for file in files if re.search(r"\.expanduser\(\)", file.read_text(encoding="utf-8"))] == []


def test_a_file_that_begins_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(LOCK).write_text("locked")
    assert [document.text for document in read_documents(LOCK)] == ["locked"]
    with pytest.raises(UserError, match="no such file or folder: ~no-such-user/a"):
        read_documents("~no-such-user/a")


def test_python_takes_the_home_folder(home: Path) -> None:
    task = RetrievalTask({"d": "text"}, {"q": "query"}, {"q": {"d": 1}}, "task")
    assert write_beir(task, "~/task") == home / "task" and read_beir("~/task").corpus == task.corpus
    Dataset.from_dict({"text": ["a row"]}).save_to_disk(home / "rows")
    assert [document.text for document in read_documents("hf:~/rows")] == ["a row"]
    metadata = ModelCardMetadata(description="A model.")
    metadata.to_file("~/card.yaml")
    assert ModelCardMetadata.from_file("~/card.yaml", {}) == metadata


def test_models_are_found_in_the_home_folder(home: Path, retriever_folder: Path, llama_folder: Path) -> None:
    retriever, lm = (f"~/{folder.relative_to(home)}" for folder in (retriever_folder, llama_folder))
    assert describe(retriever).parameters == describe(retriever_folder).parameters
    assert load_retriever(retriever).get_embedding_dimension() == 32
    assert load_lm(lm)[0].config.name_or_path == str(llama_folder)
