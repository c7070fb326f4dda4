"""Fields of the dataclasses that hold a command's options."""

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def option(default: T, help: str, *, metavar: str | None = None) -> T:
    """Return a dataclass field with a default (a list is copied for each object), a help text and perhaps another `metavar`.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     max_words: int = option(120, "Maximum number of words per passage.")
    >>> Options().max_words
    120
    """
    metadata = {"help": help} | ({"metavar": metavar} if metavar else {})
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)  # type: ignore[return-value]
    return dataclasses.field(default=default, metadata=metadata)


def required(help: str) -> Any:
    """Return a dataclass field without a default, with a help text."""
    return dataclasses.field(metadata={"help": help})


def defaults_of(options: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass by their names."""
    fields, no = dataclasses.fields(options), dataclasses.MISSING
    return {each.name: each.default if each.default_factory is no else each.default_factory() for each in fields}


def values_of(kind: Any, options: object) -> dict[str, Any]:
    """Return the values of the fields that a dataclass shares with an object of options, by their names."""
    names = (each.name for each in dataclasses.fields(kind))
    return {name: getattr(options, name) for name in names if hasattr(options, name)}
