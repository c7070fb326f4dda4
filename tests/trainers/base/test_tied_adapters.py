"""Adapters on token embeddings and output projections that are tied: the written model is the one in memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
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
    PreTrainedTokenizerFast,
)

from revela_hub.hub_cards.export import save_backbone
from revela_hub.modeling import ImpRAGForCausalLM, RevelaForCausalLM
from revela_hub.trainers import (
    ImpRAGTrainer,
    ImpRAGTrainingArguments,
    RAITTrainer,
    RAITTrainingArguments,
    RevelaTrainer,
    RevelaTrainingArguments,
)
from revela_hub.trainers.base.adapters import add_adapters, merged_copy
from revela_hub.trainers.baselines.ra_it import _load_saved
from revela_hub.trainers.imprag.checkpoint import load_imprag_checkpoint
from revela_hub.trainers.revela.checkpoint import load_checkpoint

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


@pytest.fixture
def tied_folder(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast, tiny_llama: LlamaForCausalLM) -> Path:
    """A random Llama with tied embeddings, and its tokenizer."""
    folder = tmp_path / "tied"
    LlamaForCausalLM(LlamaConfig(**tiny_llama.config.to_dict() | {"tie_word_embeddings": True})).save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["embeddings", "head", "saved embeddings", "saved head", "tokens"])
@pytest.mark.parametrize("method", ["revela", "imprag", "ra_it"])
def test_what_a_trainer_writes(name: str, method: str, tied_folder: Path, texts: list[str], tmp_path: Path) -> None:
    """Both the exported model and a checkpoint of adapters have the logits of the model in memory."""
    if method == "ra_it" and name in ("head", "tokens"):
        pytest.skip("TRL's SFTTrainer raises an error")
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"), "max_steps": 2, "learning_rate": 0.1, "warmup_steps": 0, "save_steps": 2,
        "bf16": False, "disable_tqdm": True, "report_to": "none", "gradient_accumulation_steps": 1,
    }  # fmt: skip
    questions = Dataset.from_dict(
        {"question": ["Where is Paris?", "Where is Tokyo?"] * 4, "answer": ["France", "Japan"] * 4}
    )
    given: dict[str, Any] = {"peft_config": LoraConfig(r=4, **CONFIGS[name]), "max_length": 64}
    trainer: Any
    if method == "revela":
        groups = [{"group": g, "document": ["a", "b"], "text": texts[2 * g : 2 * g + 2]} for g in range(2)]
        retriever = AutoModel.from_pretrained(tied_folder)
        trainer = RevelaTrainer(
            retriever,
            RevelaTrainingArguments(**settings),
            lm=str(tied_folder),
            train_dataset=Dataset.from_list(groups),
            **given,
        )
        memory, checkpoint = trainer.revela.lm, lambda folder: load_checkpoint(folder).model.lm
        written = lambda _: trainer.exportable().model.lm  # noqa: E731
    elif method == "imprag":
        init = {"b": 0, "t": 1, "k": 2, "l_max": 32}
        arguments = ImpRAGTrainingArguments(**settings, retrieval_warmup_epochs=1, num_candidates=2)
        trainer = ImpRAGTrainer(
            str(tied_folder), arguments, train_dataset=questions, passages=texts, model_init_kwargs=init, **given
        )
        memory, checkpoint = trainer.imprag, lambda folder: load_imprag_checkpoint(folder).model
        written = lambda folders: load_imprag_checkpoint(folders[0]).model  # noqa: E731
    else:
        trainer = RAITTrainer(
            str(tied_folder),
            RAITTrainingArguments(**settings),
            train_dataset=questions,
            passages=texts,
            num_passages=2,
            **given,
        )
        memory, checkpoint = trainer.accelerator.unwrap_model(trainer.model), _load_saved
        written = lambda folders: AutoModelForCausalLM.from_pretrained(folders[0])  # noqa: E731
    trainer.train()
    with torch.no_grad():
        expected = memory.eval()(IDS, torch.ones_like(IDS)).logits
        found = [written(trainer.write_models(str(tmp_path / "models"))), checkpoint(tmp_path / "out" / "checkpoint-2")]
        for model in found:
            logits = model.eval()(IDS, torch.ones_like(IDS)).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
