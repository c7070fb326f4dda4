"""From raw code on this machine to a trained, measured retriever, in minutes on a CPU, without any download.

Takes the sources of Python's standard library (or --data FOLDER of yours), holds out docstrings as queries for the
functions they describe, removes those docstrings from the text, adapts a small general retriever to that text with Revela,
loads the result in another process with plain SentenceTransformer, and prints what it was worth before and after,
beside BM25 and together with it. How much of BM25 goes into the hybrid was chosen on a probe made of the training text,
not on what is measured.

Leaves in --output_dir: retriever/ (with its model card), lm/, task/ (the retrieval task, in BEIR's form), text/ (what was
trained on), report.json, training_curve.png and similarity_map.png.

Examples:
  revela-hub quickstart
  revela-hub quickstart --data path/to/python/project --output_dir outputs/project
"""

import json
import platform
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from revela_hub import __version__
from revela_hub.errors import UserError
from revela_hub.ranges import PositiveInt, Seed

if TYPE_CHECKING:
    from revela_hub.cli.commands import train_revela
    from revela_hub.evaluation import DocstringTask

REMARK = {
    "start": "general retriever, before",
    "revela": "after Revela on this text",
    "bm25": "BM25",
    "start_hybrid": "before, with BM25",
    "revela_hybrid": "after, with BM25",
}


@dataclass
class Arguments:
    """Arguments of `revela-hub quickstart`."""

    data: str | None = field(
        default=None, metadata={"help": "Folder of Python sources. Default: the standard library."}
    )
    output_dir: str = field(default="quickstart", metadata={"help": "Where everything is written."})
    models: str = field(
        default="examples/quickstart",
        metadata={"help": "Folder with the small models to start from: retriever/, lm/ and adapt.yaml."},
    )
    queries: PositiveInt = field(default=500, metadata={"help": "Docstrings to hold out."})
    max_steps: PositiveInt | None = field(default=None, metadata={"help": "Updates; by default those of adapt.yaml."})
    seed: Seed = field(default=0, metadata={"help": "Of the training run. The task is the same for all seeds."})


