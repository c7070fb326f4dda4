"""Metadata of a run for the model card: its models, its data, and the settings that differ from the defaults."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from revela_hub.data.sources.source import parse_source
from revela_hub.hub_cards.metadata import ModelCardMetadata
from revela_hub.hub_cards.method import Method
from revela_hub.paths import local_path
from revela_hub.trainers.base.checkpoints import Record
from revela_hub.trainers.base.settings import LENGTH_ARGUMENTS, NO_EFFECT, plain, shown


def card_metadata(
    arguments: Any, *, method: Method, summary: str, sources: Iterable[str], record: Record | None = None
) -> ModelCardMetadata:
    """Return the card's metadata for a run of `revela-hub train METHOD`, without any path of this machine.

    `summary` describes the training data in one line. `sources` are their paths and ids; those that start with `hf:` are data
    sets on the Hub. `record` has the settings that changed when the run was resumed.
    """
    defaults = {
        entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
        for entry in fields(arguments)
    }
    models = {name: value for name in method.models if (value := getattr(arguments, name)) is not None}
    values = {name: plain(getattr(arguments, name)) for name in defaults if name not in {*NO_EFFECT, "data", *models}}
    values |= (always := arguments.card_settings())
    changed = {
        name: shown(name, value, method)
        for name, value in values.items()
        if name in always or value != plain(defaults[name])
    }
    names = {name: path.name if (path := _local(value)) else value for name, value in models.items()}
    datasets = {parse_source(source).path.removeprefix("hf:") for source in sources if source.startswith("hf:")}
    base = next(iter(models.values()))
    resumed = [
        f"# from step {change['step']} on: {name} {shown(name, now, method)} (before: {shown(name, before, method)})\n"
        for change in (record.changes if record else ())
        for name, (before, now) in ((n, v) for n, v in change.items() if n != "step" and n not in LENGTH_ARGUMENTS)
    ]
    return ModelCardMetadata(
        method=method,
        base_model=None if _local(base) else base,
        datasets=sorted(name for name in datasets if "/" in name and not _local(name)),
        training_data=summary,
        command=f"revela-hub {next(iter(method.commands))} --config config.yaml",
        config=yaml.safe_dump(names | changed, sort_keys=False, allow_unicode=True) + "".join(resumed),
    )


def _local(name: str) -> Path | None:
    """Return the path of a model or data set on this machine, which may be gone; None for one on the Hub."""
    path = local_path(name)
    return path if path.is_absolute() or path.exists() else None
