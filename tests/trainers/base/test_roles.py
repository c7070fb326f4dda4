"""Which model of a run cannot be loaded, which cannot play its part, and which model an output folder gives."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.trainers import load_backbones
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.base.weights import is_encoder
from revela_hub.trainers.baselines.language_models import load_lm, load_tokenizer
from revela_hub.trainers.baselines.ra_dit import decoder_retriever
from revela_hub.trainers.cot_mote.checkpoint import load_cot_mote_start
from revela_hub.trainers.imprag.checkpoint import load_imprag
from revela_hub.trainers.nvembed.checkpoint import load_nvembed
from revela_hub.trainers.retromae.checkpoint import load_retromae_encoder


def test_encoders_and_decoders(llama_folder: Path, bert_folder: Path) -> None:
    assert is_encoder(str(bert_folder))
    assert not is_encoder(str(llama_folder))


def test_an_error_names_the_model_that_it_is_about(retriever_folder: Path, llama_folder: Path) -> None:
    with pytest.raises(UserError, match=r"^cannot load the retriever './nowhere'"):
        load_backbones("./nowhere", str(llama_folder))
    with pytest.raises(UserError, match=r"^cannot load the language model './nowhere'"):
        load_backbones(str(retriever_folder), "./nowhere")


def test_an_encoder_is_no_language_model(retriever_folder: Path, bert_folder: Path) -> None:
    with pytest.raises(UserError, match="the language model .* is an encoder"):
        load_backbones(str(retriever_folder), str(bert_folder))
    with pytest.raises(UserError, match="the backbone .* is an encoder"):
        load_nvembed(str(bert_folder))


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


@pytest.mark.parametrize(
    "load",
    [
        load_lm,
        load_tokenizer,
        load_nvembed,
        lambda run: load_imprag(run, b=0, t=0),
        lambda run: decoder_retriever(run, 0, load_tokenizer(run)),
        lambda run: load_backbones(run, run, pooling="mean"),
        load_retriever,
    ],
)
def test_an_output_folder_stands_for_the_model_in_it(load: Callable[[str], Any], llama_folder: Path) -> None:
    run = as_run(llama_folder, "model")
    load(str(run))
    shutil.copytree(run / "model", run / "other")
    with pytest.raises(UserError, match="run contains several models: pass .*run/model or .*run/other$"):
        load(str(run))


def test_an_output_folder_of_an_encoder(mlm_folder: Path, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
    run = as_run(mlm_folder, "encoder")
    load_cot_mote_start(str(run), pre_training=False, variant="separate", query_encoder=str(run))
    trained = load_retromae_encoder(str(run)).model
    trained.save_pretrained(run)  # RetroMAE resumes with the whole model, other methods start from its encoder
    wordpiece_tokenizer.save_pretrained(run)
    (run / "run.json").write_text("{}")
    again = load_retromae_encoder(str(run)).model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in trained.state_dict().items())
    load_cot_mote_start(str(run), pre_training=False)


def test_a_retriever_next_to_a_language_model(retriever_folder: Path, llama_folder: Path) -> None:
    run = as_run(retriever_folder, "retriever")
    llama_folder.rename(run / "lm")
    for file in ("config.json", "run.json"):  # of Revela's model with both
        (run / file).write_text('{"model_type": "revela"}')
    assert load_retriever(str(run)).prompts["query"] == "Query: "
    with pytest.raises(UserError, match="run contains several models: pass .*run/lm or .*run/retriever$"):
        load_backbones(str(run), str(run))
    load_backbones(str(run), str(run / "lm"))