def run(arguments: Arguments) -> None:
    """Runs the whole story and prints the table."""
    from revela_hub.cli.commands import train_revela
    from revela_hub.data.sources.beir import write_beir
    from revela_hub.evaluation import docstring_task
    from revela_hub.retrieval.disk import try_folder
    from revela_hub.trainers.common.measuring import OUTCOME

    began = time.monotonic()
    models, output = Path(arguments.models), Path(arguments.output_dir)
    for part in ("retriever", "lm", "adapt.yaml"):
        if not (models / part).exists():
            raise UserError(f"{models} has no {part}: run from a checkout of the repository, or give --models FOLDER")
    root = Path(arguments.data or sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise UserError(f"--data {root} is not a folder")
    try_folder(output, "--output_dir")
    print(f"1/4  reading {root.name}: docstrings become queries, and leave the text")
    docstrings = docstring_task(root, queries=arguments.queries)
    write_beir(docstrings.task, output / "task")
    _write_sources(docstrings, output / "text")
    print(f"     {len(docstrings.task.queries)} queries, {len(docstrings.task.corpus):,} functions to find")
    print("2/4  adapting the retriever to the text with Revela")
    training = _training_arguments(arguments, models, output)
    outcome = output / OUTCOME
    outcome.unlink(missing_ok=True)
    train_revela.train(training)
    print("3/4  measuring in another process, with plain SentenceTransformer")
    # Text that no probe could be made of has chosen nothing: then half and half.
    weight = json.loads(outcome.read_text(encoding="utf-8"))["bm25_weight"] if outcome.exists() else 0.5
    scores = _measure({"start": str(models / "retriever"), "revela": str(output / "retriever")}, weight, output)
    print("4/4  pictures, report and model card")
    _draw(training, models, output)
    report = _report(scores, training, output, minutes=(time.monotonic() - began) / 60)
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _write_card(report, models, output)
    _conclude(scores, models, output)


def _write_sources(docstrings: "DocstringTask", folder: Path) -> None:
    for name, text in docstrings.sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _training_arguments(arguments: Arguments, models: Path, output: Path) -> "train_revela.Arguments":
    """What `revela-hub train revela --config adapt.yaml ...` would be given."""
    from revela_hub.cli.commands import train_revela
    from revela_hub.cli.parser import parse_arguments

    words = ["--config", models / "adapt.yaml", "--data", output / "text", "--output_dir", output]
    words += ["--retriever", models / "retriever", "--lm", models / "lm", "--seed", arguments.seed]
    words += ["--cache_dir", output / "cache", "--overwrite", "true"]
    if arguments.max_steps is not None:
        words += ["--max_steps", arguments.max_steps]
    parsed = parse_arguments(
        train_revela.Arguments, [str(word) for word in words], program="revela-hub quickstart", description=""
    )
    assert parsed is not None  # None is for --help
    return parsed


def _measure(models: dict[str, str], bm25_weight: float, output: Path) -> dict[str, dict[str, Any]]:
    """BM25, and each model alone and with `bm25_weight` of BM25, on the held-out task."""
    command = [
        sys.executable,
        "-m",
        "revela_hub",
        "evaluate",
        "bm25",
        *models.values(),
        "--corpus",
        str(output / "task"),
    ]
    command += ["--mode", "dense", "hybrid", "--weights", f"{1 - bm25_weight:.1f}", f"{bm25_weight:.1f}"]
    command += ["--cache_dir", str(output / "cache"), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"measuring failed with exit status {done.returncode}; its own message is above")
    keys = ["bm25", *(f"{name}{mode}" for name in models for mode in ("", "_hybrid"))]
    rows = zip(keys, json.loads(done.stdout), strict=True)
    return {
        key: {k: v for k, v in row.items() if k not in ("model", "compared_with", "difference")} for key, row in rows
    }


def _draw(training: "train_revela.Arguments", models: Path, output: Path) -> None:
    """The training curve, and the similarities of one group before and after."""
    from datasets import Dataset

    from revela_hub.hub_cards.figures import similarity_map, training_curve
    from revela_hub.trainers import load_groups

    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    training_curve(state["log_history"], output / "training_curve.png")
    groups: Dataset = load_groups(training)[0]
    group = groups[len(groups) // 2]
    maps = {
        "before": _similarities(models / "retriever", group["text"], training.temperature),
        "after": _similarities(output / "retriever", group["text"], training.temperature),
    }
    similarity_map(maps, group["document"], output / "similarity_map.png")


def _similarities(folder: Path, texts: list[str], temperature: float) -> NDArray[np.float32]:
    """(B, B) softmax over the cosines of a group's chunks, as the training sees them."""
    import torch

    from revela_hub.retrieval.encoder import load_encoder

    vectors = load_encoder(str(folder), device="cpu").encode_document(texts, convert_to_tensor=True).float()
    scores = (vectors @ vectors.T / temperature).fill_diagonal_(-torch.inf)
    similarities: NDArray[np.float32] = scores.softmax(-1).numpy()
    return similarities


def _report(
    scores: dict[str, dict[str, Any]], training: "train_revela.Arguments", output: Path, *, minutes: float
) -> dict[str, Any]:
    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    log = [entry for entry in state["log_history"] if "loss" in entry]
    settings = ("learning_rate", "temperature", "temperature_start", "retriever_start_step", "group_size", "run_length")
    return {
        "scores": scores,
        "minutes": round(minutes, 1),
        "steps": state["global_step"],
        "settings": {name: getattr(training, name) for name in settings} | {"seed": training.seed},
        "first_log": log[0] if log else {},
        "last_log": log[-1] if log else {},
        "versions": {"revela_hub": __version__, "python": platform.python_version()},
    }


def _write_card(report: dict[str, Any], models: Path, output: Path) -> None:
    from revela_hub.hub_cards import Figure, ModelCardFacts, Result, write_card

    metrics = ("ndcg_at_10", "mrr_at_10", "recall_at_100")
    names = {"revela": None} | {key: remark for key, remark in REMARK.items() if key != "revela"}
    results = [
        Result("docstring to function", {m: report["scores"][key][m] for m in metrics}, model=name)
        for key, name in names.items()
    ]
    facts = ModelCardFacts(
        method="revela",
        description="A small retriever adapted by `revela-hub quickstart` to the Python code of one machine.",
        languages=("en",),
        training_data="Python sources of the machine it was made on, without the docstrings it was measured with.",
        command="revela-hub quickstart",
        config=(models / "adapt.yaml").read_text(encoding="utf-8"),
        results=results,
        figures=(
            Figure(str(output / "training_curve.png"), "Next-token loss during the adaptation"),
            Figure(str(output / "similarity_map.png"), "Similarities of one group's chunks; lines part the documents"),
        ),
        limitations=("Made in minutes on a CPU from a model of 7 M parameters: a demonstration of the method.",),
    )
    write_card(output / "retriever", facts, repo_id="revela-quickstart")


def _conclude(scores: dict[str, dict[str, Any]], models: Path, output: Path) -> None:
    print(f"\n{'':<27}  nDCG@10  Recall@100")
    for key, remark in REMARK.items():
        row = scores[key]
        print(f"{remark:<27}  {row['ndcg_at_10']:7.3f}  {row['recall_at_100']:10.3f}")
    print(f"\neverything is in {output}/: retriever/ with its card, report.json, two pictures\n")
    print("the same for your own text or code:")
    print(
        f"  revela-hub train revela --config {models / 'adapt.yaml'} --retriever {models / 'retriever'}"
        f" --lm {models / 'lm'} --data path/to/code --output_dir outputs/my-code"
    )
    print("search with what you have now:")
    print(f'  revela-hub search {output / "retriever"} --corpus path/to/code "parse a date from a string"')
