"""Write model cards from one template, without lines for missing metadata."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from revela_hub import __version__
from revela_hub.errors import UserError, first_line
from revela_hub.hub_cards.metadata import (
    HUB_NAME,
    LICENSES,
    METRIC_NAMES,
    Figure,
    ModelCardMetadata,
    ModelDescription,
    Result,
    describe,
    hub_model_id,
)
from revela_hub.hub_cards.verify.contents import EVAL_RESULTS
from revela_hub.paths import local_path

CARD_METADATA = "card.yaml"  # file in a checkpoint with the fields of `ModelCardMetadata`
METADATA_FOLDER = ".revela_hub"  # folder next to a model for our own files; it is never uploaded
# Key of the front matter -> (expression for its values, error message).
_FRONT_MATTER = {
    "license": (
        "|".join(map(re.escape, LICENSES)),
        "is not a license identifier of the Hub: use one (apache-2.0), or other",
    ),
    "base_model": (HUB_NAME, "is not the id of a model on the Hub"),
    "datasets": (HUB_NAME, "is not the id of a dataset on the Hub"),
    "language": (r"[a-z]{2,3}(-[\w-]+)?|code|multilingual", "is not an ISO 639 code"),
    **dict.fromkeys(("tags", "library_name", "pipeline_tag"), (r"[\s\S]*", "is not a text")),
}
# Class that loads a model -> (pipeline of the Hub, tags).
_KINDS = {
    "SentenceTransformer": ("sentence-similarity", ["feature-extraction", "dense", "retrieval"]),
    "SparseEncoder": ("feature-extraction", ["feature-extraction", "sparse-encoder", "sparse", "retrieval"]),
    "MultiVectorEncoder": (
        "feature-extraction",
        ["feature-extraction", "multi-vector", "late-interaction", "retrieval"],
    ),
    "CrossEncoder": ("text-ranking", ["cross-encoder", "reranker"]),
}


def write_card(folder: str | Path, metadata: ModelCardMetadata, *, repo_id: str | None = None) -> Path:
    """Write README.md, the figures, and `.eval_results/` into a model folder.

    Args:
        folder: any model folder, such as one written by `export_retriever`.
        metadata: what cannot be read from the folder. A base model that is a path is not written.
        repo_id: id of the model on the Hub; by default the name of the folder.

    Returns:
        The path of README.md.
    """
    folder = local_path(folder)
    model, name = describe(folder), repo_id or folder.name
    title = name.rpartition("/")[2]
    metadata = replace(metadata, base_model=hub_model_id(metadata.base_model))
    figures = _write_figures(folder, metadata.figures)
    _write_eval_results(folder, metadata.results)
    method = metadata.method
    usage = method.usage if method else None
    text = _template(*([usage.parent] if usage else [])).render(
        front_matter=_front_matter(name, metadata, model).to_yaml().strip(),
        name=name,
        title=title,
        card=replace(metadata, figures=figures),
        model=model,
        paper=method.paper if method else None,
        usage=usage.name if usage else None,
        results=_results_table(metadata.results, title),
        version=__version__,
    )
    (folder / METADATA_FOLDER).mkdir(exist_ok=True)
    # Publishing writes the card again with the id of the model, unless README.md was edited and differs from this copy.
    for place in (folder, folder / METADATA_FOLDER):
        (place / "README.md").write_text(text, encoding="utf-8")
    kept = [Figure(str(folder / figure.path), figure.caption) for figure in figures]
    replace(metadata, figures=kept).to_file(folder / METADATA_FOLDER / CARD_METADATA)
    return folder / "README.md"


def check_card(card: Path) -> None:
    """Check the front matter of a card for values that the Hub would reject or misread.

    Raises:
        UserError: the YAML is invalid, or a value is.
    """
    try:
        text = card.read_bytes().decode("utf-8")
    except ValueError as error:
        raise UserError(f"{card.name} is not UTF-8 text") from error
    if not text.startswith("---"):
        return
    if not re.search(r"^---[ \t]*\r?$", text[3:], re.MULTILINE):
        raise UserError(f"{card.name}: the YAML block at the top has no end: add a line with ---")
    try:
        values = ModelCard(text).data
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{card.name}: the YAML block at the top is invalid: {first_line(error)}") from error
    for key, (pattern, message) in _FRONT_MATTER.items():
        given = values.get(key)
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, bool):
                raise UserError(f"{card.name}: {key}: YAML reads an unquoted yes or no as {value}: put it in quotes")
            if value is not None and not (isinstance(value, str) and re.fullmatch(pattern, value)):
                raise UserError(f"{card.name}: {key}: {value!r} {message}")


@cache
def _template(*more: Path) -> Any:
    """Return the template of the card, which can include the templates in other folders."""
    environment = Environment(
        loader=FileSystemLoader([Path(__file__).parent, *more]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["code_span"] = _code_span
    return environment.get_template("model_card.md.j2")


def _code_span(text: str) -> str:
    r"""Return a text as a JSON string in a Markdown code span, so that line breaks and spaces can be seen.

    >>> print(_code_span("Query:\n"))
    `"Query:\n"`
    """
    shown = json.dumps(text, ensure_ascii=False)
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    return f"{fence}{shown}{fence}"


def _front_matter(name: str, metadata: ModelCardMetadata, model: ModelDescription) -> ModelCardData:
    """Return the YAML block that the Hub and MTEB read."""
    tags: list[str] = []
    pipeline = "text-generation" if model.architecture.endswith("ForCausalLM") else None
    if model.is_encoder:
        pipeline, kinds = _KINDS.get(model.loader, _KINDS["SentenceTransformer"])
        if model.labels > 1:
            pipeline, kinds = "text-classification", ["cross-encoder"]
        tags = ["sentence-transformers", *kinds]
    results = [
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
        for result in metadata.results
        if result.model is None
        for metric, value in result.metrics.items()
    ]
    return ModelCardData(
        library_name="sentence-transformers" if model.is_encoder else "transformers",
        pipeline_tag=pipeline,
        tags=[*tags, *([metadata.method.name] if metadata.method else []), "revela-hub"],
        base_model=metadata.base_model or model.adapter_of,
        base_model_relation="adapter" if model.adapter_of else ("finetune" if metadata.base_model else None),
        license=metadata.license,
        language=list(metadata.languages) or None,
        datasets=list(metadata.datasets) or None,
        model_name=name.rpartition("/")[2] if results else None,
        eval_results=results or None,
        co2_eq_emissions=dict(metadata.co2_eq_emissions) or None,
    )


def _results_table(results: Sequence[Result], title: str) -> str:
    if not results:
        return ""
    metrics = list(dict.fromkeys(metric for result in results for metric in result.metrics))
    rows = [["Task", "Model", *(METRIC_NAMES.get(metric, metric) for metric in metrics)]]
    rows.append(["---"] * 2 + ["---:"] * len(metrics))
    for result in results:
        values = (f"{result.metrics[metric]:.4f}" if metric in result.metrics else "" for metric in metrics)
        rows.append([result.task, result.model or f"**{title}**", *values])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _write_figures(folder: Path, figures: Sequence[Figure]) -> list[Figure]:
    """Copy the figures to `figures/`, each under its own name without spaces and parentheses, which would break the links."""
    # First, because a figure may be in this folder.
    contents = [local_path(figure.path).read_bytes() for figure in figures]
    written: dict[str, Figure] = {}
    for figure, content in zip(figures, contents, strict=True):
        path = Path(re.sub(r"[^\w.-]+", "_", Path(figure.path).name))
        name, number = path.name, 1
        while name.casefold() in written:
            name, number = f"{path.stem}_{number + 1}{path.suffix}", number + 1
        written[name.casefold()] = Figure(f"figures/{name}", figure.caption)
        (folder / "figures").mkdir(exist_ok=True)
        (folder / "figures" / name).write_bytes(content)
    return list(written.values())


def _write_eval_results(folder: Path, results: Sequence[Result]) -> None:
    """Write the main metric on each dataset of the Hub in the Hub's newer format, one file per dataset, instead of earlier ones."""
    for old in sorted((folder / ".eval_results").glob("*")):
        if EVAL_RESULTS.fullmatch(old.name):
            old.unlink()
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
