"""Files with wrong content, size or name are reported, and valid files are not."""

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, WordEmbeddings
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

from revela_hub.hub_cards.verify.consistency import contradictions
from revela_hub.hub_cards.verify.contents import contents
from revela_hub.hub_cards.verify.files import folder_fault
from revela_hub.hub_cards.verify.kinds import content_faults, is_sentencepiece


def archive(kind: str) -> bytes:
    stream = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as file:
            file.writestr("a", "text")
    elif kind == "tar":
        with tarfile.open(fileobj=stream, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("a"))
    elif kind == "npz":
        np.savez(stream, a=np.ones(3))
    elif kind == "torch":
        torch.save({"a": torch.ones(3)}, stream)
    return stream.getvalue()


def message(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2, len(content)]) + content


PIECES = b"".join(message(1, message(1, piece)) for piece in (b"<unk>", b"\xe2\x96\x81the", b"s"))
SENTENCEPIECE = PIECES + message(2, b"\x0a\x03abc") + message(3, b"")
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
WRONG = {
    "LICENSE.tar.gz": (gzip.compress(archive("tar")), "a gzip archive"),
    "LICENSE": (archive("tar"), "a tar archive"),
    "NOTICE.txt": (archive("zip"), "a zip archive"),
    "tokenizer.model": (pickle.dumps(OrderedDict(a=1)), "a pickle"),
    "spiece.model": (pickle.dumps(OrderedDict(a=1), protocol=0), "a pickle"),
    "source.spm": (SENTENCEPIECE[:-5], "neither a SentencePiece model nor"),
    "target.spm": (b"nothing of the kind", "neither a SentencePiece model nor"),
    "vocab.txt": (archive("npz"), "a zip archive"),
    "merges.txt": (archive("torch"), "a zip archive"),
    "bpe.codes": (b"\x7fELF\2\1\1", "a program"),
    "README.md": (b"cposix\nsystem\n(S'id'\ntR.", "a pickle"),
    "CITATION.cff": (b"title: a\0\1\2", "not text: byte 8"),
    "chat_template.jinja": (b"\x93NUMPY\1\0", "a numpy file"),
    "COPYING": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "map.png": (PNG + archive("zip"), "also a zip archive"),
    "vocab.tsv": (b"(S'id'\nios\nsystem\n.", "a pickle"),
    "NOTICE": (b"(I1\nI2\nlp0\n0cposix\nsystem\np1\n(S'id'\ntR.", "a pickle"),
    "modeling.py": (b"\x80\4K\1.", "a pickle"),
    "words.txt": (b"N0" * 60_000 + b"cposix\nsystem\n(S'id'\ntR.", "a pickle"),
    "NOTES.md": (b"cposix\nsystem\n]R.", "a pickle"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_content(name: str, tmp_path: Path) -> None:
    content, said = WRONG[name]
    (tmp_path / name).write_bytes(content)
    (fault,) = content_faults(tmp_path, [name])
    assert fault.startswith(f"{name} is {said}")


RIGHT = {
    "tokenizer.model": SENTENCEPIECE,
    "vocab.tiktoken": b"IQ== 0\nIg== 1\n",
    "LICENSE": "MIT \f \xa9 2024".encode("latin-1"),
    "NOTICE": "a text".encode("utf-16"),
    "README.md": b"# M\n\ncposix and (c) os\nsystem\n(a list)\n",
    "vocab.txt": b"[PAD]\ncat\ndog\n(\n\x01\n",
    "merges.txt": b"[PAD]\n(\nint\nfloat\ncos\nsin\nR\n.",
    "bpe.codes": b"cos\nsin\nint\nfloat\nR\n.",
    "CITATION.cff": b"cff-version: 1.2.0\nmessage: cite\nauthors:\n- family-names: A.\n",
    "map.png": PNG,
    "empty.txt": b"",
}


@pytest.mark.parametrize("name", RIGHT)
def test_valid_content(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(RIGHT[name])
    assert list(content_faults(tmp_path, [name])) == []


@pytest.mark.parametrize(("name", "size"), [("merges.txt", 10**9), ("config.json", 2 * 10**8), ("a.png", 10**8)])
def test_large_files(name: str, size: int, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(size)  # a sparse file
    (fault,) = content_faults(tmp_path, [name])
    assert fault.startswith(f"{name} has {size:,} bytes, more than the")


def test_a_sentencepiece_model_has_pieces() -> None:
    assert is_sentencepiece(SENTENCEPIECE)
    assert not any(map(is_sentencepiece, (b"", message(2, b"abc"), PIECES + b"\x80\x80", PIECES + b"\x08\x01")))


def folder_of(path: Path) -> Path:
    """Write the minimal files of a sentence-transformers folder."""
    (path / "1_Pooling").mkdir(parents=True)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"idx": i, "name": str(i), "path": p, "type": f"s.{kind}"} for i, (p, kind) in enumerate(kinds.items())]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "config.json").write_text("{}")
    (path / "1_Pooling" / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, path / "model.safetensors")
    return path


def lora(path: Path, name: str = "base_model.model.q_proj.lora_A.weight") -> None:
    path.parent.mkdir(exist_ok=True)
    save_file({name: torch.ones(2)}, path)


def shards(folder: Path, placed: dict[str, str], stored: dict[str, list[str]]) -> None:
    (folder / "model.safetensors").unlink()
    for name, keys in stored.items():
        save_file({key: torch.ones(2) for key in keys}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CONTRADICTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "module not listed": (lambda f: (f / "2_Normalize").mkdir(), "2_Normalize is a module folder, but"),
    "wrong case": (
        lambda f: (f / "1_Pooling" / "config.json").rename(f / "1_Pooling" / "CONFIG.json"),
        "1_Pooling/CONFIG.json: libraries look for config.json",
    ),
    "two by case": (lambda f: (f / "Config.json").write_text("{}"), "Config.json: libraries look for config.json"),
    "licences by case": (
        lambda f: [(f / name).write_text("MIT") for name in ("LICENSE", "License")],
        "LICENSE and License are the same file on case-insensitive file systems",
    ),
    "card by case": (lambda f: (f / "readme.md").write_text("# M"), "readme.md: libraries look for README.md"),
    "adapter in a subfolder": (lambda f: lora(f / "adapter" / "a.safetensors"), "adapter/a.safetensors contains the adapter weight base_model"),
    "adapter by name": (
        lambda f: lora(f / "x" / "adapter_model.safetensors", "a"), "x/adapter_model.safetensors is a PEFT file"
    ),
    "no configuration": (lambda f: (f / "1_Pooling" / "config.json").unlink(), "1_Pooling/config.json, the configuration of the module Pooling, is missing"),
    "weights of no module": (
        lambda f: lora(f / "1_Pooling" / "model.safetensors", "a"), "1_Pooling/model.safetensors is not loaded by any module"
    ),
    "one folder, two modules": (
        lambda f: (f / "modules.json").write_text(
            json.dumps([{"path": "", "type": "s.Transformer"}, {"path": "", "type": "s.Normalize"}, {"path": "1_Pooling", "type": "s.Pooling"}])
        ),
        "modules.json lists the model folder twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    plant, said = CONTRADICTIONS[name]
    assert list(contradictions(folder, contents(folder))) == []
    plant(folder)
    assert next(contradictions(folder, contents(folder)), "").startswith(said)


def test_folders_of_the_user_and_pooling_with_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    (folder / "2_Analysis").mkdir()
    (folder / "2_Analysis" / "plot.ipynb").write_text("{}")
    (folder / "3_WeightedLayerPooling").mkdir()
    save_file({"layer_weights": torch.ones(2)}, folder / "3_WeightedLayerPooling" / "model.safetensors")
    modules = json.loads((folder / "modules.json").read_text())
    kind = "sentence_transformers.sentence_transformer.modules.WeightedLayerPooling"
    weighted = {"idx": 2, "name": "2", "path": "3_WeightedLayerPooling", "type": kind}
    (folder / "modules.json").write_text(json.dumps([*modules, weighted]))
    (folder / "3_WeightedLayerPooling" / "config.json").write_text("{}")
    assert list(contradictions(folder, contents(folder))) == []
    (folder / "2_Analysis" / "config.json").write_text("{}")
    assert next(contradictions(folder, contents(folder))).startswith("2_Analysis is a module folder, but")


def test_training_checkpoints_are_ignored(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    lora(folder / "checkpoint-7" / "adapter_model.safetensors")
    (folder / "Train.py").write_text("")
    assert list(contradictions(folder, contents(folder))) == []


ROUTER = {"types": {"query_0_Transformer": "s.Transformer"}, "structure": {"query": ["query_0_Transformer"]}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"structure": ROUTER["structure"] | {"document": ["d_0_X"]}},
            "a route contains d_0_X, which has no entry in types",
        ),
        ({"types": {"query_0_Transformer": "s.Transformer", "d_0_X": "s.X"}}, "no route contains d_0_X"),
        ({"parameters": {"default_route": "document"}}, "default_route is document, not one of query"),
    ],
)
def test_routes(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": "s.Router"}]))
    (tmp_path / "router_config.json").write_text(json.dumps(ROUTER | {"parameters": {"default_route": "query"}}))
    assert list(contradictions(tmp_path, contents(tmp_path))) == []
    (tmp_path / "router_config.json").write_text(json.dumps(ROUTER | changes))
    assert next(contradictions(tmp_path, contents(tmp_path))) == f"router_config.json: {said}"


@pytest.mark.parametrize(
    ("placed", "stored", "said"),
    [
        ({"a": ONE}, {ONE: ["a"], TWO: ["b"]}, f"index.json does not list {TWO}, whose weights would not be loaded"),
        ({"a": ONE, "b": TWO}, {ONE: ["a"], TWO: ["b", "c"]}, f"index.json does not list c of {TWO}"),
        ({"a": ONE, "b": TWO}, {ONE: ["a", "b"], TWO: ["b"]}, f"index.json does not list b of {ONE}"),
        ({"a": ONE, "b": TWO, "c": TWO}, {ONE: ["a"], TWO: ["b"]}, f"index.json: c is not in {TWO}"),
        ({"a": ONE, "b": "../other.safetensors"}, {ONE: ["a"], TWO: ["b"]}, "refers to ../other.safetensors, which is not a"),
        ({"a": ONE, "b": TWO}, {ONE: ["a"]}, f"{ONE} is there, but {TWO} is missing"),
        ({}, {ONE: ["a"], TWO: ["b"]}, f"index.json does not list {ONE}"),
    ],
)  # fmt: skip
def test_shards(placed: dict[str, str], stored: dict[str, list[str]], said: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    shards(folder, {"a": ONE, "b": TWO}, {ONE: ["a"], TWO: ["b"]})
    assert folder_fault(folder) == ""
    (folder / ONE).rename(folder / "model.safetensors")
    shards(folder, placed, stored)
    for name in {ONE, TWO} - stored.keys():
        (folder / name).unlink(missing_ok=True)
    assert said in folder_fault(folder)


def test_a_repeated_name_in_json(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "bert", "model_type": "llama"}')
    assert folder_fault(folder) == "config.json is not valid JSON: the name 'model_type' occurs twice"


def test_a_static_model_without_its_tokenizer_is_incomplete(tmp_path: Path) -> None:
    kind = "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding"
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    assert folder_fault(tmp_path) == "tokenizer.json is missing: copy it from the original model"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is missing: copy" not in folder_fault(tmp_path)


def test_word_embeddings_are_published_whole(tmp_path: Path) -> None:
    words = WordEmbeddings(WhitespaceTokenizer(["river", "sea"]), torch.eye(2))
    saved = SentenceTransformer(modules=[words, Pooling(2, "mean")], device="cpu")
    saved.save_pretrained(str(tmp_path / "saved"))
    contents(tmp_path / "saved").copy_to(tmp_path / "published")
    published = SentenceTransformer(str(tmp_path / "published"), device="cpu")
    assert published.encode(["river", "sea sea"]).tolist() == [[1, 0], [0, 1]]
