"""Ranges of numbers, said in types; and what an error says in one line."""

import dataclasses
from typing import Annotated, Any

import pytest
from annotated_types import Interval

from revela_hub.errors import UserError, first_line
from revela_hub.ranges import INHERITED_RANGES, NonNegativeInt, PositiveFloat, PositiveInt, Seed, check_ranges


@dataclasses.dataclass
class Settings:
    limit: PositiveInt | None = None
    start: NonNegativeInt = 0
    weights: list[PositiveFloat] | None = None
    share: Annotated[float, Interval(gt=0, le=1)] = 0.5
    plain: float = 0.0
    seed: Seed = 0
    word: str = "nan"
    warmup_steps: float = 0  # inherited by name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"start": -1}, "start must be at least 0, not -1"),
        ({"weights": [1.0, 0.0]}, "weights must be above 0, not [1.0, 0.0]"),
        ({"share": 1.5}, "share must be above 0 and at most 1, not 1.5"),
        ({"share": float("nan")}, "share must be a finite number, not nan"),
        ({"plain": float("-inf")}, "plain must be a finite number, not -inf"),
        ({"seed": 2**32}, "seed must be at least 0 and below 4294967296, not 4294967296"),
        ({"warmup_steps": -0.1}, "warmup_steps must be at least 0, not -0.1"),
    ],
)
def test_numbers_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="must be") as raised:
        check_ranges(Settings(**values))
    assert str(raised.value) == message


def test_numbers_in_range() -> None:
    check_ranges(Settings())
    check_ranges(Settings(limit=1, weights=[0.1, 3], share=1.0, plain=-1e30, seed=2**32 - 1))


def test_every_inherited_range_is_a_field_of_training_arguments_and_takes_its_default() -> None:
    from sentence_transformers import SentenceTransformerTrainingArguments

    fields = {field.name for field in dataclasses.fields(SentenceTransformerTrainingArguments)}
    assert set(INHERITED_RANGES) <= fields
    check_ranges(SentenceTransformerTrainingArguments("out", use_cpu=True))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError(""), "ValueError"),
        (ValueError(" \n\n"), "ValueError"),
        (OSError("\n first\nsecond"), "first"),
        (UserError("one"), "one"),
    ],
)
def test_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line
