"""What a training run tells the model card: its models, its data and the settings that differ from the defaults."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from revela_hub.hub_cards.facts import ModelCardFacts

# Of `transformers.TrainingArguments`, those that a reader asks for; the rest is about the machine.
_COMMON = {"max_steps", "num_train_epochs", "seed", "adam_beta2", "weight_decay"}
_NOT_TOLD = {"data", "cache_dir", "output_dir", "eval_corpus", "trust_remote_code"}


def facts_of_run(
    arguments: Any, *, method: str, models: Sequence[str], own: Sequence[type], summary: str
) -> ModelCardFacts:
    """The facts of a run of `revela-hub train METHOD`; no place on this machine gets into them.

    Args:
        arguments: the dataclass that the command was started with; its field `data` lists the sources.
        method: key of `PAPERS`, and the command's name.
        models: the fields that name the models it started from; the first is the one that the card is about.
        own: the dataclasses whose own fields belong into the card.
        summary: of the training data, in words.
    """
    recorded = _COMMON.union(*(kind.__annotations__ for kind in own)) - _NOT_TOLD - set(models)
    settings = {
        entry.name: value
        for entry in fields(arguments)
        if entry.name in recorded and (value := getattr(arguments, entry.name)) != entry.default and value != []
    }
    started = {name: getattr(arguments, name) for name in models}
    names = {name: Path(value).name if Path(value).exists() else value for name, value in started.items()}
    sources = [str(source) for source in arguments.data]
    datasets = [source.removeprefix("hf:").split(":")[0] for source in sources if source.startswith("hf:")]
    base = started[models[0]]
    return ModelCardFacts(
        method=method,
        base_model=None if Path(base).exists() else base,
        datasets=[name for name in datasets if not Path(name).exists()],
        training_data=summary,
        command=f"revela-hub train {method.replace('_', '-')} --config config.yaml",
        config=yaml.safe_dump(names | settings, sort_keys=False, allow_unicode=True),
    )
