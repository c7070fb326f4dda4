"""Train and evaluate a retriever on raw code in minutes, on a CPU, without downloads.

It uses the sources of Python's standard library, or those in --data. Docstrings are held out as queries for the
functions they describe and removed from the training text. A small retriever is adapted with Revela, then fine-tuned
on the remaining pairs of docstrings and functions, and compared with BM25 and with hybrids of both. The BM25 weight
is chosen on queries made from the training text, not on the test queries.

Writes to --output_dir: retriever/ (with its model card), revela/ (the Revela run), task/ (the BEIR folder), text/
(the training text), report.json, training_curve.png and similarity_map.png.

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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from revela_hub import __version__
from revela_hub.errors import UserError
from revela_hub.output import command_line
from revela_hub.ranges import PositiveInt, Seed

if TYPE_CHECKING:
    from revela_hub.evaluation import DocstringTask
    from revela_hub.trainers.revela import command as train_revela

REPORT = "report.json"
LABELS = {
    "start": "base model",
    "revela": "after Revela",
    "retriever": "after Revela and natural pairs",
    "bm25": "BM25",
    "start_hybrid": "base model + BM25",
    "revela_hybrid": "after Revela + BM25",
    "retriever_hybrid": "after Revela and natural pairs + BM25",
}


@dataclass
class Arguments:
    """Arguments of `revela-hub quickstart`."""

    old_names: ClassVar[dict[str, str]] = {"models": "models_dir"}

    data: str | None = field(
        default=None, metadata={"help": "Folder of Python sources (default: the standard library)."}
    )
    output_dir: str = field(default="quickstart", metadata={"help": "Output folder."})
    models_dir: str = field(
        default="examples/quickstart",
        metadata={"help": "Folder with the models to start from: retriever/, lm/, adapt.yaml and pairs.yaml."},
    )
    queries: PositiveInt = field(default=500, metadata={"help": "Number of docstrings to hold out as queries."})
    functions: PositiveInt = field(
        default=1500, metadata={"help": "Number of functions to search, including those of the docstrings."}
    )
    max_steps: PositiveInt | None = field(
        default=None, metadata={"help": "Number of training steps per run (default: as in adapt.yaml and pairs.yaml)."}
    )
    seed: Seed = field(
        default=0, metadata={"help": "Random seed of the training runs; the task is the same for all seeds."}
    )


def run(arguments: Arguments) -> None:
    """Run all steps and print the table."""
    from revela_hub.data.own_folder import check_free, claim
    from revela_hub.data.sources.beir import write_beir
    from revela_hub.evaluation import docstring_task
    from revela_hub.evaluation.probe import MIN_QUERIES
    from revela_hub.retrieval.disk import try_folder
    from revela_hub.trainers.common.run import refuse_foreign
    from revela_hub.trainers.pair_tuning import command as train_pairs
    from revela_hub.trainers.revela import command as train_revela

    began = time.monotonic()
    models, output = Path(arguments.models_dir), Path(arguments.output_dir)
    for part in ("retriever", "lm", "adapt.yaml", "pairs.yaml"):
        if not (models / part).exists():
            raise UserError(
                f"{models} has no {part}: run from a checkout of the repository, or give --models_dir FOLDER"
            )
    root = Path(arguments.data or sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise UserError(f"--data {root} is not a folder")
    try_folder(output, "--output_dir")
    for folder in (output, output / "revela"):
        refuse_foreign(folder)
    for part in ("task", "text"):
        check_free(output / part, "--output_dir", lambda _: _is_report(output / REPORT))
    if (output / REPORT).exists() and not _is_report(output / REPORT):
        raise UserError(f"--output_dir {output} holds a {REPORT} that quickstart did not write: give another folder")
    print(f"1/5  reading {root.name}: docstrings become queries and are removed from the text")
    docstrings = docstring_task(root, queries=arguments.queries, functions=arguments.functions)
    for part in ("task", "text"):
        claim(output / part, "--output_dir", lambda _: True)
    write_beir(docstrings.task, output / "task")
    _write_sources(docstrings, output / "text")
    print(f"     {len(docstrings.task.queries)} queries, {len(docstrings.task.corpus):,} functions to search")
    print("2/5  adapting the retriever to the text with Revela")
    left = len(docstrings.task.corpus) - len(docstrings.task.queries)  # a probe leaves half of them to be trained on
    probe = ["--probe_queries", min(200, left // 2)] if left >= 2 * MIN_QUERIES else ["--probe", "none"]
    more = ["--seed", arguments.seed, *probe]
    more += [] if arguments.max_steps is None else ["--max_steps", arguments.max_steps]
    start = ["--retriever", models / "retriever", "--lm", models / "lm"]
    revela = _training_arguments(
        train_revela,
        models / "adapt.yaml",
        output,
        output / "revela",
        start + more + _delay(arguments, models / "adapt.yaml"),
    )
    train_revela.train(revela)
    print("3/5  training it on natural pairs: the remaining docstrings and their functions")
    start = ["--retriever", output / "revela" / "retriever"]
    pairs = _training_arguments(train_pairs, models / "pairs.yaml", output, output, start + more)
    train_pairs.train(pairs)
    print("4/5  evaluating in a separate process with plain sentence-transformers")
    scores = _measure(["bm25", "start", "revela"], models, output, _bm25_weight(output / "revela"))
    scores |= _measure(["retriever"], models, output, _bm25_weight(output))
    print("5/5  writing figures, report and model card")
    _draw(revela, models, output)
    report = _report(scores, revela, output, minutes=(time.monotonic() - began) / 60)
    (output / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _write_card(report, models, output)
    _conclude(scores, models, output)


def _is_report(file: Path) -> bool:
    """Return whether a file is the report of an earlier quickstart."""
    try:
        return "revela_hub" in json.loads(file.read_bytes())["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_sources(docstrings: "DocstringTask", folder: Path) -> None:
    for name, text in docstrings.sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _delay(arguments: Arguments, config: Path) -> list[Any]:
    """Return options that make the retriever start within a run that is shorter than the configuration's."""
    import yaml

    if arguments.max_steps is None:
        return []
    told = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    return ["--retriever_start_step", min(told.get("retriever_start_step", 0), arguments.max_steps - 1)]


