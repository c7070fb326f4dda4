"""Ranges of numbers, declared in types."""

import dataclasses
from typing import Annotated, Any

import pytest
from annotated_types import Interval

from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Seed, check_ranges


@dataclasses.dataclass
class Settings:
    limit: PositiveInt | None = None
    start: NonNegativeInt = 0
    weights: list[PositiveFloat] | None = None
    fraction: Annotated[float, Interval(gt=0, le=1)] = 0.5
    plain: float = 0.0
    seed: Seed = 0
    word: str = "nan"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("limit", 0, "at least 1"),
        ("start", -1, "at least 0"),
        ("weights", [1.0, 0.0], "above 0"),
        ("fraction", 1.5, "at most 1"),
        ("fraction", float("nan"), "a finite number"),
        ("plain", float("-inf"), "a finite number"),
        ("seed", 2**32, "below 4294967296"),
    ],
)
def test_numbers_out_of_range(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*{wanted}"):
        check_ranges(Settings, {name: value})


def test_numbers_in_range() -> None:
    check_ranges(Settings, vars(Settings()))
    check_ranges(Settings, vars(Settings(limit=1, weights=[0.1, 3], fraction=1.0, plain=-1e30, seed=2**32 - 1)))
