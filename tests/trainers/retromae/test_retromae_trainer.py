"""A RetroMAE run: what it learns, logs and saves, and that how it is split or interrupted changes nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from killed_runs import whole_and_resumed
from transformers import TrainerCallback

from revela_hub.errors import UserError
from revela_hub.trainers.retromae.checkpoint import RetroMAECheckpoint, load_retromae_checkpoint, load_retromae_encoder
from revela_hub.trainers.retromae.data import RetroMAETrainingArguments
from revela_hub.trainers.retromae.trainer import RetroMAETrainer

WORDS = 12


@pytest.fixture
def spans() -> Dataset:
    """24 spans of 8 to 20 tokens of a few words, so that there is something to learn; the last has but one token."""
    generator = torch.Generator().manual_seed(1)

    def span(number: int) -> dict[str, object]:
        length = 1 if number == 23 else 8 + int(torch.randint(13, (1,), generator=generator))
        ids = 10 + torch.randint(WORDS, (length,), generator=generator)
        starts = torch.rand(length, generator=generator) < 0.7
        return {"span": number, "input_ids": ids.tolist(), "word_starts": starts.int().tolist()}

    return Dataset.from_list([span(number) for number in range(24)])


def load(folder: Path, **config: object) -> RetroMAECheckpoint:
    torch.manual_seed(0)
    return load_retromae_encoder(str(folder), **config)


def trainer(
    folder: Path,
    start: RetroMAECheckpoint,
    spans: Dataset,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    **options: object,
) -> RetroMAETrainer:
    defaults: dict[str, object] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = RetroMAETrainingArguments(**(defaults | options))
    return RetroMAETrainer(
        start.model, arguments, processing_class=start.tokenizer, train_dataset=spans, callbacks=list(callbacks)
    )


def weights(run: RetroMAETrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def logged(run: RetroMAETrainer, name: str) -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


@pytest.mark.parametrize(
    ("config", "losses"),
    [
        ({}, ["encoder_loss", "decoder_loss"]),
        ({"decoder": "basic", "decoder_layers": 2}, ["encoder_loss", "decoder_loss"]),
        ({"decoder": "none"}, ["encoder_loss"]),
    ],
)
def test_every_part_learns_and_its_loss_is_logged(
    tmp_path: Path, mlm_folder: Path, spans: Dataset, config: dict[str, object], losses: list[str]
) -> None:
    run = trainer(tmp_path / "run", load(mlm_folder, **config), spans, max_steps=30, logging_steps=5)
    before = weights(run)
    run.train()
    unmoved = [name for name, value in weights(run).items() if torch.equal(value, before[name])]
    assert unmoved == []
    for name in ("loss", *losses):
        values = logged(run, name)
        assert len(values) == 6
        assert values[-1] < values[0] - 0.5, name
    parts = [logged(run, name) for name in losses]
    assert logged(run, "loss") == pytest.approx([sum(values) for values in zip(*parts, strict=True)], abs=1e-3)
    assert {name for entry in run.state.log_history for name in entry if name.endswith("_loss")} == {
        *losses,
        "train_loss",
    }


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, mlm_folder: Path, spans: Dataset
) -> None:
    """Bit for bit, decoder included, with dropout, in the middle of the second of three epochs."""
    options = {"max_steps": 15, "save_strategy": "steps", "save_steps": 8}
    whole, resumed = whole_and_resumed(
        tmp_path, 8, lambda out, **more: trainer(out, load(mlm_folder), spans, **options, **more)
    )
    expected, got = weights(whole), weights(resumed)
    assert any("decoder" in name for name in expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert logged(resumed, "decoder_loss")[-7:] == logged(whole, "decoder_loss")[-7:]


def test_a_checkpoint_holds_the_decoder_and_the_tokenizer(tmp_path: Path, mlm_folder: Path, spans: Dataset) -> None:
    run = trainer(tmp_path / "run", load(mlm_folder), spans, save_strategy="steps", save_steps=4)
    run.train()
    folder = tmp_path / "run" / "checkpoint-4"
    loaded = load_retromae_checkpoint(folder)
    assert not loaded.model.training
    batch = run.collator([spans[n] for n in range(3)])
    run.model.eval()
    expected, got = run.model(**batch), loaded.model(**batch)
    assert torch.equal(got.decoder_loss, expected.decoder_loss)
    assert loaded.tokenizer.get_vocab() == load(mlm_folder).tokenizer.get_vocab()
    # And a new run may start from it, and keeps the decoder.
    further = load(folder, attn_implementation="eager")
    assert further.model.encoder.config._attn_implementation == "eager"
    torch.testing.assert_close(further.model.eval()(**batch).decoder_loss, expected.decoder_loss)
    with pytest.raises(UserError, match="was trained with decoder=enhanced: keep that"):
        load(folder, decoder="basic")


def test_the_paper_is_the_default(tmp_path: Path) -> None:
    arguments = RetroMAETrainingArguments(output_dir=str(tmp_path))
    assert (arguments.learning_rate, arguments.num_train_epochs, arguments.per_device_train_batch_size) == (1e-4, 8, 32)
    assert (arguments.weight_decay, arguments.get_warmup_steps(1000)) == (0.01, 100)
