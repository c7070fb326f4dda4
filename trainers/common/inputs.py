"""Inputs of the trainers' constructors, as in TRL: models by name or loaded, and raw or prepared data sets."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.data.row_cache import stream_rows
from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.errors import UserError, loading
from revela_hub.gguf_files import model_folder
from revela_hub.hub_cards.method import Method
from revela_hub.trainers.common.arguments import RunArguments
from revela_hub.trainers.common.query_route import trained_transformer

logger = logging.getLogger(__name__)

ModelLike: TypeAlias = str | Path | PreTrainedModel | SentenceTransformer
"""A Hub id, a folder, a GGUF file (`path/to/model.gguf`, `user/repo/model.gguf`), or a loaded model."""

_Arguments = TypeVar("_Arguments", bound=RunArguments)


def unwrapped(model: ModelLike) -> str | PreTrainedModel:
    """Return the id or folder (of a GGUF file, the folder of the converted model), or the transformers model inside a loaded one."""
    if isinstance(model, SentenceTransformer):
        inner: PreTrainedModel = trained_transformer(model).auto_model
        return inner
    return model_folder(str(model)) if isinstance(model, str | Path) else model


def name_of(model: ModelLike) -> str:
    """Return the id or folder that a model was or will be loaded from; "" if unknown."""
    given = unwrapped(model)
    if isinstance(given, str):
        return given
    config: Any = given.config
    parts = [getattr(config, name, None) for name in ("retriever", "encoder", "backbone", "text_config")]
    names = [getattr(part, "name_or_path", "") for part in (config, *parts)]
    return next((str(name) for name in names if name), "")


def default_arguments(kind: type[_Arguments], model: ModelLike, method: Method, **settings: Any) -> _Arguments:
    """Return default training arguments, with an output folder named after the model and the method."""
    return kind(output_dir=f"{Path(name_of(model)).name or 'model'}-{method.title}", **settings)


def tokenizer_of(
    model: ModelLike, given: PreTrainedTokenizerBase | None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the given tokenizer, or load that of a model.

    Raises:
        UserError: it cannot be loaded, or it is unknown where a loaded model came from.
    """
    if given is not None:
        return given
    if isinstance(model, SentenceTransformer):
        tokenizer: PreTrainedTokenizerBase = model.tokenizer
        return tokenizer
    if not (name := name_of(model)):
        raise UserError(
            f"cannot find the tokenizer of this {type(model).__name__}, which was not loaded from a folder or id: pass it as well"
        )
    # If the model is given by name, the caller is loading it too and reports errors.
    by_name = isinstance(model, str | Path)
    with nullcontext() if by_name else loading(f"cannot load the tokenizer of {name!r}", name):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    return tokenizer


def prepared_rows(rows: Any, columns: Sequence[str], args: RunArguments, build: Callable[[Source], Dataset]) -> Any:  # noqa: ANN401 (any data set, or None)
    """Return rows for the collator.

    Args:
        rows: a `Dataset` or `IterableDataset` of prepared rows or of raw text; anything else is returned unchanged.
        columns: columns of prepared rows.
        args: training arguments.
        build: prepares raw text.

    Raises:
        UserError: the rows have other columns, or `build` fails.
    """
    rows = as_dataset(rows)
    if not isinstance(rows, Dataset) or set(columns) <= set(rows.column_names):
        return rows
    if getattr(rows.features.get("text"), "dtype", None) not in ("string", "large_string"):
        raise wrong_columns(rows, f"text (one string in each row, raw text) or {', '.join(columns)} (prepared rows)")
    with args.main_process_first(desc="preparing the text"):
        return build(Source(f"{HUB_PREFIX}train_dataset", rows=rows))


def as_dataset(rows: Any) -> Any:  # noqa: ANN401 (any data set, or None)
    """Return rows with a length: those of an `IterableDataset` are written to disk (`stream_rows`).

    Raises:
        UserError: A data set with several splits; a stream that cannot be read or has no rows; a full disk.
    """
    if isinstance(rows, DatasetDict | IterableDatasetDict):
        raise UserError(f"train_dataset has the splits {', '.join(rows)}: pass one of them, such as dataset['train']")
    if not isinstance(rows, IterableDataset):
        return rows
    logger.warning("train_dataset is a stream: writing its rows to disk; train_dataset.take(N) limits their number")
    written = stream_rows(rows, "train_dataset")
    logger.warning("%s rows in %s", f"{len(written):,}", Path(written.cache_files[0]["filename"]).parent)
    return written


def wrong_columns(rows: Dataset, wanted: str) -> UserError:
    """Return an error that lists the columns of a data set and those needed."""
    return UserError(f"train_dataset has the columns {', '.join(rows.column_names)}; it needs {wanted}")
