"""The card's configuration of a run names no place on this machine, and no secret."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from revela_hub.hub_cards.metadata import for_card, hub_datasets
from revela_hub.trainers.base.checkpoints import run_settings
from revela_hub.trainers.base.run_card import settings_of
from revela_hub.trainers.baselines import CONTRIEVER
from revela_hub.trainers.baselines.contriever import Arguments


def arguments(folder: Path, **options: Any) -> Arguments:
    given = {"retriever": "owner/name", "output_dir": str(folder / "out"), "report_to": [], "use_cpu": True}
    return Arguments(**(given | options))


@pytest.mark.parametrize(
    "name", ["dataloader_drop_last", "eval_split", "temperature", "seed", "data_seed", "optim_args"]
)
def test_what_can_change_the_result_is_recorded(tmp_path: Path, name: str) -> None:
    assert name in run_settings(arguments(tmp_path))


def test_what_cannot_is_not_recorded(tmp_path: Path) -> None:
    settings = run_settings(arguments(tmp_path, hub_token="secret", save_steps=3, logging_steps=7))
    assert not {"hub_token", "save_steps", "logging_steps", "output_dir"} & settings.keys()
    assert "secret" not in json.dumps(settings)


def test_a_card_names_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a/beir").mkdir(parents=True)
    given = arguments(tmp_path, eval_corpus=str(tmp_path / "a" / "beir"), deepspeed=None, language="de")
    config = settings_of(CONTRIEVER, given, {})["config"]
    assert str(tmp_path) not in config
    shown = {"eval_corpus": "beir", "language": "de", "temperature": given.temperature, "learning_rate": 2e-5}
    assert yaml.safe_load(config) | shown == yaml.safe_load(config)
    assert not {"accelerator_config", "output_dir", "remove_unused_columns"} & yaml.safe_load(config).keys()


def test_a_card_names_no_place_that_is_a_pattern_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = f"{tmp_path}/private client"
    given = [f"{folder}/*.txt", "~/client/gone.jsonl", "hf:owner/name", f"hf:{folder}/rows", "hf://datasets/owner/a"]
    assert for_card("corpus", given) == ["*.txt", "gone.jsonl", "hf:owner/name", "hf:rows", "hf://datasets/owner/a"]
    mapping = {"path": "hf:json", "data_files": given[0], "split": "/a", "text_column": "/b"}
    assert for_card("corpus", [mapping]) == [mapping | {"data_files": "*.txt"}]
    assert for_card("query_prompt", "/search: ") == "/search: "
    assert for_card("exclude", [given[0], "~$*", "docs/old"]) == ["*.txt", "~$*", "docs/old"]  # ~$: lock files
    for gone in ("~/client/gone", f"{folder}/gone"):
        found = settings_of(CONTRIEVER, arguments(tmp_path, retriever=gone), {})
        assert found["base_model"] is None and yaml.safe_load(found["config"])["retriever"] == "gone"
        assert hub_datasets([f"hf:{gone}", "hf:owner/name"]) == ["owner/name"]
    cached = "/cache/models--owner--name/snapshots/0a1b/config.json"
    monkeypatch.setattr("revela_hub.hub_cards.metadata.try_to_load_from_cache", lambda *_: cached)
    assert for_card("lm", "owner/name") == "owner/name@0a1b"
