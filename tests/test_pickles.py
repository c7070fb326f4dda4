"""Pickled weights are read as tensors: code in a pickle never runs, in any loader of the product."""

import ast
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from transformers import PreTrainedModel

from revela_hub.retrieval.encoder import load_encoder
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.baselines.language_models import load_lm
from revela_hub.trainers.cot_mote.checkpoint import load_cot_mote_start
from revela_hub.trainers.retromae.checkpoint import load_retromae_encoder
from revela_hub.trainers.revela.checkpoint import load_backbones

REPOSITORY = Path(__file__).resolve().parents[1]
PRODUCT = ("modeling", "data", "retrieval", "evaluation", "hub_cards", "trainers", "src")


def pickle_weights(folder: Path) -> Path:
    """Replace the safetensors of a folder by a pickle, as in old repositories."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


class Malicious:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


LOADERS: dict[str, Callable[[str], Any]] = {
    "retriever": load_retriever,
    "retromae": load_retromae_encoder,
    "cot_mote": lambda name: load_cot_mote_start(name, pre_training=True),
    "lm": load_lm,
    "revela": lambda name: load_backbones(name, name),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_code_in_a_pickle_never_runs(loader: str, tmp_path: Path, mlm_folder: Path, llama_folder: Path) -> None:
    """A pickle of tensors is read, one with code raises an error."""
    folder = pickle_weights(llama_folder if loader in ("lm", "revela") else mlm_folder)
    LOADERS[loader](str(folder))
    torch.save({"weight": Malicious(tmp_path / "made")}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        LOADERS[loader](str(folder))
    assert not (tmp_path / "made").exists()


def test_code_in_the_pickle_of_a_module_never_runs(retriever_folder: Path, tmp_path: Path) -> None:
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    model.insert(2, Dense(32, 8))
    model.save(str(tmp_path / "dense"), create_model_card=False)
    pickle_weights(tmp_path / "dense" / "2_Dense")
    assert load_encoder(str(tmp_path / "dense"), device="cpu").encode("a").shape == (8,)
    torch.save({"weight": Malicious(tmp_path / "made")}, tmp_path / "dense/2_Dense/pytorch_model.bin")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        load_encoder(str(tmp_path / "dense"), device="cpu")
    assert not (tmp_path / "made").exists()


def test_two_threads_leave_transformers_as_it_was(retriever_folder: Path) -> None:
    """transformers replaces its own functions while it loads."""
    tie = PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: load_encoder(str(retriever_folder), device="cpu"), range(4)))
    assert PreTrainedModel.tie_weights is tie


NEVER = re.compile(
    r"(torch|joblib|pickle|cloudpickle|dill)\.loads?\(|\.read_pickle\(|\.Unpickler\(|allow_pickle=True|weights_only=False"
    r"|^(np|numpy)\.load\((?!.*allow_pickle=False)"
)


def unsafe(source: str) -> Iterator[str]:
    """The calls of a file that may run code in a pickle."""
    for node in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        if NEVER.search(call := ast.unparse(node)):
            yield f"{node.lineno}: {call[:80]}"


@pytest.mark.parametrize(
    "bad", ["AutoModel.from_pretrained(name, weights_only=False)", "np.load(file)", "torch.load(file)"]
)
def test_an_unsafe_call_is_found(bad: str) -> None:
    assert list(unsafe(bad))


def test_the_product_has_no_unsafe_call() -> None:
    files = [file for folder in PRODUCT for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    found = [
        f"{file.relative_to(REPOSITORY)}:{line}" for file in files for line in unsafe(file.read_text(encoding="utf-8"))
    ]
    assert found == []
