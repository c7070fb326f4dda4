import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from revela_hub.data import Chunk, GroupSettings, ReadReport, build_groups, mix_groups, row_cache
from revela_hub.data.text import groups as groups_module
from revela_hub.errors import UserError


def write_documents(path: Path, lengths: dict[str, int]) -> Path:
    """Documents `a`, `b`, ... with a number of sentences "a0 a0", "a1 a1", ..., each of which is a chunk of two words."""
    rows = (
        {"_id": name, "text": " ".join(f"Is {name}{n}." for n in range(length))} for name, length in lengths.items()
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def names(groups: Dataset) -> list[list[str]]:
    return [[text.removeprefix("Is ").removesuffix(".") for text in row["text"]] for row in groups]


def build(path: Any, tmp_path: Path, report: ReadReport | None = None, **settings: Any) -> Dataset:
    settings = {"group_size": 4, "max_words": 2} | settings
    return build_groups(path, GroupSettings(**settings), cache_dir=tmp_path / "cache", report=report)


def test_chunks_in_the_order_of_the_documents(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "d.jsonl", {"a": 3, "b": 1, "none": 0, "c": 4})
    report = ReadReport()

    groups = build(path, tmp_path, report)

    assert names(groups) == [["a0", "a1", "a2", "b0"], ["c0", "c1", "c2", "c3"]]
    assert groups["document"][:] == [["a", "a", "a", "b"], ["c"] * 4]
    assert groups["group"][:] == [0, 1]
    assert {name: str(feature) for name, feature in groups.features.items()} == {
        "group": "Value('int64')",
        "document": "List(Value('string'))",
        "text": "List(Value('string'))",
    }
    assert str(report) == "3 documents, 8 chunks, 2 groups; skipped: 1 empty"


@pytest.mark.parametrize(
    ("lengths", "groups", "remark"),
    [
        ({"a": 6}, [["a0", "a1", "a2", "a3"], ["a4", "a5", "", ""]], "last group incomplete (2 rows empty)"),
        ({"a": 5}, [["a0", "a1", "a2", "a3"]], "1 leftover chunk dropped"),
        ({"a": 1, "b": 1}, [["a0", "b0", "", ""]], "last group incomplete (2 rows empty)"),
    ],
)
def test_last_group(tmp_path: Path, lengths: dict[str, int], groups: list[list[str]], remark: str) -> None:
    report = ReadReport()
    made = build(write_documents(tmp_path / "d.jsonl", lengths), tmp_path, report)
    assert names(made) == groups
    assert [bool(name) for row in made["document"] for name in row] == [bool(text) for row in groups for text in row]
    assert report.remarks() == [remark]


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each time that documents are read and cut."""
    counts: list[int] = []
    chunks = groups_module._chunks

    def counted(*arguments: Any) -> Iterator[Chunk]:
        counts.append(len(counts))
        yield from chunks(*arguments)

    monkeypatch.setattr(groups_module, "_chunks", counted)
    return counts


def test_second_run_reads_the_cache(tmp_path: Path, readings: list[int]) -> None:
    path = write_documents(tmp_path / "d.jsonl", {"a": 6, "none": 0})
    first, second = ReadReport(), ReadReport()

    groups = build(path, tmp_path, first)
    again = build(path, tmp_path, second, seed=7)  # nothing is drawn, so the seed makes no difference

    assert len(readings) == 1
    assert again[:] == groups[:]
    assert str(first) == "1 document, 6 chunks, 2 groups; skipped: 1 empty; last group incomplete (2 rows empty)"
    assert second == first


def test_what_changes_is_read_again(tmp_path: Path, readings: list[int]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = write_documents(folder / "d.jsonl", {"a": 6})
    build(folder, tmp_path)

    write_documents(path, {"b": 6})
    assert names(build(folder, tmp_path))[0] == ["b0", "b1", "b2", "b3"]
    write_documents(folder / "e.jsonl", {"e": 2})
    assert names(build(folder, tmp_path))[1] == ["b4", "b5", "e0", "e1"]
    assert len(build(folder, tmp_path, group_size=2)) == 4
    assert len(build(f"hf:{folder}", tmp_path)) == 2
    path.unlink()
    assert names(build(f"hf:{folder}", tmp_path)) == [["e0", "e1", "", ""]]
    assert len(readings) == 6
    build(f"hf:{folder}", tmp_path)
    assert len(readings) == 6


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "PART_CHARACTERS", 40)


@pytest.mark.parametrize("settings", [{}, {"run_length": 2}, {"max_groups": 5}], ids=str)
@pytest.mark.usefixtures("small_parts")
def test_several_processes_make_the_rows_of_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = write_documents(tmp_path / "d.jsonl", {name: 10 for name in "abcdefgh"})
    cut, reports = GroupSettings(**({"group_size": 4, "max_words": 2} | settings)), [ReadReport(), ReadReport()]
    one, three = (
        build_groups(path, cut, cache_dir=tmp_path / f"cache-{number}", report=report, num_proc=number)
        for number, report in zip((1, 3), reports, strict=True)
    )
    assert three[:] == one[:] and len(one) == settings.get("max_groups", 8 * 3)
    assert len(set(one["group"])) == len(one) and len({row["document"][0] for row in one}) > 1
    if not settings:
        assert reports[0] == reports[1] and str(reports[0]).startswith("8 documents, 80 chunks, 24 groups")


@pytest.mark.usefixtures("small_parts")
def test_a_deleted_part_is_made_again(tmp_path: Path) -> None:
    """And a part without rows is not one that was deleted. Was: the rows of the part were silently missing."""
    path = write_documents(tmp_path / "d.jsonl", {name: 40 if name == "b" else 1 for name in "abc"})
    rows = [build(path, tmp_path)[:] for _ in range(2)]
    shutil.rmtree(next((tmp_path / "cache").rglob("*-00000")))
    with pytest.raises(UserError, match="deleted"):
        build(path, tmp_path)
    assert rows == [build(path, tmp_path)[:]] * 2


@pytest.mark.usefixtures("small_parts")
def test_a_killed_preparation_makes_only_what_is_missing(
    tmp_path: Path, readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_documents(tmp_path / "d.jsonl", {name: 9 for name in "abcd"})
    whole = build_groups(path, GroupSettings(4, max_words=2), cache_dir=tmp_path / "whole")[:]
    cut = groups_module._rows

    def killed(settings: GroupSettings, documents: Any, report: ReadReport) -> Iterator[Any]:
        for row in cut(settings, documents, report):
            if "c5" in str(row):
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(groups_module, "_rows", killed)
        build(path, tmp_path)
    del readings[:]
    assert build(path, tmp_path)[:] == whole
    assert len(readings) == 2  # c and d


def test_max_groups_stops_reading(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "d.jsonl", {name: 2 for name in "abcdefgh"})
    with path.open("a") as file:
        file.write("broken, but never reached\n")
    report = ReadReport()

    groups = build(path, tmp_path, report, max_groups=2)

    assert names(groups) == [["a0", "a1", "b0", "b1"], ["c0", "c1", "d0", "d1"]]
    assert report.documents == 4


@pytest.mark.parametrize("buffer", [10_000, 5])
def test_runs_mix_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    monkeypatch.setattr(groups_module, "SHUFFLE_BUFFER_RUNS", buffer)
    path = write_documents(tmp_path / "d.jsonl", {"a": 40, "b": 40, "c": 41})

    groups = build(path, tmp_path, run_length=2)

    runs = [row[start : start + 2] for row in names(groups) for start in (0, 2)]
    in_order = [[f"{name}{n}", f"{name}{n + 1}"] for name in "abc" for n in range(0, 40, 2)]
    assert sorted(runs[: len(in_order)]) == sorted(in_order)  # each run once, unbroken
    assert runs[: len(in_order)] != in_order
    assert len(groups) == 30  # the 121st chunk is left over
    mixed = sum(len(set(row["document"])) > 1 for row in groups)
    assert mixed > (15 if buffer == 10_000 else 2)
    if buffer == 5:  # a run waits for its turn, but none comes before it is read
        assert all(runs.index(run) >= in_order.index(run) - buffer for run in in_order)


def test_runs_depend_on_the_seed_alone(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "d.jsonl", {"a": 59})

    first = build(path, tmp_path, run_length=2)
    assert names(first)[-1][2:] == ["a58", ""]  # a short run comes last
    settings = GroupSettings(group_size=4, max_words=2, run_length=2)
    again = build_groups(path, settings, cache_dir=tmp_path / "other-cache")
    other = build(path, tmp_path, run_length=2, seed=1)

    assert again[:] == first[:]
    assert names(other) != names(first)


@pytest.fixture
def three(tmp_path: Path) -> list[Dataset]:
    lengths = {"a": 4000, "b": 4000, "c": 40}
    return [
        build(write_documents(tmp_path / f"{name}.jsonl", {name: length}), tmp_path) for name, length in lengths.items()
    ]


def test_mixture_by_weights(three: list[Dataset]) -> None:
    mixed = mix_groups(three[:2], [3, 1], seed=1)

    drawn = Counter(row[0] for row in mixed["document"])
    assert set(drawn.elements()) == {"a", "b"}
    assert drawn["a"] == 1000  # the first to be used up
    assert 270 < drawn["b"] < 400
    assert all(len(set(row)) == 1 for row in mixed["document"])  # groups stay whole
    assert [row for row in mixed["text"] if row[0].startswith("Is a")] == three[0]["text"][:]
    assert mixed[:] == mix_groups(three[:2], [0.75, 0.25], seed=1)[:]
    assert mixed[:] != mix_groups(three[:2], [3, 1], seed=2)[:]
