"""Adapters on token embeddings and output projections that are tied: the written model is the one in memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from revela_hub.hub_cards.export import save_backbone
from revela_hub.modeling import ImpRAGForCausalLM, RevelaForCausalLM
from revela_hub.trainers.base.adapters import add_adapters, merged_copy

CONFIGS = {
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "neither": {"target_modules": ["q_proj"]},
}
STAY_TIED = ("tokens", "neither")
IDS = torch.tensor([[3, 5, 7, 2], [4, 9, 5, 1]])


def llama() -> LlamaForCausalLM:
    """A random Llama with tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def trained(model: nn.Module, config: PeftConfig) -> Any:
    """Add adapters with random weights."""
    adapters = add_adapters(model, config)
    torch.manual_seed(1)
    for parameter in adapters.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter))
    return adapters


def same_after_writing(model: Any, adapters: Any, folder: Path, reload: Any, logits: Any) -> dict[str, Any]:
    """Compare the logits in memory, merged, written and loaded; return the configuration that was written."""
    with torch.no_grad():
        expected = logits(model)
        save_backbone(merged_copy(model, adapters), folder)
        torch.testing.assert_close(logits(model), expected)  # not changed by the merge
        torch.testing.assert_close(logits(merged_copy(model, adapters)), expected, rtol=1e-4, atol=1e-4)
        loaded = reload(folder)
        torch.testing.assert_close(logits(loaded.eval()), expected, rtol=1e-4, atol=1e-4)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_language_model(name: str, tmp_path: Path) -> None:
    model = llama()
    adapters = trained(model, LoraConfig(r=4, **CONFIGS[name]))
    config = same_after_writing(
        model, adapters, tmp_path, AutoModelForCausalLM.from_pretrained, lambda lm: lm(IDS).logits
    )
    assert config["tie_word_embeddings"] is (name in STAY_TIED)
    model.save_pretrained(tmp_path / "saved")  # merges, too
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_language_model_with_other_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=1, n_head=2)).eval()
    adapters = trained(model, LoraConfig(r=4, target_modules=["wte"]))
    same_after_writing(model, adapters, tmp_path, AutoModelForCausalLM.from_pretrained, lambda lm: lm(IDS).logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_revela(name: str, tmp_path: Path) -> None:
    model = RevelaForCausalLM.from_backbones(llama().model, llama(), group_size=2)
    adapters = trained(model, LoraConfig(r=4, **CONFIGS[name]))

    def logits(revela: PreTrainedModel) -> torch.Tensor:
        ones = torch.ones_like(IDS)
        found: torch.Tensor = revela(IDS, ones, retriever_input_ids=IDS, retriever_attention_mask=ones).logits
        return found

    same_after_writing(model, adapters, tmp_path, RevelaForCausalLM.from_pretrained, logits)
    save_backbone(merged_copy(model, adapters).lm, tmp_path / "lm")
    save_backbone(merged_copy(model, adapters).retriever, tmp_path / "retriever")
    with torch.no_grad():
        lm = AutoModelForCausalLM.from_pretrained(tmp_path / "lm").eval()
        torch.testing.assert_close(lm(IDS).logits, merged_copy(model, adapters).lm(IDS).logits)
        retriever = AutoModel.from_pretrained(tmp_path / "retriever").eval()
        torch.testing.assert_close(retriever(IDS)[0], model.retriever(IDS)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_imprag(name: str, tmp_path: Path) -> None:
    model = ImpRAGForCausalLM.from_backbone(llama(), b=0, t=1, k=1, l_max=8).eval()
    adapters = trained(model, LoraConfig(r=4, **CONFIGS[name]))
    same_after_writing(
        model, adapters, tmp_path, ImpRAGForCausalLM.from_pretrained, lambda lm: lm(IDS, torch.ones_like(IDS)).logits
    )
