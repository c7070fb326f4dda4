"""Ranges of numeric options, declared in the types of dataclass fields and checked by the command line's parser."""

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_type_hints

from annotated_types import Interval

PositiveInt = Annotated[int, Interval(ge=1)]
PositiveFloat = Annotated[float, Interval(gt=0)]
NonNegativeInt = Annotated[int, Interval(ge=0)]
NonNegativeFloat = Annotated[float, Interval(ge=0)]
Share = Annotated[float, Interval(gt=0, lt=1)]
Weight = Annotated[float, Interval(gt=0, le=1)]
Probability = Annotated[float, Interval(ge=0, lt=1)]  # of dropout, which must leave something
TextLength = Annotated[int, Interval(ge=4)]  # tokens, including special tokens at both ends
GroupSize = Annotated[int, Interval(ge=1, le=4096)]  # chunks that are compared with each other, at quadratic cost
Negatives = Annotated[int, Interval(ge=1, le=1024)]  # one column each
Layers = Annotated[int, Interval(ge=1, le=256)]
Latents = Annotated[int, Interval(ge=1, le=65_536)]
Rank = Annotated[int, Interval(ge=1, le=1_000_000)]
Port = Annotated[int, Interval(ge=1, le=65_535)]
TwoOrMore = Annotated[int, Interval(ge=2)]
Seed = Annotated[int, Interval(ge=0, lt=2**32)]  # the seeds that numpy accepts


def check_ranges(kind: type, values: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a number that is outside the range of its field's type in a dataclass, or not finite."""
    hints = get_type_hints(kind, include_extras=True)
    for name, value in values.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float):
                if not math.isfinite(number):
                    raise ValueError(f"{name} must be a finite number, not {number}")
                for wanted, holds in _bounds(hints.get(name), number):
                    if not holds:
                        raise ValueError(f"{name} must be {wanted}, not {number}")


def _bounds(hint: Any, number: float) -> Iterator[tuple[str, bool]]:
    """Yield the bounds that a type such as `PositiveInt | None` declares, and whether a number is within each."""
    for interval in (part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Interval)):
        for name, words in {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}.items():
            if (bound := getattr(interval, name)) is not None:
                yield f"{words} {bound}", getattr(operator, name)(number, bound)
    for part in get_args(hint):
        yield from _bounds(part, number)
