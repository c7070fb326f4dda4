"""The model exported at the end of training is the one in memory, and the same file by file as an export of its checkpoint."""

from copy import deepcopy
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM

from revela_hub.checkpoints import export_checkpoint
from revela_hub.errors import UserError
from revela_hub.trainers import (
    CoTMoTEFinetuner,
    CoTMoTETrainer,
    CoTMoTETrainingArguments,
    ImpRAGTrainer,
    ImpRAGTrainingArguments,
    NVEmbedTrainer,
    NVEmbedTrainingArguments,
    RetroMAETrainer,
    RetroMAETrainingArguments,
    RevelaTrainer,
    RevelaTrainingArguments,
)
from revela_hub.trainers.base.adapters import add_adapters, merged_copy
from revela_hub.trainers.base.trainer import MethodTrainer

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Rivers carry sediment from the mountains to the sea, where it settles layer upon layer.",
    "The capital of France is Paris; the capital of Japan is Tokyo.",
    "A retriever learns from raw text which chunks of a document help to predict the others.",
)
CARD = {Path(name) for name in ("README.md", ".revela_hub/README.md", ".revela_hub/card.yaml")}
RAW = Dataset.from_dict({"text": [f"{text} {other}" for text in TEXTS for other in TEXTS if other != text]})
PAIRS = Dataset.from_dict({"anchor": ["fox", "sea"] * 4, "positive": ["the lazy dog", "the capital"] * 4})
QUESTIONS = Dataset.from_dict(
    {"question": ["Where is Paris?", "Where is Tokyo?"] * 4, "answer": ["France", "Japan"] * 4}
)


def masked(folder: Path, bert: BertModel, tokenizer_of: Path) -> str:
    BertForMaskedLM(bert.config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)
    return str(folder)


def trainer_of(name: str, folders: dict[str, str], settings: dict[str, Any]) -> MethodTrainer:
    method, _, adapted = name.partition("-")
    rank = {"lora_rank": 4 if adapted else 0, "lora_dropout": 0.0}
    if method == "revela":
        args = RevelaTrainingArguments(**settings, **rank)
        init = {"group_size": 4}
        given: dict[str, Any] = {
            "lm": folders["llama"],
            "train_dataset": RAW,
            "model_init_kwargs": init,
            "max_length": 64,
        }
        return RevelaTrainer(folders["retriever"], args, **given)
    if method == "nvembed":
        args = NVEmbedTrainingArguments(**settings, **rank)
        init = {"num_latents": 4, "num_heads": 2}
        return NVEmbedTrainer(folders["llama"], args, train_dataset=PAIRS, model_init_kwargs=init)
    if method == "imprag":
        args = ImpRAGTrainingArguments(**settings, retrieval_warmup_epochs=1, num_candidates=2, **rank)
        given = {"model_init_kwargs": {"b": 0, "t": 1, "k": 2, "l_max": 32}, "max_length": 64}
        return ImpRAGTrainer(folders["llama"], args, train_dataset=QUESTIONS, passages=list(TEXTS), **given)
    if method == "retromae":
        return RetroMAETrainer(folders["bert"], RetroMAETrainingArguments(**settings), train_dataset=RAW)
    if method == "cot_mote":
        return CoTMoTETrainer(folders["bert"], CoTMoTETrainingArguments(**settings), train_dataset=RAW)
    args = CoTMoTETrainingArguments(**settings, stage="finetune")
    return CoTMoTEFinetuner(folders["bert"], args, train_dataset=PAIRS)


