"""`trainer.push_to_hub()` ends in `publish`: what is uploaded is the verified retriever, not a checkpoint."""

from pathlib import Path

import pytest
from datasets import Dataset
from loopback_hub import LoopbackHub

from revela_hub.errors import UserError
from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments, load_backbones


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


def test_without_an_id_it_says_which_option(tmp_path: Path, llama_folder: Path, texts: list[str]) -> None:
    with pytest.raises(UserError, match="hub_model_id"):
        trainer(tmp_path / "run", llama_folder, texts).push_to_hub()
