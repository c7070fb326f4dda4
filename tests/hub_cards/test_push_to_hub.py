"""`trainer.push_to_hub()` publishes the verified retriever, not a checkpoint."""

from pathlib import Path

import pytest
from datasets import Dataset
from loopback_hub import WRITER, LoopbackHub
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.modeling import NVEmbedModel
from revela_hub.trainers import (
    NVEmbedTrainer,
    NVEmbedTrainingArguments,
    RevelaTrainer,
    RevelaTrainingArguments,
    load_backbones,
)
from revela_hub.trainers.nvembed.export import nvembed_encoder


def trainer(folder: Path, llama: Path, texts: list[str], **options: object) -> RevelaTrainer:
    backbones = load_backbones(str(llama), str(llama), group_size=2, temperature=0.1)
    arguments = RevelaTrainingArguments(
        output_dir=str(folder), max_steps=1, gradient_accumulation_steps=1, lora_rank=2, bf16=False, report_to="none",
        save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    rows = [{"group": i, "document": ["a", "b"], "text": texts[2 * i : 2 * i + 2]} for i in range(len(texts) // 2)]
    return RevelaTrainer(
        backbones.model,
        arguments,
        retriever_tokenizer=backbones.retriever_tokenizer,
        lm_tokenizer=backbones.lm_tokenizer,
        max_length=32,
        train_dataset=Dataset.from_list(rows),
    )


def test_the_trainer_publishes_its_retriever(
    hub: LoopbackHub, tmp_path: Path, llama_folder: Path, texts: list[str]
) -> None:
    run = trainer(tmp_path / "run", llama_folder, texts, hub_model_id="org/pushed")
    run.train()
    published = run.push_to_hub()
    files = set(hub.repositories["org/pushed"].files(published.commit) or ())
    assert {"modules.json", "model.safetensors", "README.md"} <= files
    assert not any("adapter" in name or name.endswith((".bin", ".pt")) for name in files)


def test_push_to_hub_does_not_access_the_hub_before_the_end(
    hub: LoopbackHub, tmp_path: Path, llama_folder: Path, texts: list[str]
) -> None:
    """With `--push_to_hub`, saving does not publish, and publishing does not recurse."""
    options = {"hub_model_id": "org/pushed", "hub_revision": "tries", "hub_private_repo": True, "hub_token": WRITER}
    run = trainer(tmp_path / "run", llama_folder, texts, push_to_hub=True, **options)
    run.train()
    run.save_model(str(tmp_path / "run"))
    assert hub.requests == []
    assert WRITER.encode() not in (tmp_path / "run" / "training_args.bin").read_bytes()
    published = run.push_to_hub()
    repository = hub.repositories["org/pushed"]
    assert repository.private
    assert repository.refs["tries"] == published.commit
    assert set(repository.files("main") or ()) == {".gitattributes"}


def test_invalid_hub_options_are_reported_before_training(
    hub: LoopbackHub, tmp_path: Path, llama_folder: Path, texts: list[str]
) -> None:
    for options, message in (
        ({}, "hub_model_id"),
        ({"hub_model_id": "pushed"}, "no namespace"),
        ({"hub_model_id": "org/x", "hub_strategy": "all_checkpoints"}, "raw checkpoints"),
    ):
        with pytest.raises(UserError, match=message):
            trainer(tmp_path / "run", llama_folder, texts, push_to_hub=True, **options)
    assert hub.requests == []


def test_nvembed_is_published_with_its_code(
    hub: LoopbackHub,
    tmp_path: Path,
    tiny_llama: LlamaForCausalLM,
    bpe_tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
) -> None:
    columns = {"task": "t", "anchor_prompt": "Instruct: find it\nQuery: ", "document_prompt": ""}
    rows = [columns | dict(zip(("anchor", "positive", "negative_1"), texts[i : i + 3], strict=True)) for i in range(3)]
    arguments = NVEmbedTrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=1, lora_rank=2, bf16=False, report_to="none",
        save_strategy="no", disable_tqdm=True, hub_model_id="org/embedder",
    )  # fmt: skip
    model = NVEmbedModel.from_backbone(tiny_llama, num_latents=4)
    encoder = nvembed_encoder(model, bpe_tokenizer, max_length=64, prompts={})
    run = NVEmbedTrainer(encoder, arguments, train_dataset=Dataset.from_list(rows))
    run.train()
    published = run.push_to_hub()
    files = set(hub.repositories["org/embedder"].files(published.commit) or ())
    assert {"modules.json", "model.safetensors", "README.md"} <= files
    assert {"modeling_nvembed.py", "configuration_nvembed.py", "latent_attention.py"} <= files
    assert not any("adapter" in name or name.endswith((".bin", ".pt")) for name in files)


def test_the_id_is_required(tmp_path: Path, llama_folder: Path, texts: list[str]) -> None:
    with pytest.raises(UserError, match="hub_model_id"):
        trainer(tmp_path / "run", llama_folder, texts).push_to_hub()
