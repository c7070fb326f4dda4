"""Without a network, models in the cache load, and others fail, without the libraries' repeated requests."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, is_offline_mode

from revela_hub.checkpoints import method_of_model
from revela_hub.data import read_documents
from revela_hub.errors import UserError
from revela_hub.gguf_files import model_folder
from revela_hub.hub_connection import prefer_cache, reconnect
from revela_hub.pickles import model_kind, refuse_pickles
from revela_hub.retrieval.encoder import load_encoder
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.baselines.language_models import load_lm

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine that cannot reach the Hub, although nobody has set HF_HUB_OFFLINE; returns its empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a request was repeated"))
    yield tmp_path / "hub"
    reconnect()


@pytest.mark.parametrize("load", [load_encoder, load_retriever, load_lm])
def test_a_model_that_is_not_here_fails_at_once(no_network: Path, load: Callable[[str], Any]) -> None:
    with pytest.raises(
        UserError, match="cannot load .*org/model.*: it is not on this machine, and the Hub cannot be reached"
    ):
        load("org/model")


def test_a_data_set_that_is_not_here_fails_at_once(no_network: Path) -> None:
    with pytest.raises(UserError, match="data set org/data: cannot be read"):
        next(read_documents("hf:org/data"))


def test_what_is_read_first_does_not_repeat_requests(no_network: Path) -> None:
    assert model_kind("org/model") == "" and method_of_model("org/model") is None
    with pytest.raises(UserError, match="cannot load the model 'org/model/x.gguf'"):
        model_folder("org/model/x.gguf")
    with pytest.raises(OSError, match="offline mode is enabled"):
        refuse_pickles("org/model")


def test_a_model_in_the_cache_loads(no_network: Path, retriever_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As `hf download` leaves it, which does not note what the repository lacks."""
    repository = no_network / "models--org--model"
    shutil.copytree(retriever_folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    with caplog.at_level(logging.WARNING, "revela_hub"):
        vectors = load_encoder("org/model", device="cpu").encode(["rivers"])
    assert vectors.tolist() == load_encoder(str(retriever_folder), device="cpu").encode(["rivers"]).tolist()
    assert [r.getMessage() for r in caplog.records if "cannot be reached" in r.getMessage()] == [
        "the Hub cannot be reached ([Errno 111] Connection refused): only models on this machine are used"
    ]


def test_an_upload_tries_again(no_network: Path) -> None:
    prefer_cache()
    assert is_offline_mode()
    reconnect()
    assert not is_offline_mode()


def test_the_hub_is_tried_again_after_a_minute(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("revela_hub.hub_connection.time", SimpleNamespace(monotonic=lambda: clock.now))
    prefer_cache()
    assert is_offline_mode()
    clock.now = 61
    prefer_cache()  # in vain
    assert is_offline_mode()
    monkeypatch.setattr("revela_hub.hub_connection._fault", lambda address: None)  # the network is back
    for now, offline in ((120, True), (122, False)):
        clock.now = now
        prefer_cache()
        assert is_offline_mode() == offline


def test_datasets_is_not_imported_in_our_offline_mode(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stay offline."""
    imported = []
    monkeypatch.setattr(
        "revela_hub.hub_connection.import_module", lambda name: imported.append((name, is_offline_mode()))
    )
    prefer_cache()
    assert imported == [("datasets", False)]


def test_the_users_own_offline_mode_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    prefer_cache()
    reconnect()
    assert is_offline_mode()
