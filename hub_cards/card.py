"""Write model cards from one template, without lines for missing metadata."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from revela_hub import __version__
from revela_hub.files import local_path
from revela_hub.hub_cards.metadata import (
    METRIC_NAMES,
    ModelCardMetadata,
    ModelDescription,
    Result,
    describe,
    hub_model_id,
)

CARD_METADATA = "card.yaml"  # file in a checkpoint with the fields of `ModelCardMetadata`
METADATA_FOLDER = ".revela_hub"  # folder next to a model for our own files; it is never uploaded


def write_card(folder: str | Path, metadata: ModelCardMetadata, *, repo_id: str | None = None) -> Path:
    """Write README.md into a model folder.

    Args:
        folder: any model folder, such as one written by `export_retriever`.
        metadata: what cannot be read from the folder. A base model that is a path is not written.
        repo_id: id of the model on the Hub; by default the code loads it from the folder, if that is a relative path.

    Returns:
        The path of README.md.
    """
    folder = local_path(folder)
    # The code loads a relative path; an absolute one is private.
    model, name = describe(folder), repo_id or (folder.name if folder.is_absolute() else folder.as_posix())
    title, method = name.rpartition("/")[2], metadata.method
    if method and not repo_id and title in method.folders:  # every run's retriever is in `retriever`
        title = f"{folder.parent.name} {title}".strip()
    metadata = replace(metadata, base_model=hub_model_id(metadata.base_model))
    usage = method.usage if method else None
    text = _template(*([usage.parent] if usage else [])).render(
        front_matter=_front_matter(title, metadata, model).to_yaml().strip(),
        name=name,
        title=title,
        card=metadata,
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
    metadata.to_file(folder / METADATA_FOLDER / CARD_METADATA)
    return folder / "README.md"


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
    return f"`{json.dumps(text, ensure_ascii=False)}`"


def _front_matter(title: str, metadata: ModelCardMetadata, model: ModelDescription) -> ModelCardData:
    """Return the YAML block that the Hub and MTEB read."""
    tags, pipeline = [], "text-generation" if model.architecture.endswith("ForCausalLM") else None
    if model.is_encoder:
        sparse = model.loader == "SparseEncoder"
        pipeline = "feature-extraction" if sparse else "sentence-similarity"
        kinds = ["sparse-encoder", "sparse"] if sparse else ["dense"]
        tags = ["sentence-transformers", "feature-extraction", *kinds, "retrieval"]
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
        base_model=metadata.base_model,
        base_model_relation="finetune" if metadata.base_model and not metadata.unchanged else None,
        license=metadata.license,
        language=list(metadata.languages) or None,
        datasets=list(metadata.datasets) or None,
        model_name=title if results else None,
        eval_results=results or None,
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
