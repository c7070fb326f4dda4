"""Synthesis and cutting on a Ray cluster of this machine: the same files as here, and nothing is lost when an actor dies."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest

from revela_hub.cli.main import main
from revela_hub.data import read_documents
from revela_hub.data.ray_cluster import RayCluster
from revela_hub.data.synthesis.backends import Reply, RequestT, take
from revela_hub.data.synthesis.prompts import FORMS
from revela_hub.data.synthesis.ray_model import ray_model
from revela_hub.data.synthesis.synthesis import SynthesisReport, SynthesisSettings, synthesize
from revela_hub.data.text.passage_rows import cut_rows
from revela_hub.errors import UserError
from revela_hub.retrieval import read_passages

ray = pytest.importorskip("ray", reason="ray is not installed")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers do not find this file
WORDS = [f"{a}{b}" for a in ("ba", "de", "fi", "go", "lu", "mo", "ne", "ri") for b in "kmnprstvxz"]
SETTINGS = SynthesisSettings(count=30, forms=["short-short"])
FILES = ("pairs.jsonl", "tasks.jsonl", "rejected.jsonl")
KEYS = [part.key for part in FORMS["short-short"].parts]


class Writer:
    """A model whose replies depend on prompt and seed alone, some of them unusable; three prompts per batch."""

    recorded = {"weights": "of the writer"}

    def __init__(self, marker: Path | None = None, deaths: int = 0) -> None:
        self.marker, self.deaths = marker, deaths

    def replies(self, requests: Iterable[RequestT | None]) -> Iterator[tuple[RequestT, Reply]]:
        source, more = iter(requests), True
        while more:
            batch, more = take(source, 3)
            for request in batch:
                self._die("JSON list" not in request.prompt)
                yield request, Reply(self._reply(request.prompt, request.seed))

    def _die(self, has_tasks: bool) -> None:
        """Kill this process in the middle of the examples, unless that has been done often enough."""
        if self.marker is not None and has_tasks and len(died := sorted(self.marker.glob("*"))) < self.deaths:
            (self.marker / str(len(died))).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _reply(self, prompt: str, seed: int) -> str:
        random = Random(f"{prompt}{seed}")
        if "JSON list" in prompt:
            return json.dumps([f"Find {' '.join(random.choices(WORDS, k=6))}." for _ in range(20)])
        if random.random() < 0.2:
            return "I can't help with that."
        return json.dumps({key: " ".join(random.choices(WORDS, k=8)) for key in KEYS})


def on_ray(folder: Path, load: Any, actors: int, settings: SynthesisSettings = SETTINGS) -> SynthesisReport:
    with ray_model(load, RayCluster(num_actors=actors), 3) as backend:
        return synthesize(backend, folder, settings)


def lines(folder: Path) -> dict[str, list[str]]:
    return {name: (folder / name).read_text().splitlines() for name in FILES}


def test_one_actor_writes_the_files_of_this_process_and_a_killed_one_loses_nothing(
    ray_cluster: None, tmp_path: Path
) -> None:
    synthesize(Writer(), tmp_path / "here", SETTINGS)
    expected = lines(tmp_path / "here")
    assert len(expected["pairs.jsonl"]) == 30 and len(expected["rejected.jsonl"]) > 3

    (tmp_path / "died").mkdir()
    on_ray(tmp_path / "one", partial(Writer, tmp_path / "died", deaths=1), actors=1)
    assert len(list((tmp_path / "died").iterdir())) == 1
    assert lines(tmp_path / "one") == expected

    # Two actors: an unusable reply is requested again a little later. Such a run can be resumed on one machine.
    on_ray(tmp_path / "two", Writer, actors=2)
    assert synthesize(Writer(), tmp_path / "two", SETTINGS).earlier == 30
    found = lines(tmp_path / "two")
    assert found["tasks.jsonl"] == expected["tasks.jsonl"]
    assert sorted(found["pairs.jsonl"]) == sorted(expected["pairs.jsonl"])
    assert sorted(found["rejected.jsonl"]) == sorted(expected["rejected.jsonl"])


def failing_model() -> Any:
    raise UserError("this model cannot be loaded")


def test_an_error_of_an_actor_is_one_line(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("revela_hub.data.synthesis.ray_model.MAX_REPEATS", 1)
    with pytest.raises(UserError, match=r"^this model cannot be loaded$"):
        on_ray(tmp_path / "out", failing_model, actors=1)
    (tmp_path / "died").mkdir()
    with pytest.raises(UserError, match="^generating text on the Ray cluster failed: .+") as caught:
        on_ray(tmp_path / "out", partial(Writer, tmp_path / "died", deaths=9), actors=1)
    assert "\n" not in str(caught.value)
    assert len(list((tmp_path / "died").iterdir())) == 2  # the batch is repeated once
    assert on_ray(tmp_path / "out", Writer, actors=1).pairs.total() == 30


def test_more_actors_than_gpus(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
    with pytest.raises(UserError, match="--num_actors 2: each actor needs a GPU, and the cluster has 1"):
        on_ray(tmp_path, Writer, actors=2)


def test_synthesize_on_a_cluster(
    ray_cluster: None, tmp_path: Path, llama_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny model writes no JSON: its sampled replies, which are kept as rejected ones, are those of one process."""
    words = ["synthesize", "--model", str(llama_folder), "--forms", "short-short", "--count", "400", "--device", "cpu"]
    words += ["--max_new_tokens", "5", "--batch_size", "2"]
    for name, options in (("here", []), ("there", ["--engine", "ray", "--num_actors", "1"])):
        assert main([*words, "--output_dir", str(tmp_path / name), *options]) == 2
        assert "short-short tasks: 10 unusable replies in a row" in capsys.readouterr().err
    assert len(lines(tmp_path / "here")["rejected.jsonl"]) == 10
    assert lines(tmp_path / "there") == lines(tmp_path / "here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_actors", "2"], "--num_actors requires --engine ray"),
        (["--engine", "ray", "--endpoint", "http://localhost:9"], "--engine ray and --endpoint exclude each other"),
    ],
)
def test_options_without_effect(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["synthesize", "--model", "m", "--output_dir", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err


def test_passages_cut_on_ray_are_those_of_encode(ray_cluster: None, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    text = "River {0} is long. It carries {0} stones to the sea every year.\n\nNobody counts its {0} bends."
    for part in range(3):  # titles, and numbers as ids; the texts of the second file are empty
        rows = [{"_id": 10 * part + n, "title": f"Title {n}", "text": text.format(10 * part + n)} for n in range(4)]
        rows = [row | {"text": ""} for row in rows] if part == 1 else [*rows[:3], rows[3] | {"title": None}]
        (corpus / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [tmp_path / "here", tmp_path / "again"]
    for folder in folders:
        folder.mkdir()
    expected = read_passages(read_documents(corpus), folders[0], max_words=12)
    cut = ray.data.read_json(str(corpus), lines=True).map_batches(cut_rows, fn_kwargs={"max_words": 12})
    cut.write_parquet(str(tmp_path / "passages"))
    found = pq.read_table(tmp_path / "passages").to_pylist()
    hits = [expected.hit(row, 0.0) for row in range(len(expected))]
    assert {(row["text"], row["document"], row["start_line"], row["end_line"]) for row in found} == {
        (hit.text, hit.document, hit.start_line, hit.end_line) for hit in hits
    }
    assert len(found) == len(hits) == 24
    ids = [row["_id"] for row in found]  # unique, also for passages of the same line
    assert len(set(ids)) == 24 and {name.partition("#")[0] for name in ids} == {hit.location for hit in hits}

    # `encode --corpus` reads the files, and leaves the passages whole.
    pattern = str(tmp_path / "passages" / "*.parquet")
    again = read_passages(read_documents(pattern), folders[1], max_words=12)
    assert {again.hit(row, 0.0).text for row in range(len(again))} == {hit.text for hit in hits}
    assert {again.hit(row, 0.0).document for row in range(len(again))} == set(ids)


@pytest.mark.parametrize("kind", [RuntimeError, ray.exceptions.RayError])
def test_an_open_port_that_does_not_answer_may_need_a_token(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise kind("no connection")

    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster = RayCluster(f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(UserError, match=r"no connection; the port is open: .*\(RAY_AUTH_TOKEN\)\?\)$"):
            cluster._connect()
    with pytest.raises(UserError, match="no Ray cluster answers at --address") as closed:
        cluster._connect()
    assert "RAY_AUTH_TOKEN" not in str(closed.value)


def test_rows_without_an_id_are_rejected() -> None:
    with pytest.raises(UserError, match=r"no column '_id'; the columns are 'text' \(choose with id_column\)"):
        cut_rows({"text": ["Rivers carry sediment."]})
