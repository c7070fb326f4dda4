"""Settings of a model folder that contradict each other."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from revela_hub.hub_cards.verify.consistency import contradictions, setting_faults
from revela_hub.hub_cards.verify.contents import contents
from revela_hub.hub_cards.verify.weights import NotReadable, safetensors_header

WORDS = {"[PAD]": 0, "[UNK]": 1, "river": 2, "sea": 3}
SETTINGS = "config_sentence_transformers.json"


def change(name: str, **changes: Any) -> Callable[[Path], object]:
    def plant(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    return plant


def listed(*entries: tuple[int, str, str]) -> Callable[[Path], object]:
    modules = [{"idx": idx, "path": path, "type": f"s.{kind}"} for idx, path, kind in entries]
    return lambda folder: (folder / "modules.json").write_text(json.dumps(modules))


def bpe(folder: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    listed((0, "", "Transformer"), (1, "1_Pooling", "Pooling"), (2, "2_Normalize", "Normalize"))(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    switches = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(switches | {"pooling_mode": "mean"}))
    settings = {"prompts": {"query": "Query: "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    added = [{"id": 0, "content": "[PAD]"}, {"id": 9, "content": "<new>"}]
    stored = {"model": {"type": "WordPiece", "vocab": WORDS}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "similarity": (change(SETTINGS, similarity_fn_name="cosin"), "unknown similarity_fn_name 'cosin'"),
    "prompts": (change(SETTINGS, prompts=["query: "]), "prompts must map names to texts"),
    "default prompt": (change(SETTINGS, default_prompt_name="search"), "default_prompt_name is 'search'"),
    "order": (listed((0, "", "T"), (2, "1_Pooling", "Pooling"), (1, "2_Normalize", "N")), "not in the order of their idx"),
    "normalize first": (listed((0, "", "T"), (1, "2_Normalize", "Normalize"), (2, "1_Pooling", "Pooling")), "Normalize has no effect before Pooling"),
    "pooling, two forms": (change("1_Pooling/config.json", pooling_mode="cls"), "pooling_mode is cls, but these switches are true: pooling_mode_mean"),
    "pooling, none": (
        change("1_Pooling/config.json", pooling_mode=None, pooling_mode_mean_tokens=False), "every pooling_mode_* is false"
    ),
    "vocab.txt": (lambda f: (f / "vocab.txt").write_text("[PAD]\n[UNK]\nsea\nriver\n"), "vocab.txt: 'sea' has the id 2, but 3"),
    "an id twice": (
        change("tokenizer.json", added_tokens=[{"id": 2, "content": "the"}]), "'river' and the added token 'the' have the same id, 2"
    ),
    "vocab.json": (lambda f: [bpe(f), (f / "vocab.json").write_text('{"a": 1}')], "vocab.json: 'a' has the id 1, but 0"),
    "merges.txt": (lambda f: [bpe(f), (f / "merges.txt").write_text("b a\n")], "merges.txt and tokenizer.json have different merges"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_contradictions(name: str, folder: Path) -> None:
    plant, said = CASES[name]
    assert list(setting_faults(folder)) == []
    plant(folder)
    assert said in next(setting_faults(folder))


def test_values_of_the_wrong_type_are_no_contradictions(folder: Path) -> None:
    change("tokenizer.json", added_tokens=["the"])(folder)
    (folder / "router_config.json").write_text(json.dumps({"types": {"a": "x"}, "structure": {"query": 5}}))
    assert list(setting_faults(folder)) == []
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0000")
    with pytest.raises(NotReadable, match="model.safetensors is not a safetensors file: its header cannot be read"):
        safetensors_header(folder / "model.safetensors")
    assert list(contradictions(folder, contents(folder))) == ["router_config.json: no route contains a"]


def test_consistent_bpe_files(folder: Path) -> None:
    bpe(folder)
    assert list(setting_faults(folder)) == []
