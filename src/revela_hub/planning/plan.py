"""What a run needs, before a GPU is rented: `revela-hub train METHOD --plan`.

The command's own code runs on made-up text of the maximum length: its data pipeline, collator, models, trainer, optimizer, and two
steps of one batch each, on a GPU that need not exist (`fake_gpu`).
"""

import gc
import json
import math
import random
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import load_dataset_builder
from torch import Tensor
from transformers import PreTrainedModel

from revela_hub.data.mixture.tasks import parse_mixture
from revela_hub.data.prompts import parse_prompts
from revela_hub.data.sources.files import local_files
from revela_hub.data.sources.report import counted
from revela_hub.data.sources.rows import read_rows, text_lines
from revela_hub.data.sources.source import Source, parse_source, parse_sources
from revela_hub.planning.fake_gpu import Meter, fake_gpu
from revela_hub.trainers.methods import METHODS


def _words(count: int, draw: random.Random, end: str = ".") -> str:
    """Words of six letters, each a sentence: chunks and spans of whole sentences then have nearly the maximum length."""
    return " ".join("".join(draw.choices("abcd", k=6)).capitalize() + end for _ in range(count))


def _tokens(count: int, draw: random.Random) -> str:
    """A text of `count` tokens, for the tokenizer of `fake_gpu`."""
    return _words(-(-count // 6), draw, "")[: count + count // 6]


@dataclass
class Needs:
    """What one process needs: numbers of parameters, bytes, and the operations and tokens of a batch.

    Operations of an index in the training are per token, those of likelihoods before the training per row.
    """

    parameters: int = 0
    trained: int = 0
    weights: int = 0
    gradients: int = 0
    states: int = 0
    peak: int = 0
    row: float = 0.0
    flops: int = 0
    tokens: int = 0
    index: float = 0.0
    likelihoods: float = 0.0


class Measured(Exception):
    """Ends the command after the steps."""


def record(command: Any, arguments: Any, meter: Meter) -> Needs:
    """Train with the `train` function of a command's module, and return what it needs."""
    needs, tokens = Needs(), [0, 0]  # without and with gradients

    def train(_: Any, trainer: Any) -> None:
        rows, model, step = trainer.train_dataset, trainer.model, trainer.training_step
        needs.row, needs.likelihoods = rows.data.nbytes / len(rows), meter.flops / len(rows)

        def embedded(module: Any, given: Any, output: Tensor) -> None:
            tokens[torch.is_grad_enabled()] += output.shape[:-1].numel()

        def training_step(model: Any, inputs: Any, *rest: Any) -> Tensor:
            gc.collect()
            meter.flops, meter.peak, tokens[1] = 0, meter.peak if needs.tokens else meter.now, 0
            step(model, inputs, *rest)
            needs.tokens, needs.flops = max(needs.tokens, tokens[1]), max(needs.flops, meter.flops)
            return torch.tensor(1.0)  # the Trainer expects the loss on its own device

        rebuild: Any = getattr(trainer, "rebuild_index", None)

        def rebuild_index() -> None:
            before, tokens[0] = meter.flops, 0
            rebuild()
            needs.index, meter.flops = (meter.flops - before) / tokens[0], before

        if rebuild:  # not a part of every step
            trainer.rebuild_index = rebuild_index
        models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
        for embeddings in {model.get_input_embeddings() for model in models}:
            embeddings.register_forward_hook(embedded)
        trainer.training_step = training_step
        trainer.train()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        needs.parameters, needs.trained = (sum(w.numel() for w in each) for each in (model.parameters(), trained))
        needs.weights = sum(weight.nbytes for weight in [*model.parameters(), *model.buffers()])
        needs.gradients = sum(weight.nbytes for weight in trained)
        states = [state.values() for state in trainer.optimizer.state.values()]
        needs.states = sum(each.nbytes for state in states for each in state if isinstance(each, Tensor))
        needs.peak = meter.peak
        raise Measured

    with mock.patch("revela_hub.trainers.base.run.Run.train", train), suppress(Measured):
        command.train(arguments)
    return needs


# Options that do not matter for a step, or that make it read other data.
SETTINGS: dict[str, Any] = {
    "max_steps": 2, "total_groups_per_step": None, "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
    "resume_from_checkpoint": None, "probe": "none", "eval_corpus": None, "eval_strategy": "no", "export": "last",
    "quiet": True, "dataloader_num_workers": 0, "use_cpu": True, "streaming": False, "exclude": [], "max_documents": None,
    "groups_column": None, "weights": None, "max_groups": None, "max_spans": None, "without_tasks": [], "plain_text": [],
    "denoising_fraction": 0, "sentence_fraction": 0, "pseudo_labels": "bm25", "retrieval_warmup_epochs": 1e-6,
    "retriever_start_step": 0, "text_column": "text", "anchor_column": "anchor", "positive_column": "positive",
}  # fmt: skip


def measure(command: Any, values: dict[str, Any]) -> Needs:
    """Train two steps with the `train` function of a command's module, without a GPU, and return what they need.

    If the run accumulates gradients, each step has two batches: those of the first stay in memory during the second.
    """
    names = {field.name for field in fields(command.Arguments)}

    def build(given: dict[str, Any]) -> Any:
        return command.Arguments(**{name: value for name, value in given.items() if name in names})

    with tempfile.TemporaryDirectory() as folder:
        given = values | {"output_dir": f"{folder}/run", "cache_dir": f"{folder}/cache"}
        given |= SETTINGS | {"gradient_accumulation_steps": min(2, build(given).gradient_accumulation_steps)}
        if isinstance(spans := given.get("similarity_span"), list):
            given["similarity_span"] = [min(spans, key=("full", "first_half").index)]
        arguments = build(given | _write_data(Path(folder), build(given)))
        with fake_gpu() as meter:
            return record(command, arguments, meter)


def _write_data(folder: Path, arguments: Any) -> dict[str, Any]:
    """Write data for four batches of texts of the maximum length, and return the options that name them."""
    draw, length = random.Random(0), getattr(arguments, "max_length", None) or 512
    rows = 4 * arguments.per_device_train_batch_size + 2

    def file(name: str, rows: list[dict[str, Any]]) -> str:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder / name)

    if hasattr(arguments, "corpus"):
        prompts = [{"prompt": _tokens(length - 16, draw), "answer": _tokens(8, draw)} for _ in range(rows)]
        passages = [{"text": _words(arguments.max_words, draw)} for _ in range(2 * rows + 100)]
        return {"data": [file("data.jsonl", prompts)], "corpus": [file("corpus.jsonl", passages)]}
    given = getattr(arguments, "pairs", None)
    if given or hasattr(arguments, "mixture") or getattr(arguments, "stage", "") == "finetune":
        negatives = [f"negative_{number + 1}" for number in range(getattr(arguments, "num_negatives", 0))]
        if not negatives and given:  # train pairs: as many as in the first row
            negatives = [name for name in next(read_rows(parse_source(given))).columns if name.startswith("negative")]
        columns = ["anchor", "positive", *negatives]
        texts = [{name: _tokens(2 * length, draw) for name in columns} for _ in range(rows)]
        pairs = file("pairs.jsonl", texts)
        task = {"name": "plan", "type": "retrieval", "source": pairs, "instruction": "Find"}
        return {"pairs": pairs, "mixture": file("mixture.yaml", [{"tasks": [task]}]), "data": []}
    if getattr(arguments, "pseudo_queries", None):
        spans = [{"text": _tokens(2 * length, draw), "queries": [_tokens(32, draw)] * 5} for _ in range(rows)]
        return {"pseudo_queries": [file("queries.jsonl", spans)]}
    words = rows * getattr(arguments, "group_size", 1) * max(getattr(arguments, "max_words", 0), length // 3)
    return {"data": [file("text.jsonl", [{"text": _words(500, draw)} for _ in range(1 + words // 500)])]}


# --- the report

H100, SHARE = 989e12, 0.3
"""Peak of the GPU in bf16, and the share that a training step of Llama 1B reached (benchmarks/gpu.md)."""


def plan(name: str, command: Any, values: dict[str, Any]) -> str:
    """Return what `revela-hub NAME` with these options needs, on 1, 4 and 8 GPUs."""
    method = next(method for method in METHODS.values() if name in method.commands)
    # Without revisions, which would be downloaded; in half precision by default, as on a GPU.
    values |= {name: values[name].partition("@")[0] for name in method.models if values.get(name)}
    values |= {"bf16": bool(values.get("fp16") or values.get("bf16", True)), "fp16": False, "use_cpu": True}
    arguments, needs = command.Arguments(**values), measure(command, values)
    rows = arguments.per_device_train_batch_size
    saved = needs.states + (needs.weights if needs.trained == needs.parameters else needs.gradients)
    sizes = (needs.weights, needs.weights + needs.gradients + needs.states, needs.peak, needs.gradients, saved)
    weights, states, peak, buckets, checkpoint = (f"{size / 2**30:.1f} GiB" for size in sizes)
    lines = [
        f"{method.title}: {needs.trained / 1e6:,.1f} M of {needs.parameters / 1e6:,.1f} M parameters are trained",
        f"batch: {counted(rows, 'row')}, {needs.tokens:,} tokens if every text has the maximum length",
        f"memory: {weights} of weights, {states} with gradients and optimizer, {peak} at the peak of a step; on several"
        f" GPUs {buckets} more for DDP's buckets; 1 to 2 GiB more for CUDA",
        f"checkpoints: {checkpoint} each, {arguments.save_total_limit or 'all'} are kept",
    ]
    total, passages = _rows(arguments), None
    prepared = [("rows", total, needs.row)]
    if hasattr(arguments, "corpus"):
        size = _sum(map(_bytes, parse_sources(arguments.corpus)))
        passages = size and size // (6 * arguments.max_words)
        prepared.append(("passages", passages, 6 * arguments.max_words))
    for what, number, each in prepared:
        about = "at most" if what == "rows" and _limit(arguments) else "about"
        known = f"{about} {number:,}, {number * each / 1e9:,.1f} GB" if number else "their number is unknown here"
        lines.append(f"prepared {what}: {known}, {each:,.0f} bytes each")
    lines += [
        "",
        "| GPUs | batches per step and GPU | rows per step | steps | rows | tokens | H100 hours |",
        "|---" * 7 + "|",
    ]
    for gpus in (1, 4, 8):
        together = getattr(arguments, "total_groups_per_step", None)
        batches = max(1, together // (rows * gpus)) if together else arguments.gradient_accumulation_steps
        step, steps = rows * gpus * batches, arguments.max_steps
        if steps <= 0:
            steps = math.ceil(total * arguments.num_train_epochs / step) if total else 1000
        flops = steps * batches * needs.flops + round((total or 0) * needs.likelihoods / gpus)
        if needs.index and total and passages:
            last = steps - arguments.retrieval_warmup_epochs * total / step
            builds = math.ceil(max(0, last) / (arguments.index_steps or total / step))
            flops += round(builds * passages * arguments.max_passage_length * needs.index / gpus)
        billions, hours = gpus * batches * steps * needs.tokens / 1e9, flops / (SHARE * H100) / 3600
        numbers = "".join(f"| {number:,} " for number in (gpus, batches, step, steps, step * steps))
        lines.append(f"{numbers}| {billions:,.1f} billion | {hours:,.2f} |")
    note = f"Hours if every text has the maximum length, at {SHARE:.0%} of the peak in bf16, as measured on an H100; without "
    note += "reading data and evaluation" + " and the index" * bool(needs.index and not (total and passages)) + "."
    if arguments.max_steps <= 0 and not total:
        note += " The number of rows is unknown here, so this is for 1,000 steps: give --max_steps N."
    return "\n".join([*lines, "", note])


def _limit(arguments: Any) -> int | None:
    return getattr(arguments, "max_groups", None) or getattr(arguments, "max_spans", None)


def _rows(arguments: Any) -> int | None:
    """Return about how many rows the data have, by the limits that are set, the size of files, or the Hub's record."""
    if limit := _limit(arguments):
        return limit
    if pairs := getattr(arguments, "pairs", None):
        return _lines(pairs)
    if mixture := getattr(arguments, "mixture", None):
        tasks = parse_mixture(mixture) if Path(mixture).is_file() else ()
        used = [task for task in tasks if arguments.stage in (None, *task.in_stages)]
        return _sum(task.max_samples or _lines(task.source.path) for task in used)
    if hasattr(arguments, "corpus"):
        prompts = _sum(each.max_samples or _lines(each.source.path) for each in map(parse_prompts, arguments.data))
        made = arguments.plain_text_fraction + arguments.denoising_fraction + 2 * arguments.sentence_fraction
        return prompts and round(prompts * (1 + made))
    if spans := getattr(arguments, "pseudo_queries", None):
        return _sum(_lines(str(file)) for source in parse_sources(spans) for file in local_files(source))
    words = getattr(arguments, "max_words", None)
    length = 6 * words if words else 4.5 * (arguments.max_length or 512)  # characters of English text
    characters = _sum(_bytes(source, length / 2) for source in arguments.sources())
    return characters and max(1, round(characters / (length * getattr(arguments, "group_size", 1))))


def _lines(file: str) -> int | None:
    """Return the number of lines of a file; None for what is not one."""
    return sum(1 for _ in text_lines(Path(file))) if Path(file).is_file() else None


def _sum(numbers: Iterable[int | None]) -> int | None:
    """Return the sum; None if a number is unknown, or without numbers."""
    found = list(numbers)
    return None if None in found or not found else sum(filter(None, found))


def _bytes(source: Source, more: float = 0.0) -> int | None:
    """Return the size of the text of a source, with so much more for the last row of each document; None if it is unknown."""
    if not source.is_dataset:
        return _sum(file.stat().st_size for file in local_files(source))
    with suppress(Exception):  # no network, or no record
        info = load_dataset_builder(source.path.removeprefix("hf:"), source.name).info.splits[source.split or "train"]
        return int(info.num_bytes + more * info.num_examples / (source.merge_rows or 1))
    return None
