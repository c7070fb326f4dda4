"""Streamed training data."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from revela_hub.data.row_cache import stream_rows
from revela_hub.errors import UserError
from revela_hub.trainers.common.inputs import as_dataset
from revela_hub.trainers.pair_tuning.trainer import PairsTrainer, PairsTrainingArguments


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "revela_hub"


def pairs() -> Iterator[dict[str, str]]:
    for number in range(8):
        yield {"anchor": f"where is river {number}", "positive": f"River {number} flows to the sea."}


def test_a_stream_is_written_to_disk_once(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = datasets.Dataset.from_list(list(pairs()))
    first = as_dataset(rows.to_iterable_dataset())
    assert first.to_list() == rows.to_list()
    assert "train_dataset.take(N) limits their number" in caplog.text and "8 rows in " in caplog.text
    second = as_dataset(datasets.IterableDataset.from_generator(pairs))  # without features
    assert second.to_list() == rows.to_list()
    assert len(list(cache.glob("stream-*"))) == 1
    assert len(as_dataset(rows.to_iterable_dataset().take(3))) == 3
    with pytest.raises(UserError, match="has the splits train"):
        as_dataset(datasets.IterableDatasetDict({"train": rows.to_iterable_dataset()}))


def test_streams_that_fail_leave_nothing(cache: Path) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"anchor": "a"}
        raise ConnectionError("no answer")

    with pytest.raises(UserError, match="data set rows: cannot be read: .*no answer"):
        stream_rows(datasets.IterableDataset.from_generator(broken), "rows")
    with pytest.raises(UserError, match="rows is a stream without rows"):
        stream_rows(datasets.IterableDataset.from_generator(lambda: iter(())), "rows")
    assert not list(cache.glob("stream-*"))


def test_training_on_a_stream_equals_training_on_its_rows(retriever_folder: Path, tmp_path: Path) -> None:
    def loss(rows: datasets.Dataset | datasets.IterableDataset, name: str) -> float:
        args = PairsTrainingArguments(
            output_dir=str(tmp_path / name), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[]
        )
        return PairsTrainer(str(retriever_folder), args, train_dataset=rows).train().training_loss

    rows = datasets.Dataset.from_list(list(pairs()))
    assert loss(rows.to_iterable_dataset(), "stream") == loss(rows, "rows")
