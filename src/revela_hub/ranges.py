"""Ranges of numeric options, declared in the types of dataclass fields and checked by the command line's parser.

>>> from dataclasses import dataclass
>>> @dataclass
... class Settings:
...     temperature: PositiveFloat | None = 0.02
>>> check_ranges(Settings, {"temperature": 0.0})
Traceback (most recent call last):
    ...
ValueError: temperature must be above 0, not 0.0
"""

import math
import operator
from collections.abc import Mapping
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

_WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def check_ranges(kind: type, values: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a number that is outside the range of its field's type in a dataclass, or not finite."""
    hints = get_type_hints(kind, include_extras=True)
    for name, value in values.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and (wanted := _out_of_range(hints.get(name), number)):
                raise ValueError(f"{name} must be {wanted}, not {number}")


def _out_of_range(hint: Any, number: float) -> str | None:
    """Return the range that a type such as `PositiveInt | None` declares if the number is outside of it."""
    if not math.isfinite(number) or (isinstance(number, int) and abs(number) >= 2**63):
        return "a finite number of 64 bits"
    for interval in (part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Interval)):
        ends = {name: end for name in _WORDS if (end := getattr(interval, name)) is not None}
        if not all(getattr(operator, name)(number, end) for name, end in ends.items()):
            return " and ".join(f"{_WORDS[name]} {end}" for name, end in ends.items())
    return next((wanted for part in get_args(hint) if (wanted := _out_of_range(part, number))), None)
