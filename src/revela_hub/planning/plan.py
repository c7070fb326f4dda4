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

from revela_hub.data.prompts import parse_prompts
from revela_hub.data.sources.files import local_files
from revela_hub.data.sources.report import counted
from revela_hub.data.sources.source import Source
from revela_hub.planning.fake_gpu import Meter, fake_gpu
from revela_hub.trainers.methods import METHODS


def _words(count: int, draw: random.Random, end: str = ".") -> str:
    """Words of six letters, each a sentence: chunks and spans of whole sentences then have nearly the maximum length."""
    return " ".join("".join(draw.choices("abcd", k=6)).capitalize() + end for _ in range(count))


def _tokens(count: int, draw: random.Random) -> str:
    """A text of so many tokens, for the tokenizer of `fake_gpu`."""
    return _words(-(-count // 6), draw, "")[: count + count // 6]


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
        rows, step, needs = trainer.train_dataset, trainer.training_step, self.needs

        def training_step(model: Any, inputs: Any, *rest: Any) -> Tensor:
            tokens = sum(ids.numel() for ids in tree_leaves({k: v for k, v in inputs.items() if "input_ids" in k}))
            gc.collect()
            self.meter.flops, self.meter.peak = 0, self.meter.peak if needs.tokens else self.meter.now
            step(model, inputs, *rest)
            needs.tokens, needs.flops = max(needs.tokens, tokens), max(needs.flops, self.meter.flops)
            return torch.tensor(1.0)  # the Trainer expects the loss on its own device

        if isinstance(rows, Dataset):
            needs.row = rows.data.nbytes / len(rows)
        trainer.training_step = training_step
        trainer.add_callback(self)
        trainer.train()
        raise Measured

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Record what does not depend on the batch, and the peak."""
        needs, model = self.needs, given["model"]
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        needs.parameters, needs.trained = (sum(w.numel() for w in each) for each in (model.parameters(), trained))
        needs.weights = sum(weight.nbytes for weight in [*model.parameters(), *model.buffers()])
        needs.gradients = sum(weight.nbytes for weight in trained)
        states = [state.values() for state in given["optimizer"].state.values()]
        needs.states = sum(each.nbytes for state in states for each in state if isinstance(each, Tensor))
        needs.peak = self.meter.peak


# Options that do not matter for a step, or that make it read other data.
SETTINGS: dict[str, Any] = {
    "max_steps": 2, "total_groups_per_step": None, "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
    "resume_from_checkpoint": None, "plan": False, "probe": "none", "eval_corpus": None, "eval_strategy": "no",
    "export": "last", "quiet": True, "disable_tqdm": True, "dataloader_num_workers": 0, "use_cpu": True,
    "streaming": False, "exclude": [], "max_documents": None, "groups_column": None, "weights": None,
    "max_groups": None, "max_spans": None, "without_tasks": [], "pseudo_queries": [], "plain_text": [],
    "denoising_fraction": 0, "sentence_fraction": 0, "pseudo_labels": "bm25", "retrieval_warmup_epochs": 1e-6,
    "retriever_start_step": 0,
}  # fmt: skip


def measure(command: Any, values: dict[str, Any]) -> Needs:
    """Train two steps with the `train` function of a command's module, without a GPU, and return what they need.

    If the run accumulates gradients, each step has two batches: those of the first stay in memory during the second.
    """
    names = {field.name for field in fields(command.Arguments)}
    with tempfile.TemporaryDirectory() as folder:
        given = {"bf16": True, "use_cpu": True} | values
        given |= {"output_dir": f"{folder}/run", "cache_dir": f"{folder}/cache"}
        batches = command.Arguments(**{k: v for k, v in given.items() if k in names}).gradient_accumulation_steps
        given |= SETTINGS | {"gradient_accumulation_steps": min(2, batches)}
        if isinstance(given.get("similarity_span"), list):
            given["similarity_span"] = given["similarity_span"][:1]
        own = {name: value for name, value in given.items() if name in names}
        arguments = command.Arguments(**own | _write_data(Path(folder), command.Arguments(**own), names))
        with fake_gpu() as meter, suppress(Measured):
            recorder = Recorder(meter)
            with mock.patch("revela_hub.trainers.base.run.Run.train", lambda _, trainer: recorder.train(trainer)):
                command.train(arguments)
    return recorder.needs


def _write_data(folder: Path, arguments: Any, names: set[str]) -> dict[str, Any]:
    """Write data for four batches of texts of the maximum length, and return the options that name them."""
    draw, length = random.Random(0), getattr(arguments, "max_length", None) or 512
    rows = 4 * arguments.per_device_train_batch_size + 2

    def file(name: str, rows: list[dict[str, str]]) -> str:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder / name)

    if hasattr(arguments, "corpus"):
        prompts = [{"prompt": _tokens(length - 16, draw), "answer": _tokens(8, draw)} for _ in range(rows)]
        passages = [{"text": _words(arguments.max_words, draw)} for _ in range(2 * rows + 100)]
        return {"data": [file("data.jsonl", prompts)], "corpus": [file("corpus.jsonl", passages)]}
    given = getattr(arguments, "pairs", None)
    if given or hasattr(arguments, "mixture") or getattr(arguments, "stage", "") == "finetune":
        negatives = [f"negative_{number + 1}" for number in range(getattr(arguments, "num_negatives", 0))]
        if not negatives and given and Path(given).is_file():  # train pairs: as many as in the first row
            with open(given, encoding="utf-8") as lines:
                negatives = [name for name in json.loads(next(lines)) if name.startswith("negative")]
        columns = ["anchor", "positive", *negatives]
        texts = [{name: _tokens(2 * length, draw) for name in columns} for _ in range(rows)]
        pairs, mixture = file("pairs.jsonl", texts), folder / "mixture.yaml"
        task = {"name": "plan", "type": "retrieval", "source": pairs, "instruction": "Find"}
        mixture.write_text(yaml.safe_dump({"tasks": [task]}))
        written = {"pairs": pairs, "mixture": str(mixture), "data": []}
        return {name: value for name, value in written.items() if name in names}
    words = rows * getattr(arguments, "group_size", 1) * max(getattr(arguments, "max_words", 0), length // 3)
    return {"data": [file("text.jsonl", [{"text": _words(500, draw)} for _ in range(1 + words // 500)])]}


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
    half = values.get("fp16") or values.get("bf16", True)  # as on a GPU
    values |= {"fp16": False, "bf16": bool(half), "use_cpu": True}
    arguments, needs = command.Arguments(**values), measure(command, values)
    rows = arguments.per_device_train_batch_size
    sizes = (needs.weights, needs.weights + needs.gradients + needs.states, needs.peak, needs.gradients)
    weights, states, peak, buckets = (f"{size / 2**30:.1f} GiB" for size in sizes)
    lines = [
        f"{method.title}: {needs.trained / 1e6:,.1f} M of {needs.parameters / 1e6:,.1f} M parameters are trained",
        f"batch: {counted(rows, 'row')}, {needs.tokens:,} tokens if every text has the maximum length",
        f"memory: {weights} of weights, {states} with gradients and optimizer, {peak} at the peak of a step; on several"
        f" GPUs {buckets} more for DDP's buckets; 1 to 2 GiB more for CUDA",
        f"checkpoints: {needs.checkpoint / 2**30:.1f} GiB each, {arguments.save_total_limit or 'all'} are kept",
    ]
    total = _rows(arguments)
    if total is None:
        lines.append("data: its size is unknown here")
    elif needs.row:
        lines.append(f"data: about {total:,} rows, {total * needs.row / 1e9:,.1f} GB when prepared")
    head = ["GPUs", "batches per step and GPU", "rows per step", "steps", "H100 hours", "A100 hours"]
    table: list[list[Any]] = [[], head, ["---"] * len(head)]
    for gpus in (1, 4, 8):
        together = getattr(arguments, "total_groups_per_step", None)
        batches = max(1, together // (rows * gpus)) if together else arguments.gradient_accumulation_steps
        steps = arguments.max_steps
        if steps <= 0 and total is not None:
            steps = math.ceil(total * arguments.num_train_epochs / (rows * gpus * batches))
        hours = [steps * batches * needs.flops / (SHARE * rate) / 3600 for rate in (H100, A100)]
        known = [f"{steps:,}", *(f"{each:,.1f}" for each in hours)] if steps > 0 else "???"
        table.append([gpus, batches, f"{rows * gpus * batches:,}", *known])
    note = f"Hours of the run, at {SHARE:.0%} of the GPU's peak in bf16, as measured on an H100, without reading data and evaluation."
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" if row else "" for row in table), "", note])


def _rows(arguments: Any) -> int | None:
    """Return about how many rows the data have, by the limits that are set, the size of files, or the Hub's record."""
    for name in ("max_groups", "max_spans"):
        if limit := getattr(arguments, name, None):
            return int(limit)
    if pairs := getattr(arguments, "pairs", None):
        return _lines(pairs)
    if hasattr(arguments, "corpus"):
        prompts = [each.max_samples or _lines(each.source.path) for each in map(parse_prompts, arguments.data)]
        made = arguments.plain_text_fraction + arguments.denoising_fraction + 2 * arguments.sentence_fraction
        known = [number for number in prompts if number is not None]
        return round(sum(known) * (1 + made)) if len(known) == len(prompts) else None
    if not getattr(arguments, "data", None):
        return None
    sizes = [_bytes(source) for source in arguments.sources()]
    if None in sizes:
        return None
    words = getattr(arguments, "max_words", None)
    length: float = 6 * words if words else CHARACTERS * arguments.max_length
    return max(1, round(sum(filter(None, sizes)) / (length * getattr(arguments, "group_size", 1))))


def _lines(file: str) -> int | None:
    """Return the number of lines of a file; None for what is not one."""
    return sum(1 for _ in Path(file).open("rb")) if Path(file).is_file() else None


def _bytes(source: Source) -> int | None:
    """Return the size of the text of a source; None if it is unknown."""
    if not source.is_dataset:
        return sum(file.stat().st_size for file in local_files(source))
    with suppress(Exception):  # no network, or no record
        info = load_dataset_builder(source.path.removeprefix("hf:"), source.name).info
        return int(info.splits[source.split or "train"].num_bytes)
    return None
