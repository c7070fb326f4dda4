"""Streamed training data: written to disk, or, if the number of steps is set, read during training."""

import json
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from processes import launch

from revela_hub.data import build_spans
from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.errors import UserError
from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments
from revela_hub.trainers.base.rows import as_dataset, endless, training_rows
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments
from revela_hub.trainers.pair_tuning.trainer import PairsTrainer, PairsTrainingArguments
from revela_hub.trainers.retromae.data import RetroMAETrainingArguments
from revela_hub.trainers.retromae.trainer import RetroMAETrainer

Rows = datasets.Dataset | datasets.IterableDataset
Make = Callable[..., MethodTrainer]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "revela_hub"


def pairs() -> Iterator[dict[str, str]]:
    for number in range(8):
        yield {"anchor": f"where is river {number}", "positive": f"River {number} flows to the sea."}


def texts(number: int | None = None) -> Iterator[dict[str, str]]:
    """Documents of three sentences, without end unless their number is given."""
    words = "river sea mountain valley boat captain harbour wind rain stone bridge market bread apple garden".split()
    for n in islice(count(), number):
        each = [[words[(n * (3 + 2 * i + k) + i * i) % 15] for i in range(12)] for k in range(3)]
        yield {"text": " ".join(f"{' '.join(sentence).capitalize()} {n}." for sentence in each)}


def text_stream(number: int | None = None) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(texts, gen_kwargs={"number": number})


