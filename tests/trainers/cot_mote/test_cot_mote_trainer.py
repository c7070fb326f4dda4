"""CoT-MoTE runs: what they learn, log and save, and that how they are split or interrupted changes nothing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from killed_runs import whole_and_resumed
from transformers import PreTrainedModel, TrainerCallback

from revela_hub.errors import UserError
from revela_hub.modeling import CoTMoTEForPreTraining, CoTMoTEModel
from revela_hub.trainers import CoTMoTECollator, CoTMoTEFinetuner, CoTMoTETrainer, CoTMoTETrainingArguments
from revela_hub.trainers.cot_mote.checkpoint import (
    CoTMoTECheckpoint,
    hybrid_encoder,
    load_cot_mote_checkpoint,
    load_cot_mote_start,
)
from revela_hub.trainers.cot_mote.data import CoTMoTEDataArguments, load_pairs


@pytest.fixture
def rows() -> Dataset:
    """24 texts of 8 tokens of a few words, each with another as its context; a third of them queries."""
    generator = torch.Generator().manual_seed(1)

    def some() -> list[int]:
        return (10 + torch.randint(12, (8,), generator=generator)).tolist()

    return Dataset.from_list(
        [
            {"row": n, "expert": int(n % 3 > 0), "input_ids": some(), "word_starts": [1] * 8, "context_ids": some(),
             "context_word_starts": [1] * 8}
            for n in range(24)
        ]
    )  # fmt: skip


@pytest.fixture
def pairs(texts: list[str]) -> Dataset:
    return Dataset.from_dict(
        {
            "anchor": [text[:25] for text in texts[:4]] * 4,
            "positive": texts[:4] * 4,
            "negative_1": [*texts[1:4], texts[0]] * 4,
            "negative_2": [*texts[2:4], *texts[:2]] * 4,
        }
    )


def load(folder: Path, **config: object) -> CoTMoTECheckpoint:
    torch.manual_seed(0)
    return load_cot_mote_start(str(folder), pre_training=True, **config)


def arguments(folder: Path, **options: object) -> CoTMoTETrainingArguments:
    defaults: dict[str, object] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return CoTMoTETrainingArguments(**(defaults | options))


def pre_trainer(
    folder: Path,
    start: CoTMoTECheckpoint,
    rows: Dataset,
    callbacks: Sequence[TrainerCallback] = (),
    **options: object,
) -> CoTMoTETrainer:
    return CoTMoTETrainer(
        start.model,
        arguments(folder, **options),
        processing_class=start.tokenizer,
        train_dataset=rows,
        callbacks=list(callbacks),
    )


def finetuner(
    folder: Path, start: CoTMoTECheckpoint, pairs: Dataset, callbacks: Sequence[TrainerCallback] = (), **options: object
) -> CoTMoTEFinetuner:
    return CoTMoTEFinetuner(
        start.encoder,
        arguments(folder, stage="finetune", **({"learning_rate": 1e-3} | options)),
        processing_class=start.tokenizer,
        train_dataset=pairs,
        query_max_length=12,
        max_length=30,
        callbacks=list(callbacks),
    )


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def logged(run: CoTMoTETrainer, name: str) -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


@pytest.mark.parametrize(
    ("config", "losses"),
    [
        ({}, ["encoder_loss", "dense_decoder_loss", "sparse_decoder_loss"]),
        ({"decoder": "ae", "decoder_layers": 2, "bottlenecks": ["dense"]}, ["encoder_loss", "dense_decoder_loss"]),
        ({"decoder": "none", "variant": "separate"}, ["encoder_loss"]),
    ],
)
def test_every_part_learns_and_its_loss_is_logged(
    tmp_path: Path, mlm_folder: Path, rows: Dataset, config: dict[str, object], losses: list[str]
) -> None:
    run = pre_trainer(tmp_path / "run", load(mlm_folder, **config), rows, max_steps=30, logging_steps=5)
    before = weights(run.model)
    run.train()
    assert [name for name, value in weights(run.model).items() if torch.equal(value, before[name])] == []
    for name in ("loss", *losses):
        values = logged(run, name)
        assert len(values) == 6 and values[-1] < values[0] - 0.5, name
    assert {name for entry in run.state.log_history for name in entry if name.endswith("_loss")} == {
        *losses,
        "train_loss",
    }


def test_a_pre_training_that_is_killed_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, mlm_folder: Path, rows: Dataset
) -> None:
    """Bit for bit, decoder and both experts included, with dropout, in the middle of the second of three epochs."""
    options = {"max_steps": 15, "save_strategy": "steps", "save_steps": 8}
    whole, resumed = whole_and_resumed(
        tmp_path, 8, lambda out, **more: pre_trainer(out, load(mlm_folder), rows, **more, **options)
    )
    for name, value in weights(whole.model).items():
        assert torch.equal(weights(resumed.model)[name], value), name
    layers = resumed.model.lm.bert.encoder.layer, resumed.model.query_lm.bert.encoder.layer
    assert layers[0][0].attention is layers[1][0].attention, "still shared"


def test_a_fine_tuning_that_is_killed_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, mlm_folder: Path, pairs: Dataset
) -> None:
    options = {"max_steps": 12, "save_strategy": "steps", "save_steps": 8}
    whole, resumed = whole_and_resumed(
        tmp_path, 8, lambda out, **more: finetuner(out, load(mlm_folder), pairs, **more, **options)
    )
    saved = load_cot_mote_checkpoint(tmp_path / "whole" / "checkpoint-12").model
    for name, value in weights(whole.cot_mote).items():
        assert torch.equal(weights(resumed.cot_mote)[name], value), name
        assert torch.equal(weights(saved)[name], value), name


def test_the_fine_tuning_loss_is_that_of_the_summed_scores(tmp_path: Path, mlm_folder: Path, pairs: Dataset) -> None:
    """Against plain loops: softmax over the batch's passages but copies of the positive."""
    start = load(mlm_folder)
    run = finetuner(tmp_path, start, pairs.select(range(4)))
    model = run.cot_mote.eval()
    for name, parameter in model.named_parameters():
        parameter.data += 0.05 * torch.randn_like(parameter) if "query" not in name else 0.0
    batch = run.data_collator([run.train_dataset[row] for row in range(4)])
    features, labels = run.collect_features(batch)
    loss = run.loss(features, labels)

    def vectors(column: str, expert: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = start.tokenizer(
            pairs[:4][column], padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        output = model(tokens["input_ids"], tokens["attention_mask"], expert=expert)
        return output.pooler_output, output.sparse

    query_dense, query_sparse = vectors("anchor", "query", 12)
    columns = [vectors(name, "passage", 30) for name in ("positive", "negative_1", "negative_2")]
    dense, sparse = (torch.cat([column[i] for column in columns]) for i in (0, 1))
    texts = [text for name in ("positive", "negative_1", "negative_2") for text in pairs[:4][name]]
    expected = torch.zeros(())
    for q in range(4):
        others = [p for p in range(12) if texts[p] != texts[q]]  # negatives of other rows are this row's positive
        scores = [query_dense[q] @ dense[p] + query_sparse[q] @ sparse[p] for p in (q, *others)]
        expected = expected - torch.stack(scores).log_softmax(0)[0] / 4
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scores", ["hybrid", "dense", "sparse"])
def test_fine_tuning_learns_with_each_score(tmp_path: Path, mlm_folder: Path, pairs: Dataset, scores: str) -> None:
    run = finetuner(
        tmp_path, load(mlm_folder), pairs, scores=scores, max_steps=30, learning_rate=3e-3, logging_steps=10
    )
    assert all(weight.requires_grad for weight in run.cot_mote.parameters()) == (scores != "dense")
    heads = {name: weight.clone() for name, weight in run.cot_mote.named_parameters() if ".cls." in name}
    run.train()
    trained = [not torch.equal(run.cot_mote.get_parameter(name), weight) for name, weight in heads.items()]
    assert trained and (not any(trained) if scores == "dense" else all(trained))
    values = logged(run, "loss")
    assert values[-1] < values[0] - 0.1  # by how much depends on the vocabulary, which the tokenizer trainer varies
    width = {"hybrid": 32 + run.cot_mote.config.encoder.vocab_size, "dense": 32}
    assert run.model.encode_query(["fox"]).shape[1] == width.get(scores, run.cot_mote.config.encoder.vocab_size)
    with pytest.raises(UserError, match="no expert given"):
        run.model.encode(["fox"])


def test_columns_other_than_pairs_are_not_encoded(tmp_path: Path, mlm_folder: Path, pairs: Dataset) -> None:
    more = (
        pairs.rename_column("negative_1", "negative").add_column("source", ["wiki"] * 16).add_column("id", [*range(16)])
    )
    run = finetuner(tmp_path, load(mlm_folder), more)
    assert run.train_dataset.column_names == ["anchor", "positive", "negative", "negative_2"]
    assert list(run.args.router_mapping) == run.train_dataset.column_names
    run.train()
    with pytest.raises(UserError, match="'negative_score'"):
        finetuner(tmp_path, load(mlm_folder), pairs.add_column("negative_score", [0.5] * 16))


def test_switching_exchanges_the_experts(tmp_path: Path, mlm_folder: Path, rows: Dataset) -> None:
    start = load(mlm_folder)
    for parameter in start.model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model = start.encoder.eval()
    plain, switched = (hybrid_encoder(model, start.tokenizer, switch_experts=flag) for flag in (False, True))
    assert torch.equal(torch.tensor(plain.encode_query(["fox"])), torch.tensor(switched.encode_document(["fox"])))
    assert not torch.equal(torch.tensor(plain.encode_query(["fox"])), torch.tensor(switched.encode_query(["fox"])))
    collators = [CoTMoTECollator(start.tokenizer, switch_experts=flag) for flag in (False, True)]
    one, other = (collator(list(rows.select(range(6)))) for collator in collators)
    assert torch.equal(one.pop("expert"), 1 - other.pop("expert")) and one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    common = {"output_dir": str(tmp_path), "report_to": "none"}
    args = CoTMoTETrainingArguments(**common)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert (args.learning_rate, rows, args.max_steps, args.warmup_steps, args.seed) == (3e-4, 2048, 80_000, 0.1, 42)
    assert CoTMoTEDataArguments().max_length == 144 and CoTMoTEDataArguments().num_negatives == 15
    assert CoTMoTETrainingArguments(num_train_epochs=2, **common).max_steps == -1
    tuning = CoTMoTETrainingArguments(stage="finetune", **common)
    assert (tuning.learning_rate, tuning.max_steps, tuning.num_train_epochs) == (2e-5, -1, 3.0)


def test_trained_models_are_starts_and_wrong_ones_are_rejected(
    tmp_path: Path, mlm_folder: Path, bert_folder: Path
) -> None:
    start = load(mlm_folder)
    for name, model in (("pre", start.model), ("encoder", start.encoder)):
        model.save_pretrained(tmp_path / name)
        start.tokenizer.save_pretrained(tmp_path / name)
    for pre_training, kind in ((True, CoTMoTEForPreTraining), (False, CoTMoTEModel)):
        again = load_cot_mote_start(str(tmp_path / "pre"), pre_training=pre_training, attn_implementation="eager")
        assert type(again.model) is kind
        parts = [part for part in again.model.modules() if isinstance(part, PreTrainedModel)]
        assert {part.config._attn_implementation for part in parts} == {"eager"}
    with pytest.raises(UserError, match="was trained with variant=experts: keep that"):
        load(tmp_path / "pre", variant="siamese")
    with pytest.raises(UserError, match="has no decoder"):
        load(tmp_path / "encoder")
    with pytest.raises(
        UserError, match=r"no weights for cls\.predictions"
    ):  # fine-tuning would not train it from scratch
        load_cot_mote_start(str(bert_folder), pre_training=False)
    with pytest.raises(UserError, match="is not of a CoT-MoTE checkpoint"):
        load_cot_mote_checkpoint(mlm_folder)


def test_rows_with_a_positive_as_a_negative_are_skipped(tmp_path: Path) -> None:
    """Also if it is written differently."""
    row = {"anchor": "a", "positive": "b", "negative_1": "c"}
    same = {"anchor": "a", "positive": "b b", "negative_1": " b\nb "}
    other = {"anchor": "a", "positive": "d", "negative_1": "b  b"}

    def read(*rows: dict[str, Any]) -> tuple[Dataset, str]:
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return load_pairs(CoTMoTEDataArguments(pairs=str(file), num_negatives=1, cache_dir=str(tmp_path / "c")))

    more = row | {"positive": "e"}
    assert read(row, more, same, other)[1].endswith("; skipped: 2 with a positive as a hard negative")
    with pytest.raises(UserError, match="--num_negatives 1"):
        read(
            *(
                {name: text for name, text in each.items() if name != "negative_1"}
                for each in (row, other | {"anchor": "f"})
            )
        )
    with pytest.raises(UserError, match="give --pairs FILE"):
        load_pairs(CoTMoTEDataArguments())