def _training_arguments(command: Any, config: Path, output: Path, folder: Path, more: list[Any]) -> Any:
    """Return the arguments of `revela-hub train ... --config FILE ...`."""
    from revela_hub.cli.parser import parse_arguments

    words = ["--config", config, "--data", output / "text", "--output_dir", folder, *more]
    words += ["--cache_dir", output / "cache", "--overwrite", "true"]
    given = [str(word) for word in words]
    parsed = parse_arguments(command.Arguments, given, program="revela-hub quickstart", description="")
    assert parsed is not None  # None is for --help
    return parsed


def _bm25_weight(folder: Path) -> float:
    """Return the BM25 weight of the hybrid that a run chose on its probe; 0.5 if no probe could be made."""
    from revela_hub.trainers.common.outcome import OUTCOME

    outcome = folder / OUTCOME
    return float(json.loads(outcome.read_text(encoding="utf-8"))["bm25_weight"]) if outcome.exists() else 0.5


def _measure(names: list[str], models: Path, output: Path, bm25_weight: float) -> dict[str, dict[str, Any]]:
    """Evaluate BM25, and each model alone and in a hybrid with `bm25_weight`, on the held-out task."""
    folders = {"bm25": "bm25", "start": models / "retriever", "revela": output / "revela" / "retriever"}
    given = [str(folders.get(name, output / "retriever")) for name in names]
    command = [sys.executable, "-m", "revela_hub", "evaluate", *given, "--corpus", str(output / "task")]
    command += ["--mode", "dense", "hybrid", "--weights", f"{1 - bm25_weight:.1f}", f"{bm25_weight:.1f}"]
    command += ["--cache_dir", str(output / "cache"), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"the evaluation failed with exit status {done.returncode}; see its message above")
    keys = [f"{name}{mode}" for name in names for mode in ("", "_hybrid") if not (name == "bm25" and mode)]
    rows = zip(keys, json.loads(done.stdout), strict=True)
    return {
        key: {k: v for k, v in row.items() if k not in ("model", "compared_with", "difference")} for key, row in rows
    }