@pytest.fixture
def make(retriever_folder: Path, llama_folder: Path, mlm_folder: Path, tmp_path: Path) -> Make:
    """(method, rows, name of the output folder, further arguments) -> trainer."""

    def made(method: str, rows: Rows, name: str, **settings: Any) -> MethodTrainer:
        given = {"output_dir": str(tmp_path / name), "max_steps": 4, "per_device_train_batch_size": 2} | settings
        given |= {"use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1, "quiet": True}
        given |= {"learning_rate": 1e-2, "warmup_steps": 0} | ({} if "save_steps" in given else {"save_strategy": "no"})
        retriever, lm, encoder = str(retriever_folder), str(llama_folder), str(mlm_folder)
        if method == "revela":
            args: Any = RevelaTrainingArguments(gradient_accumulation_steps=2, lora_rank=4, lora_dropout=0.1, **given)
            options = {"model_init_kwargs": {"group_size": 4, "temperature": 0.1}, "max_length": 24}
            return RevelaTrainer(retriever, args, lm=lm, train_dataset=rows, **options)
        if method == "retromae":
            return RetroMAETrainer(encoder, RetroMAETrainingArguments(**given), train_dataset=rows)
        return ContrieverTrainer(retriever, ContrieverTrainingArguments(**given), train_dataset=rows)

    return made


def weights(trainer: MethodTrainer) -> dict[str, torch.Tensor]:
    assert trainer.model is not None
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def written(cache: Path) -> set[Path]:
    """The files in the cache of `datasets`, which also puts empty lock files there."""
    return {file for file in cache.parent.rglob("*") if file.is_file() and file.stat().st_size}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def test_a_stream_is_written_to_disk() -> None:
    rows = datasets.Dataset.from_list(list(pairs()))
    assert as_dataset(rows.to_iterable_dataset()).to_list() == rows.to_list()
    assert as_dataset(datasets.IterableDataset.from_generator(pairs)).to_list() == rows.to_list()  # without features


@pytest.mark.parametrize("method", ["revela", "retromae", pytest.param("contriever", marks=pytest.mark.exhaustive)])
def test_training_on_a_stream_equals_training_on_its_rows(make: Make, cache: Path, method: str) -> None:
    """In the stream's order; the rows are those that are written to the cache without a stream."""
    whole = datasets.Dataset.from_list(list(texts(120)))
    rows = make(method, whole, "rows", train_sampling_strategy="sequential")
    rows.train()
    assert len(rows.train_dataset) >= 8 * rows.args.gradient_accumulation_steps  # nothing is repeated
    before = written(cache)
    stream = make(method, whole.to_iterable_dataset(), "stream", shuffle_buffer=1)
    assert isinstance(stream.train_dataset, datasets.IterableDataset)
    stream.train()
    assert_equal(weights(stream), weights(rows))
    assert written(cache) == before


@pytest.mark.parametrize("method", ["revela", pytest.param("retromae", marks=pytest.mark.exhaustive), "contriever"])
def test_endless_text_is_read_as_far_as_it_is_needed(make: Make, cache: Path, method: str) -> None:
    furthest = 0

    def endless() -> Iterator[dict[str, str]]:
        nonlocal furthest
        for number, row in enumerate(texts(), 1):
            furthest = max(furthest, number)
            yield row

    trainer = make(method, datasets.IterableDataset.from_generator(endless), "out", shuffle_buffer=20)
    trainer.train()
    assert trainer.state.global_step == 4
    # A row has up to four documents, and the tokenizer reads a million characters at a time.
    assert furthest < (6_000 if method == "retromae" else 4 * (20 + 64 + 16))
    assert not written(cache)


@pytest.mark.parametrize(
    ("method", "documents"), [pytest.param("revela", 120, marks=pytest.mark.exhaustive), ("retromae", 9)]
)
def test_a_killed_run_on_a_stream_resumes_with_the_same_weights(
    make: Make, caplog: pytest.LogCaptureFixture, method: str, documents: int
) -> None:
    """With shuffling, and with a stream that has fewer rows than the run needs and is repeated."""
    run = make(method, text_stream(documents), "run", save_steps=3, shuffle_buffer=8)
    run.train()
    other = make(method, text_stream(documents), "other", save_steps=3, shuffle_buffer=8, seed=run.args.seed)
    other.train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-3")
    assert_equal(weights(other), weights(run))
    unshuffled = make(method, text_stream(documents), "unshuffled", shuffle_buffer=1)
    unshuffled.train()
    assert any(not torch.equal(value, weights(run)[name]) for name, value in weights(unshuffled).items())
    ended = make(method, text_stream(documents), "ended", save_steps=3, shuffle_buffer=8)
    ended.train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-4")  # killed before its export
    assert ended.state.global_step == 4
    assert_equal(weights(ended), weights(run))


def test_a_stream_is_repeated_in_another_order_with_other_numbers(wordpiece_tokenizer: Any) -> None:
    """The numbers seed the masks."""
    source = Source(f"{HUB_PREFIX}texts", rows=datasets.Dataset.from_list(list(texts(5))))
    whole = build_spans(source, wordpiece_tokenizer, max_length=40).to_list()
    stream = build_spans(source, wordpiece_tokenizer, max_length=40, streaming=True)
    assert list(stream) == whole
    twice = list(endless(stream, 0, 1).take(2 * len(whole)))
    assert twice[: len(whole)] == whole
    assert [row["input_ids"] for row in twice[len(whole) :]] == [row["input_ids"] for row in whole]
    assert [row["span"] for row in twice] == list(range(len(twice)))
    shuffled = [row["span"] for row in endless(stream, 0, 100).take(2 * len(whole))]
    first, second = shuffled[: len(whole)], [number - len(whole) for number in shuffled[len(whole) :]]
    assert sorted(first) == sorted(second) == list(range(len(whole)))
    assert first != second != list(range(len(whole))) != first


def test_pairs_are_trained_from_a_stream(retriever_folder: Path, tmp_path: Path, cache: Path) -> None:
    """With all pairs in each batch, the loss does not depend on their order."""
    rows = datasets.Dataset.from_list(list(pairs()))

    def loss(rows: Rows, name: str) -> float:
        given = {"output_dir": str(tmp_path / name), "max_steps": 3, "per_device_train_batch_size": 8}
        args = PairsTrainingArguments(**given, use_cpu=True, bf16=False, report_to=[])
        trainer = PairsTrainer(str(retriever_folder), args, train_dataset=rows)
        for module in trainer.retriever.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return trainer.train().training_loss

    without_features = datasets.IterableDataset.from_generator(pairs)
    assert loss(without_features, "stream") == pytest.approx(loss(rows, "rows"), rel=1e-4)


_PROCESS = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from datasets import IterableDataset
from revela_hub.trainers.retromae.data import RetroMAETrainingArguments
from revela_hub.trainers.retromae.trainer import RetroMAETrainer
from test_streams import text_stream

args = RetroMAETrainingArguments({out!r}, max_steps=3, per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to=[],
    save_strategy="no", shuffle_buffer=1)
stream = text_stream(40)
if {shards}:
    from revela_hub.data import build_spans
    from transformers import AutoTokenizer
    rows = build_spans({data!r}, AutoTokenizer.from_pretrained({model!r}), max_length=40)
    stream = rows.to_iterable_dataset(num_shards={shards})
    args.shuffle_buffer = 10
trainer = RetroMAETrainer({model!r}, args, train_dataset=stream, max_length=40)
seen, collate = [], trainer.data_collator
def recorded(rows):
    seen.append([row["span"] for row in rows])
    return collate(rows)
trainer.data_collator = recorded
trainer.train()
weight = next(iter(trainer.model.state_dict().values())).sum().item()
Path({out!r}, f"process-{{args.process_index}}.json").write_text(json.dumps([seen[:3], weight]))
"""


@pytest.mark.parametrize("shards", [0, 4])
def test_two_processes_train_on_different_rows_of_a_stream(tmp_path: Path, mlm_folder: Path, shards: int) -> None:
    """Also with streams of several shards, of which each process reads some."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in texts(40)))
    script = tmp_path / "process.py"
    tests = str(Path(__file__).parent)
    given = {"tests": tests, "out": str(tmp_path), "model": str(mlm_folder), "data": str(data), "shards": shards}
    script.write_text(_PROCESS.format(**given))
    launch(str(script), processes=2)
    (one, weight), (two, other) = (json.loads((tmp_path / f"process-{n}.json").read_text()) for n in (0, 1))
    rows = [row for batches in zip(one, two, strict=True) for batch in batches for row in batch]
    assert len(rows) == len(set(rows)) == 12
    assert shards or rows == list(range(12))
    assert weight == other


def test_labels_of_a_stream_are_not_cut_to_whole_numbers(tmp_path: Path) -> None:
    args = RevelaTrainingArguments(str(tmp_path), max_steps=3, use_cpu=True, report_to="none")
    with pytest.raises(UserError, match="without features"):
        training_rows(datasets.IterableDataset.from_generator(lambda: iter([{"text": "sea", "label": 1}])), args)
