"""Which model of a run cannot be loaded, which cannot play its part, and which model an output folder gives."""

import shutil
from pathlib import Path

import pytest

from revela_hub.errors import UserError
from revela_hub.trainers import load_backbones
from revela_hub.trainers.base.retriever import load_retriever


def test_an_encoder_is_no_language_model(retriever_folder: Path, bert_folder: Path) -> None:
    with pytest.raises(UserError, match="the language model .* is an encoder"):
        load_backbones(str(retriever_folder), str(bert_folder))


def test_an_encoder_without_pooling_asks_for_one(bert_folder: Path, llama_folder: Path) -> None:
    with pytest.raises(UserError, match="--pooling mean or cls"):
        load_backbones(str(bert_folder), str(llama_folder))
    assert load_backbones(str(bert_folder), str(llama_folder), pooling="mean").model.config.pooling == "mean"


def as_run(model: Path, name: str) -> Path:
    """Move a model into the output folder of a run, with a checkpoint next to it."""
    run = model.parent / "run"
    shutil.copytree(model, run / "checkpoint-2")
    (run / "checkpoint-2" / "trainer_state.json").touch()
    model.rename(run / name)
    return run


def test_a_retriever_in_an_output_folder_next_to_a_language_model(retriever_folder: Path, llama_folder: Path) -> None:
    run = as_run(retriever_folder, "retriever")
    llama_folder.rename(run / "lm")
    for file in ("config.json", "run.json"):  # of Revela's model with both
        (run / file).write_text('{"model_type": "revela"}')
    assert load_retriever(str(run)).prompts["query"] == "Query: "
    load_backbones(str(run), str(run / "lm"))
