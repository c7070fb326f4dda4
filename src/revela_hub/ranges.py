"""Ranges of numeric options, declared in the types of dataclass fields and checked where a number enters.

A field declares its range with `Annotated` and the package annotated-types; parsers without support for ranges see the plain
type:

>>> @dataclasses.dataclass
... class Settings:
...     temperature: PositiveFloat = 0.02
...     dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.1
...     def __post_init__(self) -> None:
...         check_ranges(self)
>>> Settings(temperature=0.0)
Traceback (most recent call last):
    ...
ValueError: temperature must be above 0, not 0.0
>>> Settings(dropout=float("nan"))
Traceback (most recent call last):
    ...
ValueError: dropout must be a finite number, not nan
"""

import dataclasses
import math
import operator
from collections.abc import Iterator
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
# The fields of transformers' TrainingArguments, which declare no ranges. With 0 steps or epochs nothing is trained; with -1
# steps the number of epochs decides.
INHERITED_RANGES: dict[str, Any] = {
    "adam_beta1": Probability,
    "adam_beta2": Probability,
    "adam_epsilon": PositiveFloat,
    "data_seed": Seed,
    "dataloader_num_workers": Annotated[int, Interval(ge=0, le=256)],
    "dataloader_prefetch_factor": PositiveInt,
    "ddp_bucket_cap_mb": PositiveInt,
    "ddp_timeout": PositiveInt,
    "eval_accumulation_steps": PositiveInt,
    "eval_delay": NonNegativeFloat,
    "eval_steps": PositiveFloat,
    "gradient_accumulation_steps": PositiveInt,
    "label_smoothing_factor": Probability,
    "learning_rate": NonNegativeFloat,
    "logging_steps": PositiveFloat,
    "max_grad_norm": NonNegativeFloat,
    "max_steps": Annotated[int, Interval(ge=-1)],
    "neftune_noise_alpha": NonNegativeFloat,
    "num_train_epochs": Annotated[float, Interval(ge=0, le=1_000_000)],
    "per_device_eval_batch_size": PositiveInt,
    "per_device_train_batch_size": PositiveInt,
    "save_steps": PositiveFloat,
    "save_total_limit": NonNegativeInt,
    "seed": Seed,
    "torch_empty_cache_steps": PositiveInt,
    "warmup_ratio": Annotated[float, Interval(ge=0, le=1)],
    "warmup_steps": NonNegativeFloat,
    "weight_decay": NonNegativeFloat,
}


def check_ranges(settings: Any) -> None:
    """Check the numbers of a dataclass against the ranges in its fields' types.

    Args:
        settings: A dataclass instance. Subclasses of `TrainingArguments` call this first in `__post_init__`.

    Raises:
        ValueError: A number is out of range, infinite or NaN.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name, None)
        if expected := expected_range(field.name, hints[field.name], value):
            raise ValueError(f"{field.name} must be {expected}, not {value}")


def expected_range(name: str, hint: Any, value: Any) -> str | None:
    """Return a description of a field's expected range if its value is out of range, otherwise None.

    Args:
        name: The field's name, by which the ranges of inherited fields are found.
        hint: The field's type, including `Annotated` metadata.
        value: The field's value; everything except numbers and lists of numbers is accepted.
    """
    intervals = list(_intervals(hint)) or list(_intervals(INHERITED_RANGES.get(name)))
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if not math.isfinite(number):
            return "a finite number"
        if isinstance(number, int) and abs(number) >= 2**63:
            return "a number of 64 bits"
        if not all(_holds(interval, number) for interval in intervals):
            return " and ".join(map(_in_words, intervals))
    return None


def limits(hint: Any) -> str:
    """Return the range of a field for its help text, e.g. "at least 1 and at most 256"; empty without a low upper end."""
    ends = [interval for interval in _intervals(hint) if (interval.le or interval.lt or math.inf) < 10**5]  # type: ignore[operator]
    return " and ".join(map(_in_words, ends))


def _intervals(hint: Any) -> Iterator[Interval]:
    """Yield the ranges in a type such as `PositiveInt | None` or `list[PositiveFloat]`."""
    for part in getattr(hint, "__metadata__", ()):
        if isinstance(part, Interval):
            yield part
    for part in get_args(hint):
        yield from _intervals(part)


def _ends(interval: Interval) -> Iterator[tuple[str, Any]]:
    """Yield the ends of a range, by the name of the comparison with them."""
    return ((name, end) for name in _WORDS if (end := getattr(interval, name)) is not None)


def _holds(interval: Interval, number: Any) -> bool:
    return all(getattr(operator, name)(number, end) for name, end in _ends(interval))


def _in_words(interval: Interval) -> str:
    return " and ".join(f"{_WORDS[name]} {end}" for name, end in _ends(interval))
