"""Streamed training data."""

from pathlib import Path

import datasets
import pytest

from revela_hub.errors import UserError
from revela_hub.trainers.common.inputs import check_split


def test_a_stream_is_named_with_the_call_that_writes_it_to_disk(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"anchor": ["a", "b"], "positive": ["c", "d"]})
    stream = rows.to_iterable_dataset()
    with pytest.raises(UserError, match=r"pass Dataset.from_generator\(lambda: iter\(train_dataset\)\), which writes"):
        check_split(stream)
    written = datasets.Dataset.from_generator(lambda: iter(stream), cache_dir=str(tmp_path))
    check_split(written)
    assert list(written["positive"]) == ["c", "d"]
    with pytest.raises(UserError, match="has the splits train"):
        check_split(datasets.IterableDatasetDict({"train": stream}))
