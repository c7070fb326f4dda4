"""A run writes to its own folders only, and all processes have the same probe and the same weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from parsed_arguments import parse_arguments
from processes import launch

from revela_hub.data.sources.beir import RetrievalTask, write_beir
from revela_hub.data.sources.documents import HELD_OUT
from revela_hub.errors import UserError
from revela_hub.evaluation.probe import ProbeSettings, build_probe, write_probe
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.base.run_probe import hold_out_rows, hold_out_text, remove_run_probe
from revela_hub.trainers.baselines import CONTRIEVER
from revela_hub.trainers.baselines import contriever as train_contriever


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = "river sea mountain valley boat captain harbour wind rain stone bridge market bread apple garden".split()
    rows = []
    for n in range(60):
        sentences = (
            " ".join(words[(n * (3 + 2 * i + part) + i * i) % 15] + f"{n % 7}" for i in range(11)) for part in range(4)
        )
        rows.append({"_id": f"r{n}", "text": " ".join(f"{each.capitalize()} {n}." for each in sentences)})
    file = tmp_path / "text.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def arguments(text: Path, output: Path, *more: str) -> Any:
    words = ["--data", str(text), "--retriever", "none/such", "--output_dir", str(output), "--report_to", "none", *more]
    words += ["--use_cpu", "true", "--bf16", "false", "--quiet", "true", "--probe_queries", "20"]
    return parse_arguments(train_contriever.Arguments, words)


def test_a_probe_that_no_run_wrote_stays(text: Path, tmp_path: Path) -> None:
    folder = write_probe(build_probe(str(text), ProbeSettings(30, 60)), tmp_path / "out" / "probe")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="was not written by a training run"):
        hold_out_text(arguments(text, tmp_path / "out"))
    remove_run_probe(tmp_path / "out")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    # Its purpose: a run that names it.
    named = arguments(text, tmp_path / "other", "--probe", str(folder))
    assert len(hold_out_text(named).task.queries) == 30 and hold_out_text(named).folder == folder
    (folder / HELD_OUT).unlink()
    with pytest.raises(UserError, match="has no held_out.jsonl"):
        hold_out_text(named)


def test_the_probe_is_made_once_and_a_resumed_run_has_it(text: Path, tmp_path: Path) -> None:
    found = hold_out_text(arguments(text, tmp_path / "out"))
    text.write_text("".join(text.read_text().splitlines(keepends=True)[:30]))
    assert hold_out_text(arguments(text, tmp_path / "out")) == found and found.folder == tmp_path / "out" / "probe"
    remove_run_probe(tmp_path / "out")  # as a new run does
    assert hold_out_text(arguments(text, tmp_path / "out")).task != found.task


def test_a_run_does_not_write_into_its_data(text: Path, tmp_path: Path) -> None:
    given = arguments(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="is inside the data folder"), open_run(CONTRIEVER, given):
        pass


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "retriever/a", "measured/a", "checkpoint-3/a", "run.json"]
)
def test_files_that_no_run_wrote_are_not_overwritten(text: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / "out"
    (output / name).parent.mkdir(parents=True)
    (output / name).write_text("mine")
    (output / "notes.txt").write_text("unrelated")
    for more in ((), ("--overwrite", "true")):
        with pytest.raises(UserError, match="no training run"), open_run(CONTRIEVER, arguments(text, output, *more)):
            pass
    assert (output / name).read_text() == "mine"
    assert {path.name for path in output.iterdir()} == {"notes.txt", Path(name).parts[0]}


_PROCESS = """
import json, os, sys, time
from pathlib import Path
from torch import distributed as dist
sys.path.insert(0, {tests!r})
import test_measuring
from test_run_probe import arguments
from revela_hub.trainers.base.distributed import from_main, rank
from revela_hub.evaluation import probe
from revela_hub.trainers.base.run_probe import hold_out_text
out = Path({folder!r}) / "out"
made = probe.build_probe
def slowly(*args):
    time.sleep(3)
    Path({folder!r}, f"made-{{rank()}}").touch()
    return made(*args)
probe.build_probe = slowly
task = hold_out_text(arguments(Path({text!r}), out)).task  # starts the process group
model, words = test_measuring.Model(10), test_measuring.words_task()
measured = test_measuring.measuring(model, words, out)
for step, skill in ((0, 10), (5, 60), (10, 50)):
    model.skill.data.fill_(skill - 3 * rank())  # the main process's counts
    test_measuring.evaluate(measured, step)
outcome = measured.finish()
found = dict(queries=task.queries, step=outcome.step, skill=model.skill.item(), ndcg=outcome.exported.ndcg_at_10)
Path({folder!r}, f"found-{{rank()}}.json").write_text(json.dumps(found))
try:
    from_main(lambda: 1 / 0)
except Exception as error:
    assert "division by zero" in str(error), error
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_have_one_probe_and_one_result(text: Path, tmp_path: Path) -> None:
    script = tmp_path / "process.py"
    script.write_text(_PROCESS.format(tests=str(Path(__file__).parent), folder=str(tmp_path), text=str(text)))
    launch(str(script), processes=2)
    assert len(list(tmp_path.glob("made-*"))) == 1  # the other process waits for it, without a time limit
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert first == second and first["skill"] == 60 and len(first["queries"]) == 20


def test_rows_whose_queries_are_evaluated_are_left_out_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(queries: int) -> RetrievalTask:
        asked = {f"q{n}": f"question {n}" for n in range(queries)}
        return RetrievalTask({"p": "passage"}, asked, {name: {"p": 1} for name in asked}, "labels")

    rows = Dataset.from_list([{"anchor": f"question {n}", "positive": "a"} for n in range(4)])
    said: list[str] = []
    given: Any = SimpleNamespace(eval_corpus="beir", probe="auto", log=said.append)
    monkeypatch.setattr("revela_hub.trainers.base.run_probe._given_task", lambda _: task(2))
    assert hold_out_rows(given, rows).rows["anchor"][:] == ["question 2", "question 3"]
    assert len(said) == 1 and said[0].startswith("2 of 4 training rows")
    monkeypatch.setattr("revela_hub.trainers.base.run_probe._given_task", lambda _: task(3))
    with pytest.raises(UserError, match="all but 1 of the 4 training rows"):
        hold_out_rows(given, rows)


def test_labelled_pairs_that_ask_any_query_of_a_probe_are_left_out(tmp_path: Path) -> None:
    """Also a query without judgements: `adapt` measures its runs on some of its queries."""
    task = RetrievalTask({"p": "passage"}, {"q0": "question 0", "q1": "question 1"}, {"q0": {"p": 1}}, "probe")
    write_beir(task, tmp_path)
    held = {"document": "a.md", "text": "The Dart flows to the sea."}
    (tmp_path / "held_out.jsonl").write_text(json.dumps(held) + "\n")
    passages = ["a", "b", f"{held['text']} It is long.", "c"]
    rows = Dataset.from_list([{"anchor": f"question {n}", "positive": text} for n, text in enumerate(passages)])
    said: list[str] = []
    given: Any = SimpleNamespace(eval_corpus=None, probe=str(tmp_path), log=said.append)
    left, found = hold_out_rows(given, rows, rows)
    assert left["anchor"][:] == ["question 2", "question 3"] and left["positive"][:] == ["  It is long.", "c"]
    assert said[1:] == ["1 text of the probe held out of the training rows"]
    assert found is not None and found.queries == {"q0": "question 0"}
