"""Which arguments are compared when a run is resumed, and how places on this machine are."""

import json
import os
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from revela_hub.data.row_cache import rows_fingerprint
from revela_hub.data.sources.source import parse_sources
from revela_hub.trainers.base.card import card_metadata
from revela_hub.trainers.base.checkpoints import Record
from revela_hub.trainers.base.settings import NO_EFFECT
from revela_hub.trainers.base.settings import changes as changes_of
from revela_hub.trainers.base.settings import run_settings as settings_of
from revela_hub.trainers.baselines import CONTRIEVER, RA_IT
from revela_hub.trainers.baselines.contriever_command import Arguments


def run_settings(given: Arguments) -> dict[str, Any]:
    return settings_of(given, CONTRIEVER)


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return changes_of(before, now, CONTRIEVER)


def arguments(folder: Path, **options: Any) -> Arguments:
    given = {"retriever": "owner/name", "output_dir": str(folder / "out"), "report_to": [], "use_cpu": True}
    return Arguments(**(given | options))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dataloader_drop_last", True), ("ignore_data_skip", True), ("average_tokens_across_devices", False)),
        *(("eval_corpus", "owner/corpus"), ("eval_split", "dev"), ("eval_steps", 0.5), ("export", "last")),
        *(("probe_queries", 30), ("probe", "none"), ("accelerator_config", {"split_batches": True})),
        *(("ddp_broadcast_buffers", True), ("auto_find_batch_size", True), ("deepspeed", None)),
    ],
)
def test_what_affects_the_result_is_compared(tmp_path: Path, name: str, value: object) -> None:
    before, now = (run_settings(arguments(tmp_path, **options)) for options in ({}, {name: value}))
    assert name in before
    assert (name in changes(before, now)) == (value is not None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dataloader_num_workers", 2), ("save_steps", 3), ("logging_steps", 7), ("report_to", "none")),
        *(("cache_dir", "elsewhere"), ("hub_token", "secret"), ("save_total_limit", 2), ("run_name", "again")),
    ],
)
def test_what_does_not_is_not_compared_nor_kept(tmp_path: Path, name: str, value: object) -> None:
    settings = run_settings(arguments(tmp_path, **{name: value}))
    assert not changes(run_settings(arguments(tmp_path)), settings)
    assert name not in settings and "secret" not in json.dumps(settings)


def test_a_method_names_its_own_neutral_and_path_settings(tmp_path: Path) -> None:
    """What only one method knows is in its record: an argument of that name is compared for every other method."""
    given = arguments(tmp_path, temperature=0.1, views="inverse_cloze")
    method = replace(CONTRIEVER, neutral_settings=frozenset({"temperature"}), files=("views",))
    before, now = settings_of(arguments(tmp_path), method), settings_of(given, method)
    assert "temperature" not in now and set(changes_of(before, now, method)) == {"views"}
    assert set(changes_of(before | {"temperature": 1}, now | {"temperature": 2}, method)) == {"views"}
    assert set(changes(run_settings(arguments(tmp_path)), run_settings(given))) == {"temperature", "views"}


def test_a_default_is_not_the_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("auto", "mine"):
        (tmp_path / name).write_text("text")
    assert run_settings(arguments(tmp_path))["probe"] == "auto"
    assert run_settings(arguments(tmp_path, probe="mine"))["probe"].startswith("mine (sha256")
    method = replace(CONTRIEVER, files=("views",))  # as the pseudo-labels bm25
    value = arguments(tmp_path).views
    (tmp_path / value).write_text("text")
    assert settings_of(arguments(tmp_path), method)["views"] == value


def test_no_name_stands_for_those_that_begin_with_it() -> None:
    names = {entry.name for entry in fields(Arguments)}
    assert {"eval_delay", "dataloader_in_order", "label_names"} <= names - NO_EFFECT


