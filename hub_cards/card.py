"""Model cards: one template, filled from data. Where there is no fact, there is no line: nothing is invented."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from revela_hub import __version__
from revela_hub.errors import UserError, first_line
from revela_hub.hub_cards.facts import (
    LICENSES,
    METRIC_NAMES,
    Figure,
    ModelCardFacts,
    ModelFacts,
    Result,
    describe,
)

TEMPLATES = Path(__file__).parent
CARD_FACTS = "card.yaml"  # in a checkpoint: the facts of its card, in the form of `ModelCardFacts`
OURS = ".revela_hub"  # what we keep in a folder beside the model; it is never uploaded


def write_card(folder: str | Path, facts: ModelCardFacts, *, repo_id: str | None = None) -> Path:
    """Writes README.md, the figures, and `.eval_results/` into a model folder.

    Args:
        folder: a folder that `export_retriever` wrote, or any model folder.
        facts: what the folder does not tell.
        repo_id: the id under which it will be on the Hub; the folder's name otherwise.

    Returns:
        The path of README.md.
    """
    folder = Path(folder)
    model, name = describe(folder), repo_id or folder.name
    figures = []
    for figure in facts.figures:
        target = folder / "figures" / Path(figure.path).name
        target.parent.mkdir(exist_ok=True)
        if Path(figure.path).resolve() != target.resolve():
            shutil.copyfile(figure.path, target)
        figures.append(Figure(f"figures/{target.name}", figure.caption))
    _write_eval_results(folder, facts.results)
    text = _template("model_card.md.j2").render(
        metadata=_metadata(name, facts, model).to_yaml().strip(),
        name=name,
        title=name.rpartition("/")[2],
        facts=facts,
        model=model,
        paper=facts.method.paper if facts.method else None,
        usage=_usage(facts, model, name),
        figures=figures,
        results=_results_table(facts.results, name.rpartition("/")[2]),
        version=__version__,
    )
    card = folder / "README.md"
    card.write_text(text, encoding="utf-8")
    # So that it can be written anew under the name by which the model is published, unless a person changes it.
    (folder / OURS).mkdir(exist_ok=True)
    replace(facts, figures=[Figure(str(folder / figure.path), figure.caption) for figure in figures]).to_file(
        folder / OURS / CARD_FACTS
    )
    (folder / OURS / "README.md").write_text(text, encoding="utf-8")
    return card


def check_card(card: Path) -> None:
    """Looks at what the Hub would refuse, or misread, after everything else is done.

    Raises:
        UserError: the block of YAML at the card's head is broken, or holds a value that the Hub does not know.
    """
    try:
        text = card.read_bytes().decode("utf-8")
    except ValueError as error:
        raise UserError(f"{card.name} is not UTF-8 text") from error
    if not text.startswith("---"):
        return
    head = re.match(r"---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", text, re.DOTALL | re.MULTILINE)
    if head is None:
        raise UserError(f"{card.name}: the block of YAML at its head has no end: a line with --- is missing")
    try:
        values = yaml.safe_load(head.group(1)) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{card.name}: the block at its head is not valid YAML: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise UserError(f"{card.name}: the block at its head is no mapping from names to values")
    for fault in _metadata_faults(values):
        raise UserError(f"{card.name}: {fault}")
    try:
        ModelCard(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{card.name}: the Hub's library cannot read its head: {first_line(error)}") from error


def _metadata_faults(values: dict[str, Any]) -> Iterator[str]:
    for key in ("license", "base_model", "language", "tags", "datasets", "library_name", "pipeline_tag"):
        given = values.get(key)
        for value in given if isinstance(given, list) else [given]:
            if value is None:
                continue
            if isinstance(value, bool):
                yield f"{key}: an unquoted yes or no is read as {str(value).lower()}: put it in quotes"
            elif not isinstance(value, str):
                yield f"{key} is {value!r}, where a text belongs"
            elif key == "license" and value not in LICENSES:
                yield f"{value!r} is no licence that the Hub knows: one of its identifiers (apache-2.0), or other"
            elif key in ("base_model", "datasets") and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", value):
                yield f"{key} is {value!r}, which is not the id of anything on the Hub"
            elif key == "language" and not re.fullmatch(r"[a-z]{2,3}(-[\w-]+)?|code|multilingual", value):
                yield f"language {value!r} is no ISO 639 code"


def _template(name: str) -> Any:
    return _environment(TEMPLATES).get_template(name)


def _environment(folder: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _usage(facts: ModelCardFacts, model: ModelFacts, name: str) -> str:
    """The method's own section on usage."""
    if facts.method is None or facts.method.usage is None:
        return ""
    return str(
        _environment(facts.method.usage.parent).get_template(facts.method.usage.name).render(name=name, model=model)
    )


