"""Which model of a run cannot play its part, and which model an output folder gives."""

from pathlib import Path

import pytest

from revela_hub.errors import UserError
from revela_hub.trainers import load_backbones
from revela_hub.trainers.base.retriever import load_retriever


def test_an_encoder_is_no_language_model_and_needs_a_pooling(bert_folder: Path, llama_folder: Path) -> None:
    with pytest.raises(UserError, match="the language model .* is an encoder"):
        load_backbones(str(llama_folder), str(bert_folder))
    with pytest.raises(UserError, match="pooling mean or cls"):
        load_backbones(str(bert_folder), str(llama_folder))
    assert load_backbones(str(bert_folder), str(llama_folder), pooling="mean").model.config.pooling == "mean"


def test_a_retriever_in_an_output_folder_next_to_a_language_model(retriever_folder: Path, llama_folder: Path) -> None:
    run = retriever_folder.parent / "run"
    (run / "checkpoint-2").mkdir(parents=True)
    retriever_folder.rename(run / "retriever")
    llama_folder.rename(run / "lm")
    for file in ("config.json", "run.json"):  # of Revela's model with both
        (run / file).write_text('{"model_type": "revela"}')
    assert load_retriever(str(run)).prompts["query"] == "Query: "
    load_backbones(str(run), str(run / "lm"))