def test_places_are_compared_by_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, content in (("a/model", "one"), ("b/model", "two"), ("c/model", "one"), ("empty/model", "")):
        Path(place).mkdir(parents=True)
        if content:
            Path(place, "model.safetensors").write_text(content)
    found = {place: run_settings(arguments(tmp_path, retriever=f"{place}/model"))["retriever"] for place in "abc"}
    assert found["a"] == found["c"] != found["b"]  # moved, but the same
    Path("empty2/model").mkdir(parents=True)
    empty = [run_settings(arguments(tmp_path, retriever=f"{place}/model")) for place in ("empty", "empty2")]
    assert changes(*empty)
    assert str(tmp_path) not in json.dumps([found, *empty])
    # A word stays a word, whatever lies in the working folder.
    Path("test").mkdir()
    assert run_settings(arguments(tmp_path))["eval_split"] == "test"


def test_a_card_names_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a/beir").mkdir(parents=True)
    given = arguments(tmp_path, eval_corpus=str(tmp_path / "a" / "beir"), deepspeed=None, language="de")
    config = card_metadata(given, method=CONTRIEVER, summary="", sources=()).config
    assert str(tmp_path) not in config
    assert yaml.safe_load(config) | {"eval_corpus": "beir", "language": "de"} == yaml.safe_load(config)
    assert "accelerator_config" not in config and "output_dir" not in config


def test_a_card_names_no_place_that_is_a_pattern_or_gone(tmp_path: Path) -> None:
    from revela_hub.trainers.base.settings import shown

    folder = f"{tmp_path}/private client"
    given = [
        f"{folder}/docs/*.txt",
        "~/client/gone.jsonl",
        "hf:owner/name",
        f"hf:{folder}/rows",
        "hf://datasets/owner/a",
    ]
    expected = ["*.txt", "gone.jsonl", "hf:owner/name", "hf:rows", "hf://datasets/owner/a"]
    assert shown("corpus", given, RA_IT) == shown("plain_text", given, RA_IT) == expected
    mapping = {"path": "hf:json", "data_files": given[0], "split": "/a", "text_column": "/b"}
    assert shown("corpus", [mapping], RA_IT) == [mapping | {"data_files": "*.txt"}]
    assert shown("prompt", "/search: ", RA_IT) == "/search: "
    assert shown("exclude", [given[0], "~$*", "docs/old"], RA_IT) == ["*.txt", "~$*", "docs/old"]  # ~$: lock files
    record = Record({}, changes=[{"step": 5, "corpus": [given[:1], given[1:2]]}])
    config = card_metadata(
        arguments(tmp_path), method=replace(RA_IT, models=("retriever",)), summary="", sources=(), record=record
    ).config
    assert "# from step 5 on: corpus ['gone.jsonl'] (before: ['*.txt'])" in config
    for gone in ("~/client/gone", f"{folder}/gone"):
        gone_model = arguments(tmp_path, retriever=gone, exclude=["~$*"])
        assert run_settings(gone_model)["exclude"] == ["~$*"]
        card = card_metadata(gone_model, method=CONTRIEVER, summary="", sources=[f"hf:{gone}", "hf:owner/name"])
        assert (card.base_model, card.datasets) == (None, ["owner/name"])
        assert yaml.safe_load(card.config)["retriever"] == "gone"


def test_a_changed_file_is_another_place(tmp_path: Path) -> None:
    folder = tmp_path / "beir"
    folder.mkdir()
    (folder / "corpus.jsonl").write_text("one")
    before = run_settings(arguments(tmp_path, eval_corpus=str(folder)))
    shutil.move(folder, tmp_path / "moved")
    shutil.move(tmp_path / "moved", folder)
    assert run_settings(arguments(tmp_path, eval_corpus=str(folder))) == before
    (folder / "corpus.jsonl").write_text("two")
    assert "eval_corpus" in changes(before, run_settings(arguments(tmp_path, eval_corpus=str(folder))))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no names of files that are not UTF-8")
def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    """Of files in a folder, and of the folder: in the settings of a run, the key of its cached rows, and its card."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / os.fsdecode(b"\xff.txt")).write_text("the rivers of the north")
    given = arguments(tmp_path, eval_corpus=str(folder))
    assert str(run_settings(given)["eval_corpus"]).startswith("caf\\udce9 (sha256 ")
    card_metadata(given, method=CONTRIEVER, summary="", sources=()).config.encode()
    assert len(rows_fingerprint({}, parse_sources(folder))) == 32