@pytest.mark.parametrize(
    "name",
    [
        *("revela-adapters", "imprag-adapters", "retromae", "finetuned_cot_mote"),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("revela", "nvembed", "nvembed-adapters", "imprag", "cot_mote")
        ),
    ],
)
def test_the_export_from_memory_is_that_of_the_checkpoint(
    tmp_path: Path,
    name: str,
    retriever_folder: Path,
    llama_folder: Path,
    bert_folder: Path,
    tiny_bert: BertModel,
) -> None:
    if name in ("nvembed-adapters", "imprag-adapters") and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("config.json differs: transformers 5.17 saves no ids of tokens that the tokenizer does not define")
    folders = {"retriever": str(retriever_folder), "llama": str(llama_folder)}
    folders["bert"] = masked(tmp_path / "masked-bert", tiny_bert, bert_folder)
    settings = {"max_steps": 1, "gradient_accumulation_steps": 1, "learning_rate": 1e-2, "warmup_steps": 0}
    settings |= {"save_strategy": "steps", "save_steps": 1, "report_to": "none", "bf16": False, "disable_tqdm": True}
    trainer = trainer_of(name, folders, settings | {"output_dir": str(tmp_path / "out")})
    trainer.train()
    model: Any = trainer.model
    before = {key: value.clone() for key, value in model.state_dict().items()}

    trainer.write_models(tmp_path / "live")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()) and model.training

    trainer.save_model(str(tmp_path / "saved"))
    for part, folder in product(trainer.method.folders, (tmp_path / "saved", tmp_path / "live")):  # with cards
        card = (folder / part / "README.md").read_text()
        assert trainer.method.paper.title in card and "Trained for 1 step" in card and str(tmp_path) not in card
    assert resolve_name(trainer.method.loader)(str(tmp_path / "saved"))

    parts = trainer.folders
    export_checkpoint(tmp_path / "out" / "checkpoint-1", tmp_path / "exported", lm="lm" in parts)
    for part in parts:
        one, other = tmp_path / "live" / part, tmp_path / "exported" / part
        files = sorted({file.relative_to(one) for file in one.rglob("*") if file.is_file()} - CARD)
        assert files == sorted(file.relative_to(other) for file in other.rglob("*") if file.is_file())
        assert any(file.suffix == ".safetensors" for file in files)
        for file in files:
            if file.name == "reference.safetensors":  # vectors, which depend on how the weights lie in memory
                vectors, others = (load_file(folder / file) for folder in (one, other))
                assert all(torch.allclose(value, others[key], atol=1e-6) for key, value in vectors.items())
                continue
            assert (one / file).read_bytes() == (other / file).read_bytes(), (part, file)


@pytest.mark.parametrize(
    ("name", "method"), [("revela", "save_pretrained"), ("nvembed", "save"), ("imprag", "save_pretrained")]
)
def test_a_model_with_adapters_is_saved_with_them_merged(
    tmp_path: Path, name: str, method: str, retriever_folder: Path, llama_folder: Path
) -> None:
    folders = {"retriever": str(retriever_folder), "llama": str(llama_folder)}
    settings = {"output_dir": str(tmp_path), "max_steps": 1, "report_to": "none", "bf16": False, "disable_tqdm": True}
    trainer: Any = trainer_of(f"{name}-adapters", folders, settings)
    for parameter, value in trainer.model.named_parameters():
        if "lora_B" in parameter:
            torch.nn.init.normal_(value, std=0.1)
    expected = trainer.exportable().model.state_dict()
    copies = {"first": trainer.model if name == "nvembed" else getattr(trainer, name)}
    copies["copy"] = deepcopy(copies["first"])
    for folder, model in copies.items():
        getattr(model, method)(str(tmp_path / folder))
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert saved.keys() <= expected.keys() and len(saved) > len(expected) / 2
        assert all(torch.equal(value, expected[parameter]) for parameter, value in saved.items())
    assert any("lora_B" in parameter for parameter, _ in trainer.model.named_parameters())


def test_a_merged_copy_leaves_the_model_as_it_is() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    adapted = add_adapters(layer, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    inputs = torch.randn(4, 3)
    expected, weight = adapted(inputs), layer[1].weight
    copied = merged_copy(layer, adapted)
    assert torch.allclose(copied(inputs), expected, atol=1e-6) and not copied.training
    assert copied[1].weight.data_ptr() == weight.data_ptr()  # what no adapter changes is not in memory twice
    assert torch.equal(adapted(inputs), expected) and layer.training
    assert not any("lora" in name for name, _ in copied.named_parameters())


def test_adapters_on_tied_weights_are_rejected(tiny_llama: LlamaForCausalLM) -> None:
    """Their merged copies would differ: the weights could not be tied again."""
    config = LlamaConfig(**tiny_llama.config.to_dict() | {"tie_word_embeddings": True})
    for own in ({"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}):
        with pytest.raises(UserError, match="tied"):
            add_adapters(LlamaForCausalLM(config), LoraConfig(r=2, **own))
    model = LlamaForCausalLM(config)
    merged = merged_copy(model, add_adapters(model, LoraConfig(r=2, target_modules=["q_proj"])))
    assert merged.config.tie_word_embeddings and merged.lm_head.weight is merged.model.embed_tokens.weight
