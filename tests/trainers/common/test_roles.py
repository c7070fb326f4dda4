"""Which model of a run cannot be loaded, and which cannot play its part."""

from pathlib import Path

import pytest

from revela_hub.errors import UserError
from revela_hub.trainers import load_backbones
from revela_hub.trainers.common.weights import is_encoder
from revela_hub.trainers.nvembed.checkpoint import load_nvembed


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
