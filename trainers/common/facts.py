"""What a run tells the model card: its models, its data, and the settings that differ from the defaults."""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from revela_hub.hub_cards.metadata import ModelCardMetadata
from revela_hub.hub_cards.method import Method
from revela_hub.trainers.common.checkpoints import Record
from revela_hub.trainers.common.settings import LENGTH, NO_EFFECT, plain, shown

# Settings that a reader asks for although they do not affect the result.
ALSO_TOLD = ("mini_batch_size", "mini_batch_num_tokens")


def facts_of_run(
    arguments: Any,
    *,
    method: Method,
    models: Sequence[str],
    summary: str,
    sources: Iterable[str],
    record: Record | None = None,
) -> ModelCardMetadata:
    """The facts of a run of `revela-hub train METHOD`; no place on this machine gets into them.

    Args:
        arguments: the dataclass that the command was started with.
        method: the method.
        models: the fields that name what it started from; the first is the model that the card is about.
        summary: of the training data, in words.
        sources: where the data comes from; those that begin with `hf:` are data sets of the Hub.
        record: of the run, which knows what was changed when it was resumed.
    """
    defaults = {
        entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
        for entry in fields(arguments)
    }
    told = [name for name in defaults if name not in NO_EFFECT or name in ALSO_TOLD]
    values = {name: plain(getattr(arguments, name)) for name in told if name not in ("data", *models)}
    kept = {name: shown(name, value) for name, value in values.items() if value != plain(defaults[name])}
    started = {name: getattr(arguments, name) for name in models}
    names = {name: Path(value).name if Path(value).exists() else value for name, value in started.items()}
    datasets = {source.removeprefix("hf:").split(":")[0] for source in sources if source.startswith("hf:")}
    base = started[models[0]]
    changed = [
        f"# from update {change['step']} on: {name} {now} (before: {before})\n"
        for change in (record.changes if record else ())
        for name, (before, now) in ((n, v) for n, v in change.items() if n != "step" and n not in LENGTH)
    ]
    return ModelCardMetadata(
        method=method,
        base_model=None if Path(base).exists() else base,
        datasets=sorted(name for name in datasets if "/" in name and not Path(name).exists()),
        training_data=summary,
        command=f"revela-hub {next(iter(method.commands))} --config config.yaml",
        config=yaml.safe_dump(names | kept, sort_keys=False, allow_unicode=True) + "".join(changed),
    )
