"""Some of the faults of benchmarks/hostile_publish.py, of each kind, and some of the good folders beside them."""

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import good_folders
import hostile_publish

from revela_hub.hub_cards import upload
from revela_hub.hub_cards.verify.verify import as_table, verify_all

PER_KIND = 2
GOOD = (
    "BERT without pooler", "BERT with PreTraining heads, embedded", "BERT in float16", "RoBERTa", "MPNet", "T5 encoder",
    "Llama in shards", "Gemma", "static embeddings", "Router of query and document", "SPLADE", "CrossEncoder",
    "MultiVectorEncoder", "code of its own", "slashes in labels and words", "files beside the model", "plain BertForMaskedLM",
    "plain LlamaForCausalLM without padding token", "chat template",
)  # fmt: skip


def test_faults_of_every_kind_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "verify", upload.verify)  # which the benchmark replaces
    cases = []
    kinds = dict.fromkeys(case.kind for case in hostile_publish.CASES)
    kinds.pop("never ends")  # a minute each; tests/hub_cards/test_verify.py has a shorter one
    for kind in kinds:
        cases += [case for case in hostile_publish.CASES if case.kind == kind][-PER_KIND:]
    outcomes = hostile_publish.run(cases, tmp_path)
    missed = [f"{c.kind}: {c.name}: {o.said}" for c, o in zip(cases, outcomes, strict=True) if not o.caught]
    assert missed == []
    assert len(cases) >= 26


def test_good_folders_are_good(tmp_path: Path) -> None:
    folders = good_folders.build(tmp_path, list(GOOD))
    assert len(folders) == len(GOOD)
    for name, checks in zip(folders, verify_all(list(good_folders.tasks(folders))), strict=True):
        assert all(check.ok for check in checks), f"{name}\n{as_table(checks)}"
        assert len(checks) >= 9, name
