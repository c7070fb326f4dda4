"""One fault of each kind from tests/adversarial/hostile_publish.py, and some folders without faults."""

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "adversarial"))

import good_folders
import hostile_publish

from revela_hub.hub_cards import upload

GOOD = (
    "BERT with PreTraining heads, embedded", "Llama in shards", "Router of query and document",
    "CrossEncoder", "custom code", "files next to the model", "chat template",
)  # fmt: skip


def test_faults_of_every_kind_are_caught_without_false_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks have all cases."""
    monkeypatch.setattr(upload, "verify", upload.verify)  # restored after the benchmark replaces it
    assert set(GOOD) <= set(good_folders.FAMILIES)
    kinds = {case.kind: case for case in hostile_publish.CASES}  # the last case of each kind
    kinds.pop("never ends")  # takes a minute; tests/hub_cards/test_verify.py has a shorter case
    as_it_is = [hostile_publish.Case("good", name, name, lambda folder: None) for name in GOOD]
    cases = [*kinds.values(), *as_it_is]
    outcomes = hostile_publish.run(cases, tmp_path)
    wrong = [
        f"{case.kind}: {case.name}: {outcome.said}"
        for case, outcome in zip(cases, outcomes, strict=True)
        if outcome.caught == (case.kind == "good") or (case.kind == "good" and outcome.said != "passed")
    ]
    assert wrong == []
    assert len(kinds) >= 19
