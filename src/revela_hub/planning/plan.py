"""What a run needs, before a GPU is rented: `revela-hub train METHOD --plan`.

The command's own code runs on made-up text of the maximum length: its data pipeline, collator, models, trainer, optimizer, and two
steps of one batch each, on a GPU that need not exist (`fake_gpu`).
"""

import gc
import json
import math
import random
import tempfile
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from datasets import Dataset, load_dataset_builder
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from revela_hub.data.sources.files import local_files
from revela_hub.data.sources.report import counted
from revela_hub.data.sources.source import Source
from revela_hub.errors import UserError
from revela_hub.loading import model_json
from revela_hub.planning.fake_gpu import Meter, fake_gpu
from revela_hub.trainers.methods import METHODS


def _words(count: int, draw: random.Random) -> str:
    words = ["".join(draw.choices("abcd", k=6)) for _ in range(count)]
    return " ".join(f"{word.capitalize()}." if number % 12 == 11 else word for number, word in enumerate(words))


def _characters(count: int, draw: random.Random) -> str:
    """A text of so many tokens."""
    return _words(-(-count // 6), draw).replace(".", "")[: count + count // 6]


@dataclass
class Needs:
    """What one process needs: numbers of parameters, bytes, and the operations and tokens of a batch."""

    parameters: int = 0
    trained: int = 0
    weights: int = 0
    gradients: int = 0
    states: int = 0
    peak: int = 0
    row: float = 0.0
    flops: int = 0
    tokens: int = 0

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint: the weights, or what is trained of them, and the optimizer's states."""
        return self.states + (self.weights if self.trained == self.parameters else self.gradients)


class Measured(Exception):
    """Ends the command after the steps."""


class Recorder(TrainerCallback):
    """Trains a few batches and records their needs; used as `Run.train`."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.needs = meter, Needs()

    def train(self, trainer: Any) -> None:
        """Train, and raise `Measured`."""
        rows, step = trainer.train_dataset, trainer.training_step

        def training_step(model: Any, inputs: Any, *rest: Any) -> Tensor:
            tokens = sum(ids.numel() for ids in tree_leaves({k: v for k, v in inputs.items() if "input_ids" in k}))
            self.needs.tokens = max(self.needs.tokens, tokens)
            step(model, inputs, *rest)
            return torch.tensor(1.0)  # the Trainer expects the loss on its own device

        if isinstance(rows, Dataset):
            self.needs.row = rows.data.nbytes / len(rows)
        trainer.training_step = training_step
        trainer.add_callback(self)
        trainer.train()
        raise Measured

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Start counting."""
        gc.collect()
        self.meter.peak, self.meter.flops = self.meter.now, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Keep the larger numbers."""
        self.needs.peak = max(self.needs.peak, self.meter.peak)
        self.needs.flops = max(self.needs.flops, self.meter.flops)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Record what does not depend on the batch."""
        needs, model = self.needs, given["model"]
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        needs.parameters, needs.trained = (sum(w.numel() for w in each) for each in (model.parameters(), trained))
        needs.weights = sum(weight.nbytes for weight in [*model.parameters(), *model.buffers()])
        needs.gradients = sum(weight.nbytes for weight in trained)
        states = [state.values() for state in given["optimizer"].state.values()]
        needs.states = sum(each.nbytes for state in states for each in state if isinstance(each, Tensor))


# Options that do not matter for a step, or that make it read other data.
SETTINGS: dict[str, Any] = {
    "max_steps": 2, "gradient_accumulation_steps": 1, "total_groups_per_step": None, "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
    "resume_from_checkpoint": None, "plan": False, "probe": "none", "eval_corpus": None, "eval_strategy": "no", "export": "last", "quiet": True,
    "disable_tqdm": True, "dataloader_num_workers": 0, "optim": "adamw_torch", "use_cpu": True, "streaming": False,
    "exclude": [], "max_documents": None, "groups_column": None, "weights": None, "max_groups": None, "max_spans": None,
    "without_tasks": [], "pseudo_queries": [], "plain_text": [], "pseudo_labels": "bm25", "retrieval_warmup_epochs": 1e-6, "retriever_start_step": 0,
}  # fmt: skip


def measure(command: Any, values: dict[str, Any]) -> Needs:
    """Train two batches with the `train` function of a command's module, without a GPU, and return what it needs."""
    names = {field.name for field in fields(command.Arguments)}
    with tempfile.TemporaryDirectory() as folder:
        given = {"bf16": True} | values | SETTINGS
        given |= {"output_dir": f"{folder}/run", "cache_dir": f"{folder}/cache"}
        if isinstance(given.get("similarity_span"), list):
            given["similarity_span"] = given["similarity_span"][:1]
        own = {name: value for name, value in given.items() if name in names}
        own |= _write_data(Path(folder), command.Arguments(**own), names)
        arguments = command.Arguments(**own)
        with fake_gpu() as meter, suppress(Measured):
            recorder = Recorder(meter)
            with mock.patch("revela_hub.trainers.base.run.Run.train", lambda _, trainer: recorder.train(trainer)):
                command.train(arguments)
    return recorder.needs


def _write_data(folder: Path, arguments: Any, names: set[str]) -> dict[str, Any]:
    """Write data for two batches of texts of the maximum length, and return the options that name them."""
    draw, length = random.Random(0), getattr(arguments, "max_length", None) or 512
    rows = 2 * arguments.per_device_train_batch_size + 2
    if hasattr(arguments, "corpus"):
        prompts = [{"prompt": _characters(length - 16, draw), "answer": _characters(8, draw)} for _ in range(rows)]
        passages = [{"text": _words(arguments.max_words, draw)} for _ in range(4 * rows + 100)]
        files = {"data": prompts, "corpus": passages}
        return {name: [_jsonl(folder / f"{name}.jsonl", texts)] for name, texts in files.items()}
    paired = hasattr(arguments, "mixture") or getattr(arguments, "stage", "") == "finetune"
    if paired or getattr(arguments, "pairs", None):
        columns = ["anchor", "positive", *(f"negative_{n + 1}" for n in range(getattr(arguments, "num_negatives", 0)))]
        texts = [{name: _characters(2 * length, draw) for name in columns} for _ in range(rows)]
        pairs = _jsonl(folder / "pairs.jsonl", texts)
        task = {"name": "plan", "type": "retrieval", "source": pairs, "instruction": "Find"}
        (folder / "mixture.yaml").write_text(yaml.safe_dump({"tasks": [task]}))
        written = {"pairs": pairs, "mixture": str(folder / "mixture.yaml"), "data": []}
        return {name: value for name, value in written.items() if name in names}
    words = rows * getattr(arguments, "group_size", 1) * max(getattr(arguments, "max_words", 0), length // 3)
    texts = [{"text": _words(500, draw)} for _ in range(1 + words // 500)]
    return {"data": [_jsonl(folder / "text.jsonl", texts)]}


def _jsonl(file: Path, rows: list[dict[str, str]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


# --- the report

H100, A100, SHARE = 989e12, 312e12, 0.3
"""Peaks of the GPUs in bf16, and the share that a training step of Llama 1B reached (benchmarks/gpu.md)."""
CHARACTERS = 4.5
"""Characters of English text per token."""


def plan(name: str, command: Any, values: dict[str, Any]) -> str:
    """Return what `revela-hub NAME` with these options needs, on 1, 4 and 8 GPUs."""
    method = next(method for method in METHODS.values() if name in method.commands)
    for option in method.models:
        if model := values.get(option):
            values[option] = model.partition("@")[0]  # a revision would be downloaded
            _check_config(option, values[option])
    half = values.get("fp16") or values.get("bf16", True)  # as on a GPU
    values |= {"fp16": False, "bf16": bool(half), "use_cpu": True}
    arguments = command.Arguments(**values)
    needs = measure(command, values)
    rows = arguments.per_device_train_batch_size
    memory = [needs.weights, needs.weights + needs.gradients + needs.states, needs.peak]
    weights, all_states, peak = (f"{size / 2**30:.1f} GiB" for size in memory)
    lines = [
        f"{method.title}: {needs.trained / 1e6:,.1f} M of {needs.parameters / 1e6:,.1f} M parameters are trained",
        f"batch: {counted(rows, 'row')}, {needs.tokens:,} tokens if every text has the maximum length",
        f"memory: {weights} of weights, {all_states} with gradients and optimizer, {peak} at the peak of a step; on several GPUs"
        f" {needs.gradients / 2**30:.1f} GiB more for DDP's buckets; 1 to 2 GiB more for CUDA",
        f"checkpoints: {needs.checkpoint / 2**30:.1f} GiB each, {arguments.save_total_limit or 'all'} are kept",
    ]
    total = _rows(arguments)
    if total is None:
        lines.append("data: its size is unknown here")
    elif needs.row:
        lines.append(f"data: about {total:,} rows, {total * needs.row / 1e9:,.1f} GB when prepared")
    table = ["", "| GPUs | rows per step | steps | H100 hours | A100 hours |", "|---|---|---|---|---|"]
    for gpus in (1, 4, 8):
        together = getattr(arguments, "total_groups_per_step", None)
        batches = max(1, together // (rows * gpus)) if together else arguments.gradient_accumulation_steps
        steps = arguments.max_steps
        if steps <= 0 and total is not None:
            steps = math.ceil(total * arguments.num_train_epochs / (rows * gpus * batches))
        hours = [steps * batches * needs.flops / (SHARE * rate) / 3600 for rate in (H100, A100)]
        known = [f"{steps:,}", *(f"{each:,.1f}" for each in hours)] if steps > 0 else ["?", "?", "?"]
        table.append(f"| {gpus} | {rows * gpus * batches:,} | {' | '.join(known)} |")
    note = f"Hours of the run, at {SHARE:.0%} of the GPU's peak in bf16, as measured on an H100, without reading data and evaluation."
    return "\n".join([*lines, *table, "", note])


def _check_config(option: str, model: str) -> None:
    """Raise a `UserError` if the config.json of a model cannot be read."""
    try:
        found = model_json(model, "config.json")
    except (OSError, ValueError):
        found = None
    if found is None:
        raise UserError(
            f"--plan reads the config.json of {model}, which cannot be reached: download it, and give its folder as --{option}"
        )


def _rows(arguments: Any) -> int | None:
    """Return about how many rows the data have, by the limits that are set, the size of files, or the Hub's record."""
    limits = [getattr(arguments, name, None) for name in ("max_groups", "max_spans")]
    if limit := next(filter(None, limits), None):
        return int(limit)
    if pairs := getattr(arguments, "pairs", None) or (hasattr(arguments, "corpus") and arguments.data[0]):
        return sum(1 for _ in open(pairs, "rb")) if Path(pairs).is_file() else None
    sizes = [_bytes(source) for source in arguments.sources()] if getattr(arguments, "data", None) else [None]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    words = getattr(arguments, "max_words", None)
    length: float = 6 * words if words else CHARACTERS * arguments.max_length
    return max(1, round(sum(known) / (length * getattr(arguments, "group_size", 1))))


def _bytes(source: Source) -> int | None:
    """Return the size of the text of a source; None if it is unknown."""
    if not source.is_dataset:
        return sum(file.stat().st_size for file in local_files(source))
    with suppress(Exception):  # no network, or no record
        info = load_dataset_builder(source.path.removeprefix("hf:"), source.name).info
        return int(info.splits[source.split or "train"].num_bytes)
    return None