def _metadata(name: str, facts: ModelCardFacts, model: ModelFacts) -> ModelCardData:
    """The YAML block that the Hub and MTEB read."""
    kind = ["sparse-encoder", "sparse"] if model.loader == "SparseEncoder" else ["dense"]
    tags = ["feature-extraction", *kind, "retrieval"] if model.is_encoder else []
    own = [result for result in facts.results if result.model is None]
    return ModelCardData(
        library_name="sentence-transformers" if model.is_encoder else "transformers",
        pipeline_tag=("feature-extraction" if "sparse" in tags else "sentence-similarity")
        if model.is_encoder
        else ("text-generation" if model.architecture.endswith("ForCausalLM") else None),
        tags=[
            *(["sentence-transformers"] if model.is_encoder else []),
            *tags,
            *([facts.method.name] if facts.method else []),
            "revela-hub",
        ],
        base_model=facts.base_model or model.adapter_of,
        base_model_relation="adapter" if model.adapter_of else ("finetune" if facts.base_model else None),
        license=facts.license,
        language=list(facts.languages) or None,
        datasets=list(facts.datasets) or None,
        model_name=name.rpartition("/")[2] if own else None,
        eval_results=[
            EvalResult(
                task_type="information-retrieval",
                task_name="Information Retrieval",
                dataset_type=result.dataset or result.task,
                dataset_name=result.task,
                dataset_split=result.split,
                dataset_revision=result.revision,
                metric_type=metric,
                metric_name=METRIC_NAMES.get(metric, metric),
                metric_value=round(value, 5),
            )
            for result in own
            for metric, value in result.metrics.items()
        ]
        or None,
    )


def _results_table(results: Sequence[Result], title: str) -> str:
    if not results:
        return ""
    metrics = list(dict.fromkeys(metric for result in results for metric in result.metrics))
    rows = [
        [
            result.task,
            result.model or f"**{title}**",
            *(f"{result.metrics[m]:.4f}" if m in result.metrics else "" for m in metrics),
        ]
        for result in results
    ]
    header = ["Task", "Model", *(METRIC_NAMES.get(metric, metric) for metric in metrics)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * 2 + ["---:"] * len(metrics), *rows])


def _write_eval_results(folder: Path, results: Sequence[Result]) -> None:
    """The newer machine-readable form, for results on data sets that are on the Hub: one file each, the main metric."""
    shutil.rmtree(folder / ".eval_results", ignore_errors=True)
    for result in results:
        if result.model is not None or result.dataset is None:
            continue
        metric, value = next(iter(result.metrics.items()))
        entry = EvalResultEntry(
            dataset_id=result.dataset,
            task_id=result.task,
            value=round(value, 5),
            dataset_revision=result.revision,
            date=result.date,
            notes=f"{METRIC_NAMES.get(metric, metric)}, {result.split} split",
        )
        name = f"{result.dataset.replace('/', '__')}-{result.task}"
        file = folder / ".eval_results" / (re.sub(r"[^\w.-]+", "_", name) + ".yaml")  # a task may be "scifact/test"
        file.parent.mkdir(exist_ok=True)
        file.write_text(yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False), encoding="utf-8")


def collection_card(repo_ids: Sequence[str], folders: Sequence[Path], *, title: str, description: str = "") -> str:
    """Returns the card of a family of models, smallest first: sizes, dimensions and what each one's card reports.

    Args:
        repo_ids: on the Hub.
        folders: where each one's files, card included, are on this machine.
        title: of the family.
        description: a paragraph above the table.
    """
    family = []
    for repo_id, folder in zip(repo_ids, folders, strict=True):
        data = ModelCard.load(folder / "README.md").data
        family.append(
            (
                repo_id,
                describe(folder),
                {(r.dataset_name, r.metric_name): r.metric_value for r in data.eval_results or ()},
            )
        )
    family.sort(key=lambda member: member[1].parameters)
    measured = list(dict.fromkeys(key for *_, results in family for key in results))
    return str(
        _template("collection_card.md.j2").render(
            title=title, description=description, family=family, measured=measured
        )
    )
