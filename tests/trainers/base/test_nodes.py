"""Two nodes without a shared disk: trained, measured, killed, resumed with the nodes exchanged, and exported."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from processes import launch
from safetensors.torch import load_file

from revela_hub.evaluation.probe_folder import read_probe_task
from revela_hub.evaluation.retrieval import retrieval_run, score_run
from revela_hub.trainers.base.retriever import load_retriever

_NODE = """
import os, signal, sys
from pathlib import Path
from transformers import TrainerCallback
from revela_hub.cli.parser import CommandParser, build_arguments
from revela_hub.errors import UserError
from revela_hub.trainers.baselines import contriever_command as command

class Die(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == {dies} and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

node = Path({nodes!r}[int(os.environ["RANK"])])
os.chdir(node)
words = [*{words!r}, "--data", "data", "--output_dir", "out", "--cache_dir", "cache"]
arguments = build_arguments(command.Arguments, CommandParser(command.Arguments, "p", "").read(words))
try:
    command.train(arguments, callbacks=[Die()])
except UserError as error:
    (node / "error.txt").write_text(str(error))
    sys.exit(3)
"""


class Nodes:
    """Runs of two processes: each in a separate folder with a copy of the data, or both in one folder."""

    def __init__(self, folder: Path, retriever: Path) -> None:
        self.folder = folder
        self.words = (
            "--max_steps 6 --save_steps 2 --eval_steps 2 --learning_rate 1e-2 --per_device_train_batch_size 4".split()
        )
        self.words += (
            "--use_cpu true --bf16 false --probe_queries 20 --logging_steps 1 --export last --quiet true".split()
        )
        self.words += ["--retriever", str(retriever)]

    def make(self, name: str, documents: int = 60) -> Path:
        words = (
            "river sea mountain valley boat captain harbour wind rain stone bridge market bread apple garden".split()
        )
        rows = []
        for n in range(documents):
            each = [[words[(n * (3 + 2 * i + k) + i * i) % 15] + f"{n % 7}" for i in range(11)] for k in range(4)]
            rows.append({"text": " ".join(f"{' '.join(sentence).capitalize()} {n}." for sentence in each)})
        data = self.folder / name / "data"
        data.mkdir(parents=True)
        (data / "text.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return data.parent

    def run(self, *nodes: Path, dies: int = -1, resume: bool = False) -> None:
        words = [*self.words, *(["--resume_from_checkpoint", "last"] if resume else [])]
        script = self.folder / "node.py"
        script.write_text(_NODE.format(dies=dies, nodes=[str(node) for node in nodes], words=words))
        separate = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if len(set(nodes)) > 1 else {}
        launch(str(script), processes=2, environment=separate)


@pytest.mark.slow
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="transformers 5.17 cannot load the optimizer of several processes without GPUs",
)
def test_two_nodes_without_a_shared_disk_are_killed_and_resume(tmp_path: Path, retriever_folder: Path) -> None:
    nodes = Nodes(tmp_path, retriever_folder)
    one = nodes.make("one")
    nodes.run(one, one)
    scores = json.loads((one / "out" / "measured" / "scores.json").read_text())
    task = read_probe_task(one / "out" / "probe")
    alone = score_run(retrieval_run(load_retriever(str(retriever_folder)), task), task)
    assert scores["scores"]["0"] == alone.per_query  # each process encoded a part of the texts

    first, second = nodes.make("first"), nodes.make("second")
    with pytest.raises(AssertionError):
        nodes.run(first, second, dies=4)
    assert not list((second / "out").glob("checkpoint-*"))
    assert (first / "out" / "checkpoint-4" / "rng_state_1.pth").is_file()
    nodes.run(second, first, resume=True)  # the main process runs on the node that has no checkpoint
    weights, expected = (load_file(n / "out" / "retriever" / "model.safetensors") for n in (second, one))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert (second / "out" / "outcome.json").read_bytes() == (one / "out" / "outcome.json").read_bytes()
    assert json.loads((second / "out" / "measured" / "scores.json").read_text()) == scores
    assert not list(tmp_path.glob("*/out/.received")) and not list(tmp_path.glob("*/out/.seen-*"))

    third = nodes.make("third", documents=59)
    with pytest.raises(AssertionError):
        nodes.run(nodes.make("fourth"), third)
    errors = [file.read_text() for file in tmp_path.glob("*/error.txt") if file.parent.name in ("third", "fourth")]
    assert any("process 1 differs from the main process in train_dataset" in error for error in errors)