def _draw(training: "train_revela.Arguments", models: Path, output: Path) -> None:
    """Draw the training curve, and the similarities within one group before and after."""
    from datasets import Dataset

    from revela_hub.hub_cards.figures import similarity_map, training_curve
    from revela_hub.modeling.configuration_revela import TEMPERATURES
    from revela_hub.trainers import load_groups

    state = json.loads((output / "revela" / "trainer_state.json").read_text(encoding="utf-8"))
    training_curve(state["log_history"], output / "training_curve.png")
    groups: Dataset = load_groups(training)[0]
    group = groups[len(groups) // 2]
    temperature = training.temperature or TEMPERATURES[training.reading]
    maps = {
        "before": _similarities(models / "retriever", group["text"], temperature),
        "after": _similarities(output / "revela" / "retriever", group["text"], temperature),
    }
    similarity_map(maps, group["document"], output / "similarity_map.png")


def _similarities(folder: Path, texts: list[str], temperature: float) -> NDArray[np.float32]:
    """Return (B, B), the softmax over the similarities of a group's chunks, as in training."""
    import torch

    from revela_hub.retrieval.encoder import load_encoder

    model = load_encoder(str(folder), device="cpu")
    vectors = model.encode_document(texts, convert_to_tensor=True).float()
    scores = (model.similarity(vectors, vectors) / temperature).fill_diagonal_(-torch.inf)
    similarities: NDArray[np.float32] = scores.softmax(-1).numpy()
    return similarities


def _report(
    scores: dict[str, dict[str, Any]], training: "train_revela.Arguments", output: Path, *, minutes: float
) -> dict[str, Any]:
    state = json.loads((output / "revela" / "trainer_state.json").read_text(encoding="utf-8"))
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
    from revela_hub.hub_cards import Figure, ModelCardMetadata, Result, write_card
    from revela_hub.trainers.revela import REVELA

    metrics = ("ndcg_at_10", "mrr_at_10", "recall_at_100")
    names = {"retriever": None} | {key: label for key, label in LABELS.items() if key != "retriever"}
    results = [
        Result("docstring to function", {m: report["scores"][key][m] for m in metrics}, model=name)
        for key, name in names.items()
    ]
    metadata = ModelCardMetadata(
        method=REVELA,
        description="A small retriever trained by `revela-hub quickstart` on the Python code of one machine: first with Revela,"
        " then on pairs of docstrings and their functions.",
        languages=("en",),
        training_data="Python sources of the machine it was trained on, without the docstrings it was evaluated with.",
        command="revela-hub quickstart",
        config="\n".join((models / name).read_text(encoding="utf-8") for name in ("adapt.yaml", "pairs.yaml")),
        results=results,
        figures=(
            Figure(str(output / "training_curve.png"), "Next-token loss during training with Revela"),
            Figure(
                str(output / "similarity_map.png"),
                "Similarities between the chunks of one group; lines separate documents",
            ),
        ),
        limitations=("A demonstration: a model with 7 M parameters, trained for minutes on a CPU.",),
    )
    write_card(output / "retriever", metadata, repo_id="revela-quickstart")


def _conclude(scores: dict[str, dict[str, Any]], models: Path, output: Path) -> None:
    width = max(map(len, LABELS.values()))
    print(f"\n{'':<{width}}  nDCG@10  Recall@100")
    for key, label in LABELS.items():
        row = scores[key]
        print(f"{label:<{width}}  {row['ndcg_at_10']:7.3f}  {row['recall_at_100']:10.3f}")
    print(f"\noutput in {output}/: retriever/ with its model card, report.json, two figures\n")
    print("To train on your own text or code:")
    revela = ["--config", models / "adapt.yaml", "--retriever", models / "retriever", "--lm", models / "lm"]
    pairs = ["--config", models / "pairs.yaml", "--retriever", "outputs/my-code/retriever"]
    data = ["--data", "path/to/code", "--output_dir"]
    print(f"  {command_line('train', 'revela', *revela, *data, 'outputs/my-code')}")
    print(f"  {command_line('train', 'pairs', *pairs, *data, 'outputs/my-pairs')}")
    print("To search with the trained retriever:")
    query = "parse a date from a string"
    print(f"  {command_line('search', output / 'retriever', query, '--corpus', 'path/to/code')}")
