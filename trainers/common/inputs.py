"""The inputs of a trainer's constructor, in trl's form: models by name or loaded, rows that are raw or prepared."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.errors import UserError, loading
from revela_hub.hub_cards.method import Method
from revela_hub.trainers.common.arguments import RunArguments

ModelLike: TypeAlias = str | Path | PreTrainedModel | SentenceTransformer
"""A Hub id, a folder, or a loaded model."""

_Arguments = TypeVar("_Arguments", bound=RunArguments)


def unwrapped(model: ModelLike) -> str | PreTrainedModel:
    """The id or folder, or the transformers model inside of a loaded one."""
    if isinstance(model, SentenceTransformer):
        transformer: Any = model[0]
        inner: PreTrainedModel = transformer.auto_model
        return inner
    return str(model) if isinstance(model, Path) else model


def name_of(model: ModelLike) -> str:
    """The id or folder of a model, or of the one that a loaded model was made of; "" where that is not known."""
    given = unwrapped(model)
    if isinstance(given, str):
        return given
    config: Any = given.config
    parts = [getattr(config, name, None) for name in ("retriever", "encoder", "backbone", "text_config")]
    names = [getattr(part, "_name_or_path", "") for part in (config, *parts)]
    return next((str(name) for name in names if name), "")


def default_arguments(kind: type[_Arguments], model: ModelLike, method: Method, **settings: Any) -> _Arguments:
    """Arguments for a run without any: its output folder is named after the model and the method."""
    return kind(output_dir=f"{Path(name_of(model)).name or 'model'}-{method.title}", **settings)


def tokenizer_of(
    model: ModelLike, given: PreTrainedTokenizerBase | None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer that is given, or that of a model.

    Raises:
        UserError: it cannot be loaded, or a loaded model does not say where it came from.
    """
    if given is not None:
        return given
    if isinstance(model, SentenceTransformer):
        tokenizer: PreTrainedTokenizerBase = model.tokenizer
        return tokenizer
    if not (name := name_of(model)):
        raise UserError(
            f"this {type(model).__name__} does not say which folder or id it was loaded from: give its tokenizer, too"
        )
    # By its name the model itself is being loaded, and the caller says so.
    of_a_name = isinstance(model, str | Path)
    with nullcontext() if of_a_name else loading(f"cannot load the tokenizer of {name!r}", name):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    return tokenizer


def prepared_rows(rows: Any, columns: Sequence[str], args: RunArguments, build: Callable[[Source], Dataset]) -> Any:  # noqa: ANN401 (any data set, or None)
    """Rows as a collator reads them.

    Args:
        rows: of a `Dataset`: prepared rows, which stay as they are, or raw ones, each a text; of anything else they stay.
        columns: those by which prepared rows are known.
        args: of the run.
        build: makes prepared rows of raw ones.

    Raises:
        UserError: the rows are neither, or what `build` raises.
    """
    check_split(rows)
    if not isinstance(rows, Dataset) or set(columns) <= set(rows.column_names):
        return rows
    if getattr(rows.features.get("text"), "dtype", None) not in ("string", "large_string"):
        raise wrong_columns(rows, f"text (one string in each row, raw text) or {', '.join(columns)} (prepared rows)")
    with args.main_process_first(desc="preparing the text"):
        return build(Source(f"{HUB_PREFIX}train_dataset", rows=rows))


def check_split(rows: Any) -> None:
    """Refuses a data set of several splits.

    Raises:
        UserError: it is one.
    """
    if isinstance(rows, DatasetDict):
        raise UserError(f"train_dataset has the splits {', '.join(rows)}: give one of them, such as dataset['train']")


def wrong_columns(rows: Dataset, wanted: str) -> UserError:
    """An error that says which columns there are, and which are needed."""
    return UserError(f"train_dataset has the columns {', '.join(rows.column_names)}; it needs {wanted}")
