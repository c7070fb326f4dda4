"""Loaders of checkpoints refuse what transformers and peft would fill up at random, and everything that is pickled."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from transformers import BertForMaskedLM, BertModel, LlamaForCausalLM, PreTrainedTokenizerBase

from revela_hub.checkpoints import export_checkpoint
from revela_hub.errors import UserError
from revela_hub.hub_cards.tokenizers import text_length, with_eos
from revela_hub.modeling import NVEmbedModel, RetroMAEForPreTraining, RevelaForCausalLM
from revela_hub.retrieval.encoder import load_encoder
from revela_hub.trainers import load_backbones
from revela_hub.trainers.nvembed.export import export_nvembed


@pytest.fixture
def checkpoints(
    tmp_path: Path,
    tiny_llama: LlamaForCausalLM,
    llama_folder: Path,
    bpe_tokenizer: PreTrainedTokenizerBase,
    tiny_bert: BertModel,
    wordpiece_tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Path]:
    """One of each kind that can be exported."""
    folders = {name: tmp_path / name for name in ("revela", "adapters", "retromae", "nvembed")}
    revela = RevelaForCausalLM.from_backbones(str(llama_folder), str(llama_folder), group_size=2, max_seq_length=40)
    revela.save_pretrained(folders["revela"])
    adapted = get_peft_model(revela, LoraConfig(r=2, target_modules=r"retriever.*q_proj", init_lora_weights=False))
    adapted.save_pretrained(folders["adapters"])
    revela.config.save_pretrained(folders["adapters"])
    for name in ("revela", "adapters"):
        with_eos(bpe_tokenizer).save_pretrained(folders[name] / "retriever_tokenizer")
        bpe_tokenizer.save_pretrained(folders[name] / "lm_tokenizer")
    retromae = RetroMAEForPreTraining.from_encoder(BertForMaskedLM(tiny_bert.config), max_seq_length=41)
    retromae.save_pretrained(folders["retromae"])
    wordpiece_tokenizer.save_pretrained(folders["retromae"])
    nvembed = NVEmbedModel.from_backbone(tiny_llama, num_latents=4)
    export_nvembed(nvembed, bpe_tokenizer, folders["nvembed"], max_length=42, prompts={})
    return folders


@pytest.mark.parametrize("name", ["revela", "adapters", "retromae", "nvembed"])
def test_a_checkpoint_without_a_weight_is_not_exported(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = checkpoints[name]
    output = export_checkpoint(folder, tmp_path / "whole")
    (settings,) = output.glob("*/sentence_bert_config.json")
    length = {"revela": 40, "adapters": 40, "retromae": 41, "nvembed": 42}[name]
    assert json.loads(settings.read_text())["max_seq_length"] == length, "the checkpoint's own"
    file = next(file for file in folder.glob("*.safetensors"))
    weights = load_file(file)
    key = next(key for key in weights if "q_proj" in key or "query" in key)
    changes: dict[str, Callable[[], object]] = {
        key: lambda: weights.pop(key),
        "shape|model|load": lambda: weights.update({key: torch.zeros(3, 5)}),
    }
    for message, change in changes.items():
        change()
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message.split(".")[-1]):
            export_checkpoint(folder, tmp_path / "broken")
    assert not list((tmp_path / "broken").rglob("*.safetensors"))


def test_an_adapter_of_another_model(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    file = checkpoints["adapters"] / "adapter_model.safetensors"
    save_file({key.replace("layers.0", "layers.9"): value for key, value in load_file(file).items()}, file)
    with pytest.raises(UserError, match="missing adapter"):
        export_checkpoint(checkpoints["adapters"], tmp_path / "out")


def test_pickled_weights_are_not_read(checkpoints: dict[str, Path], retriever_folder: Path, tmp_path: Path) -> None:
    def pickled(folder: Path) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    model = SentenceTransformer(str(retriever_folder), device="cpu")
    model.insert(2, Dense(32, 8))
    model.save(str(tmp_path / "dense"), create_model_card=False)
    pickled(tmp_path / "dense" / "2_Dense")
    for load in (load_encoder, lambda name: load_backbones(name, str(retriever_folder))):
        with pytest.raises(UserError, match=r"2_Dense/pytorch_model.bin is a pickle"):
            load(str(tmp_path / "dense"))
    for name in ("revela", "retromae", "nvembed"):
        pickled(checkpoints[name])
        with pytest.raises(UserError, match="cannot load"):
            export_checkpoint(checkpoints[name], tmp_path / "out")


def test_the_length_has_room_in_a_table_that_begins_after_padding(wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
    from transformers import RobertaConfig

    wordpiece_tokenizer.model_max_length = 10**9
    assert text_length(RobertaConfig(max_position_embeddings=514, pad_token_id=1), wordpiece_tokenizer, 600) == 512
