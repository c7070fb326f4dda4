"""Missing packages and invalid options are reported before a model is loaded, not after the training."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from parsed_arguments import parse_arguments

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.baselines import contriever_command, replug_command
from revela_hub.trainers.imprag import command as imprag_command
from revela_hub.trainers.nvembed import command as nvembed_command
from revela_hub.trainers.pair_tuning.trainer import PairsTrainingArguments
from revela_hub.trainers.revela import command as revela_command

COMMANDS: dict[str, tuple[Any, list[str]]] = {
    "contriever": (contriever_command, ["--retriever", "x"]),
    "revela": (revela_command, ["--retriever", "x", "--lm", "y"]),
    "imprag": (imprag_command, ["--backbone", "x"]),
    "replug": (replug_command, ["--retriever", "x", "--lm", "y"]),
    "nvembed": (nvembed_command, ["--backbone", "x", "--mixture", "y", "--stage", "1"]),
}


def parse(command: str, tmp_path: Path, *more: str) -> Any:
    module, start = COMMANDS[command]
    words = [
        *start,
        "--data",
        "x",
        "--output_dir",
        str(tmp_path / "out"),
        "--use_cpu",
        "true",
        "--bf16",
        "false",
        *more,
    ]
    return parse_arguments(module.Arguments, words)


@pytest.mark.parametrize("module", ["bm25s", "Stemmer", "pytrec_eval"])
def test_what_measuring_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="not installed: pip install"):
        parse("contriever", tmp_path)
    parse("contriever", tmp_path, "--probe", "none")
    with pytest.raises(UserError, match="not installed: pip install"):  # of a program, too
        MethodTrainer(torch.nn.Linear(1, 1), retrieval_task=RetrievalTask({}, {}, {}, "t"))


def test_what_an_index_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    parse("imprag", tmp_path)
    for kind, package in (("flat", "faiss-cpu"), ("milvus", "pymilvus")):
        with pytest.raises(UserError, match=f"pip install .*{package}"):
            parse("imprag", tmp_path, "--index_type", kind)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--report_to", "wandb"], "--report_to wandb needs the package wandb"),
        (["--report_to", "nothing-such"], "--report_to nothing-such is unknown"),
        (["--optim", "adamw_bnb_8bit"], "--optim adamw_bnb_8bit: .*bitsandbytes"),
        (["--optim_args", "nope"], "--optim_args: "),
        (["--lr_scheduler_type", "cosine_with_min_lr"], "--lr_scheduler_type: .*min_lr"),
        (["--lr_scheduler_kwargs", '{"nope": 1}'], "--lr_scheduler_type: .*nope"),
        (
            ["--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs", '{"num_cycles": "x"}'],
            "--lr_scheduler_type: .*'x'",
        ),
        (["--optim_args", "foo=1"], "--optim_args has no effect on --optim adamw_torch"),
        (["--dataloader_num_workers", "100000"], "at most 256"),
        (["--num_train_epochs", "1e300"], "at most 1000000"),
        (["--lr_scheduler_type", "reduce_lr_on_plateau", "--probe", "none"], "requires an eval strategy"),
        (["--torch_compile_backend", "nope"], "--torch_compile: Invalid backend: 'nope'"),
        (["--torch_compile_mode", "nope"], "--torch_compile: .*mode=nope"),
        (["--use_liger_kernel", "true"], "liger_kernel"),
        (["--remove_unused_columns", "true"], "remove_unused_columns true is not supported: the collators read all"),
        (["--logging_nan_inf_filter", "true"], "logging_nan_inf_filter true is not supported: it would hide a loss"),
        (["--enable_jit_checkpoint"], "enable_jit_checkpoint true is not supported: every run saves a checkpoint"),
        (["--debug", "underflow_overflow"], "--debug underflow_overflow is not supported"),
        (["--load_best_model_at_end", "true", "--metric_for_best_model", "loss"], "metric_for_best_model loss is not"),
    ],
)
def test_options_of_transformers_that_do_not_work(tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse("contriever", tmp_path, *more)


@pytest.mark.parametrize("rate", ["1e-6", None])
def test_learning_rates_of_layers_are_numbers(tmp_path: Path, rate: Any) -> None:
    with pytest.raises(ValueError, match="--learning_rate_mapping: expected a number for 'embeddings', not "):
        PairsTrainingArguments(str(tmp_path), report_to=[], learning_rate_mapping={"embeddings": rate})


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_rows_without_tokens_are_not_grouped_by_length(tmp_path: Path, strategy: str) -> None:
    args = RunArguments(str(tmp_path), report_to=[], use_cpu=True, train_sampling_strategy=strategy)
    for column, rejected in (("text", True), ("input_ids", False), ("length", False)):
        rows = Dataset.from_dict({column: [[1], [2]]})
        with pytest.raises(UserError, match=strategy) if rejected else nullcontext():
            MethodTrainer(torch.nn.Linear(1, 1), args, train_dataset=rows)


@pytest.mark.parametrize(
    "more", [["--load_best_model_at_end", "true"], ["--lr_scheduler_type", "reduce_lr_on_plateau"]]
)
def test_the_best_checkpoint_is_chosen_by_what_is_measured(tmp_path: Path, more: list[str]) -> None:
    arguments = parse("contriever", tmp_path, "--eval_strategy", "steps", *more)
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("ndcg_at_10", True)


def test_the_retriever_starts_before_the_run_ends(tmp_path: Path) -> None:
    parse("revela", tmp_path, "--max_steps", "10", "--retriever_start_step", "9")
    with pytest.raises(UserError, match="retriever_start_step 10 is not below max_steps 10"):
        parse("revela", tmp_path, "--max_steps", "10", "--retriever_start_step", "10")
