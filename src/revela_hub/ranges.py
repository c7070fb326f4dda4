"""Which numbers an option takes: said in its type, checked where the number enters.

A field says its range with `Annotated`, in the words of the package annotated-types, so that a parser that does not know of
ranges reads the plain type:

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
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval

PositiveInt = Annotated[int, Ge(1)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
ShareOrAll = Annotated[float, Interval(gt=0, le=1)]  # or all of it
Share = Annotated[float, Interval(gt=0, lt=1)]
Probability = Annotated[float, Interval(ge=0, lt=1)]  # of a dropout: at 1 nothing is left
TextLength = Annotated[int, Ge(4)]  # tokens: those that mark beginning and end, and something between
GroupSize = Annotated[int, Interval(ge=1, le=4096)]  # chunks that are compared with each other: the cost is its square
Negatives = Annotated[int, Interval(ge=1, le=1024)]  # a column each
Layers = Annotated[int, Interval(ge=1, le=256)]  # of a decoder that is made
Latents = Annotated[int, Interval(ge=1, le=65_536)]
Rank = Annotated[int, Interval(ge=1, le=1_000_000)]
TwoOrMore = Annotated[int, Ge(2)]  # of what is compared with each other
Seed = Annotated[int, Interval(ge=0, lt=2**32)]  # what numpy takes

# The fields of transformers' TrainingArguments, which say no range of their own. 0 updates or epochs are a run that
# trains nothing; -1 updates leave it to the epochs.
INHERITED: dict[str, Any] = {
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
    "max_steps": Annotated[int, Ge(-1)],
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
    """Checks the numbers of a dataclass against the ranges that its fields' types say.

    Args:
        settings: an instance of a dataclass; a subclass of `TrainingArguments` calls this first in `__post_init__`.

    Raises:
        ValueError: a number is out of its range, infinite, or not a number.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name, None)
        if expected := expected_range(field.name, hints[field.name], value):
            raise ValueError(f"{field.name} must be {expected}, not {value}")


def expected_range(name: str, hint: Any, value: Any) -> str | None:
    """What the number or the numbers of a field should be, in words, if they are not; otherwise None.

    Args:
        name: the field's name, which finds the range of an inherited one.
        hint: the field's type, with what is `Annotated`.
        value: the field's value; anything but numbers and lists of numbers is fine.
    """
    intervals = list(_intervals(hint)) or list(_intervals(INHERITED.get(name)))
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


def range_in_words(name: str, hint: Any) -> str:
    """The range of a field for its help text, such as "above 0"; empty where any finite number goes."""
    return " and ".join(map(_in_words, list(_intervals(hint)) or list(_intervals(INHERITED.get(name)))))


def _intervals(hint: Any) -> Iterator[Interval]:
    """The ranges anywhere in a type: of `PositiveInt | None`, or of `list[PositiveFloat]`."""
    if get_origin(hint) is Annotated:
        for part in hint.__metadata__:
            if isinstance(part, Interval):
                yield part
            elif isinstance(part, Gt):
                yield Interval(gt=part.gt)
            elif isinstance(part, Ge):
                yield Interval(ge=part.ge)
    for part in get_args(hint):
        yield from _intervals(part)


def _holds(interval: Interval, number: Any) -> bool:
    return (
        (interval.gt is None or number > interval.gt)
        and (interval.ge is None or number >= interval.ge)
        and (interval.lt is None or number < interval.lt)
        and (interval.le is None or number <= interval.le)
    )


def _in_words(interval: Interval) -> str:
    lower = [f"above {interval.gt}"] if interval.gt is not None else []
    lower += [f"at least {interval.ge}"] if interval.ge is not None else []
    upper = [f"below {interval.lt}"] if interval.lt is not None else []
    upper += [f"at most {interval.le}"] if interval.le is not None else []
    return " and ".join(lower + upper)
