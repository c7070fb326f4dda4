"""The data of a run's model cards, without any path of this machine: for a trainer in Python, and for a command, which adds to it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from datasets import IterableDataset
from sentence_transformers import SentenceTransformer
from transformers import PreTrainedModel

from revela_hub import __version__
from revela_hub.data.sources.report import counted
from revela_hub.hub_cards.metadata import METRIC_NAMES, ModelCardMetadata, Result, for_card, hub_model_id
from revela_hub.hub_cards.method import Method
from revela_hub.loading import hardware
from revela_hub.options import defaults_of
from revela_hub.output import clock
from revela_hub.trainers.base.arguments import METRIC, RunArguments
from revela_hub.trainers.base.checkpoints import run_settings
from revela_hub.trainers.base.models import name_of

_DECISIVE = "learning_rate per_device_train_batch_size gradient_accumulation_steps warmup_steps max_length".split()
_DECISIVE += ["temperature", "similarity_sides"]


def run_card(trainer: Any) -> ModelCardMetadata:
    """Return the data of the cards of a `MethodTrainer`, whose `given` are the arguments of its constructor."""
    given, rows = trainer.given | (trainer.given.get("model_init_kwargs") or {}), trainer.given.get("train_dataset")
    config = getattr(trainer.model, "config", None)
    given |= {name: getattr(config, name) for name in _DECISIVE if name not in given and hasattr(config, name)}
    models = (Path, PreTrainedModel, SentenceTransformer)
    given = {name: name_of(each) if isinstance(each, models) else each for name, each in given.items()}
    given = {name: value for name, value in given.items() if isinstance(value, str | int | float) and value != ""}
    kind = type(trainer)
    ours = next(each for each in kind.__mro__ if each.__module__.startswith("revela_hub."))
    own = f"Its trainer, `{kind.__name__}`, is a subclass of `{ours.__name__}`: it may have another loss than the paper's."
    card = ModelCardMetadata(trainer.method, own if kind is not ours else "", training_run=describe_cost(trainer))
    if rows is not None:
        size = "a stream of rows" if isinstance(rows, IterableDataset) else counted(len(rows), "row")
        made = None if isinstance(rows, IterableDataset) else len(trainer.train_dataset)  # such as groups of chunks
        hub = {*re.findall(r"hf://datasets/([^/@]+/[^/@]+)", str(rows.download_checksums))}
        data = f"Training data: {size} ({', '.join(rows.column_names or ())})"
        data += "." if made in (None, len(rows)) else f", prepared as {counted(made, 'training row')}."
        card = replace(card, training_data=data, datasets=sorted(hub))
    return replace(card, results=_results(trainer), **settings_of(trainer.method, trainer.args, given))


def settings_of(method: Method, arguments: RunArguments, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `base_model` and `config` of a card: the models, the options that a repetition needs, and those that differ from their defaults.

    The arguments of a command name the models. Otherwise, `given` are the model and further settings.
    """
    models = {name: value for name in method.models if (value := getattr(arguments, name, None)) is not None}
    settings, chosen = run_settings(arguments), dict(models or given)
    for name, default in defaults_of(arguments).items():
        if name not in chosen and name != "data" and (name in _DECISIVE or settings.get(name, default) != default):
            chosen[name] = settings[name]
    config = {name: for_card(name, value) for name, value in chosen.items()}
    head = f"# Other options have the defaults of revela-hub {__version__}. Local files and folders are without their paths.\n"
    return {
        "base_model": hub_model_id(next(iter(models.values()), given.get("model"))),
        "config": head + yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
    }


def _results(trainer: Any) -> list[Result]:
    """Return the scores of the exported weights and of the base model, if they were evaluated."""
    state, best = trainer.state, trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint
    last = state.best_global_step if best else state.global_step
    logs = {log["step"]: log for log in state.log_history if f"eval_{METRIC}" in log and trainer.retrieval_task}
    return [
        Result(trainer.retrieval_task.name, {name: logs[step][f"eval_{name}"] for name in METRIC_NAMES}, model)
        for step, model in ((last, None), (0, "base model"))
        if step in logs
    ]


def describe_cost(trainer: Any) -> str:
    """Return steps, duration and hardware as a sentence; the duration of a resumed run is unknown."""
    args, state = trainer.args, trainer.state
    took = next((log["train_runtime"] for log in reversed(state.log_history) if "train_runtime" in log), None)
    duration = "" if took is None or trainer.resumed else f" in {clock(took)}"
    machine = hardware(args.device, args.world_size * max(args.n_gpu, 1))
    return f"Trained for {counted(state.global_step, 'step')}{duration} on {machine}."
