"""Inputs of the trainers' constructors, as in TRL: models by name or loaded, and raw or prepared data sets."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME

from revela_hub.data.row_cache import stream_rows
from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.errors import UserError, loading
from revela_hub.hub_cards.contents import read_json
from revela_hub.hub_cards.method import Method
from revela_hub.paths import local_path
from revela_hub.retrieval.encoder import model_in
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.checkpoints import RECORD
from revela_hub.trainers.base.query_route import trained_backbone, trained_transformer

logger = logging.getLogger(__name__)

ModelLike: TypeAlias = str | Path | PreTrainedModel | SentenceTransformer
"""A Hub id, a folder, or a loaded model."""

_Arguments = TypeVar("_Arguments", bound=RunArguments)
NEGATIVE = re.compile(r"negative(_[0-9]+)?")
FIRST_ROWS = 100
"""Rows of a stream without features that are read to find its columns."""


def unwrapped(model: ModelLike) -> str | PreTrainedModel:
    """Return the id or folder, or the transformers model inside a loaded one."""
    if isinstance(model, SentenceTransformer):
        if (inner := trained_backbone(model)) is None:
            kind = type(trained_transformer(model)).__name__
            raise UserError(f"the model is a {kind} model: this method needs one with a transformer")
        return inner
    if isinstance(model, str | Path):
        return os.path.expanduser(model)
    given: Any = model
    if not isinstance(given, nn.Module) or not hasattr(given, "config"):  # such as the loss module of another trainer
        kind = "missing" if given is None else f"of type {type(given).__name__}"
        raise UserError(f"the model is {kind}: pass a Hub id, a folder or a loaded model")
    return model


def model_of_run(model: ModelLike, own: str = "") -> ModelLike:
    """Return the exported model in the output folder of a run, if it needs no remote code; anything else is returned unchanged.

    Args:
        model: folder, Hub id or loaded model.
        own: model type that is loaded from the output folder itself, if its encoder is also exported alone.

    Raises:
        UserError: the folder has several models.
    """
    if not isinstance(model, str | Path) or not (folder := local_path(model)).is_dir():
        return model
    kind = read_json(folder / "config.json", {}).get("model_type", "")
    if (folder / "modules.json").is_file() or (kind and (kind == own or not (folder / RECORD).is_file())):
        return model
    models = [
        path
        for path in sorted(folder.iterdir())
        if (path / "config.json").is_file() or (path / "modules.json").is_file()
    ]
    # Without checkpoints, and without models that need remote code.
    exported = [path for path in models if not (path / TRAINER_STATE_NAME).is_file() and not any(path.rglob("*.py"))]
    if len(exported) > 1:
        raise UserError(f"{model} contains several models: pass {' or '.join(map(str, exported))}")
    return str(exported[0]) if exported else model


def retriever_of_run(model: ModelLike) -> ModelLike:
    """Return the only sentence-transformers model in the output folder of a run; else as `model_of_run`."""
    return model_of_run(model_in(str(model)) if isinstance(model, str | Path) else model)


def name_of(model: ModelLike) -> str:
    """Return the id or folder that a model was or will be loaded from; "" if unknown."""
    if isinstance(model, SentenceTransformer) and trained_backbone(model) is None:
        return str(model.model_card_data.base_model or "")
    given = unwrapped(model)
    if isinstance(given, str):
        return given
    return name_in(given.config)


def name_in(config: PreTrainedConfig) -> str:
    """Return the id or folder that the model of a configuration was or will be loaded from; "" if unknown."""
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


def prepare_datasets(given: dict[str, Any], prepare: Callable[[Any], Any]) -> None:
    """Prepare the `train_dataset` and the `eval_dataset` of a trainer, which also uses `prepare` in `evaluate` and `predict`."""
    given["train_dataset"] = prepare(given.get("train_dataset"))
    if given.get("eval_dataset") is not None:
        given["eval_dataset"] = prepare_eval_dataset(given["eval_dataset"], prepare)
    given["prepare"] = prepare


def prepare_eval_dataset(rows: Any, prepare: Callable[[Any], Any]) -> Any:
    """Prepare an `eval_dataset`, or each of a dict of them."""
    try:
        return {name: prepare(part) for name, part in rows.items()} if isinstance(rows, dict) else prepare(rows)
    except UserError as error:
        raise UserError(str(error).replace("train_dataset", "eval_dataset")) from error


def prepared_rows(
    rows: Any, columns: Sequence[str], args: RunArguments, build: Callable[..., Dataset | IterableDataset]
) -> Any:
    """Return rows for the collator. A stream stays a stream if `max_steps` is set (`training_rows`).

    Rows with these columns are prepared; raw text is prepared with `build`, a function such as `build_passages`. Anything but a
    data set is returned unchanged.

    Raises:
        UserError: the rows have other columns, or `build` fails.
    """
    rows = training_rows(rows, args)
    if not isinstance(rows, Dataset | IterableDataset) or set(columns) <= set(rows.column_names):
        return rows
    wanted = f"text (one string in each row, raw text) or {', '.join(columns)} (prepared rows)"
    if "text" not in rows.column_names:
        raise wrong_columns(rows, wanted)
    if not _is_text(kind := rows.features["text"]):
        raise UserError(f"train_dataset: the column 'text' has the type {kind}; it needs {wanted}")
    source = Source(f"{HUB_PREFIX}train_dataset", rows=rows)
    if isinstance(rows, IterableDataset):
        return build(source, streaming=True)
    try:
        with args.main_process_first(desc="preparing the text"):
            return build(source)
    except UserError as error:  # without the prefix of a data set's name
        raise UserError(error.message.replace(source.path, "train_dataset"), **error.remedies) from error


def training_rows(rows: Any, args: RunArguments) -> Any:
    """Return rows for trainers that need no length: a stream with features if `max_steps` is set, else as `as_dataset`."""
    rows = unformatted(rows)
    if not isinstance(rows, IterableDataset) or args.max_steps <= 0:
        return as_dataset(rows, ", and max_steps=N trains from the stream without writing it")
    # Every process reads the whole stream and trains on its own rows. By default, the first process would send batches to the
    # others, which have to be of the same length.
    config: Any = args.accelerator_config
    if config.dispatch_batches is None:
        config.dispatch_batches = False
    if rows.features is not None:
        return rows
    features = Dataset.from_list(first_rows(rows, FIRST_ROWS)).features
    whole = [name for name, feature in features.items() if getattr(feature, "dtype", None) == "int64"]
    return (rows.map(partial(_with_whole_numbers, whole)) if whole else rows).cast(features)


def _with_whole_numbers(names: list[str], row: dict[str, Any]) -> dict[str, Any]:
    """Return the row; raise a `UserError` if the cast to whole numbers would change a value."""
    for name in names:
        if isinstance(row[name], float) and not row[name].is_integer():
            raise UserError(
                f"train_dataset: {name} is {row[name]}, but whole numbers in the first rows: give the stream features"
                " (IterableDataset.from_generator(..., features=...))"
            )
    return row


def first_rows(stream: IterableDataset, number: int) -> list[dict[str, Any]]:
    """Return the first rows of a stream; raise a `UserError` if it has none."""
    if not (rows := list(stream.take(number))):
        raise UserError("train_dataset is a stream without rows")
    return rows


def endless(rows: IterableDataset, seed: int, buffer_size: int) -> IterableDataset:
    """Return a stream without end: after the last row it is read again, in another order.

    If the first column is the number of the row, which seeds masks, crops and orders, it keeps counting, so that they differ.
    `buffer_size` rows are shuffled together; 1 keeps the order.
    """
    shuffled = rows.shuffle(seed=seed, buffer_size=buffer_size) if buffer_size > 1 else rows
    number = next(iter(rows.features))
    numbered = getattr(rows.features[number], "dtype", None) == "int64"

    def read() -> Iterator[dict[str, Any]]:
        total = 0
        for epoch in count():
            shuffled.set_epoch(epoch)
            earlier = total
            for row in shuffled:
                yield row | {number: row[number] + earlier} if numbered else row
                total += 1

    return IterableDataset.from_generator(read, features=rows.features)


def unformatted(rows: Any) -> Any:
    """Return a data set whose rows are Python values, not those of another library (`with_format("pandas")`)."""
    own = isinstance(rows, Dataset) and rows.format["type"] in (None, "custom")
    return rows if own or not isinstance(rows, Dataset | IterableDataset) else rows.with_format(None)


def as_dataset(rows: Any, remedy: str = "") -> Any:
    """Return rows with a length: those of an `IterableDataset` are written to disk; `remedy` tells the log how to avoid that.

    Raises:
        UserError: A path or list; a data set with several splits or without rows; a stream that cannot be read or has no rows; a full disk.
    """
    if isinstance(rows, dict):
        raise UserError(f"train_dataset has the splits {', '.join(rows)}: pass one of them, such as dataset['train']")
    if rows is not None and not isinstance(rows, Dataset | IterableDataset):
        raise UserError(
            f"train_dataset is a {type(rows).__name__}, not a data set: load a file with datasets.load_dataset, a list with"
            " Dataset.from_list, and others with Dataset.from_generator or Dataset.from_pandas"
        )
    if isinstance(rows, Dataset) and not len(rows):
        raise UserError("train_dataset has no rows")
    rows = unformatted(rows)
    if not isinstance(rows, IterableDataset):
        return rows
    limit = f"train_dataset.take(N) limits their number{remedy}"
    logger.warning("train_dataset is a stream: writing its rows to disk; %s", limit)
    written = stream_rows(rows, "train_dataset")
    logger.warning("%s rows in %s", f"{len(written):,}", Path(written.cache_files[0]["filename"]).parent)
    return written


def pair_columns(rows: Dataset | IterableDataset) -> list[str]:
    """Return the text columns of labelled pairs in order: anchor, positive, and negative, negative_1, ... if there are any.

    Raises:
        UserError: anchor or positive is missing, the name of another column begins with negative, or a value is not a text or,
            except in a stream, is null or empty.
    """
    if rows is None:
        raise UserError("train_dataset is missing: give a data set with the columns anchor and positive")
    if not {"anchor", "positive"} <= set(rows.column_names):
        raise wrong_columns(rows, "anchor, positive, and for hard negatives negative_1, negative_2, ...")
    if other := [name for name in rows.column_names if name.startswith("negative") and not NEGATIVE.fullmatch(name)]:
        raise UserError(
            f"train_dataset: hard negatives are in columns negative, negative_1, negative_2, ...: rename or remove {other[0]!r}"
        )
    columns = in_order(rows.column_names)
    check_texts(rows, columns)
    if isinstance(rows, Dataset):
        number = 0
        for batch in rows.select_columns(columns).with_format("arrow").iter(batch_size=1024):
            if any(pc.any(pc.equal(pc.utf8_trim_whitespace(batch[name]), "")).as_py() for name in columns):
                for place, row in enumerate(batch.to_pylist(), start=number):
                    _check_pair(columns, row, place)
            number += len(batch)
    return columns


def checked_stream(rows: IterableDataset, columns: Sequence[str]) -> IterableDataset:
    """Return a stream of pairs that raises a `UserError` at a row with a text that is null or empty."""
    return rows.map(partial(_check_pair, columns), with_indices=True, features=rows.features)


def _check_pair(columns: Sequence[str], row: dict[str, Any], number: int) -> dict[str, Any]:
    for name in columns:
        if row[name] is None or not row[name].strip():
            raise _no_text(number, name, "null" if row[name] is None else "empty")
    return row


def refuse_single_pair(rows: Dataset | IterableDataset) -> None:
    """Raise a `UserError` for one pair without hard negatives, whose loss is always 0."""
    if isinstance(rows, Dataset) and len(rows) == 1 and len(in_order(rows.column_names)) == 2:
        raise UserError("train_dataset has one pair: training needs at least 2, or hard negatives (negative_1, ...)")


def in_order(names: Iterable[str]) -> list[str]:
    """Return the text columns of labelled pairs among these columns: anchor, positive, and negative, negative_1, ...

    >>> in_order(["id", "negative_10", "negative_2", "positive", "anchor"])
    ['anchor', 'positive', 'negative_2', 'negative_10']
    """
    negatives = filter(NEGATIVE.fullmatch, names)
    return ["anchor", "positive", *sorted(negatives, key=lambda name: int(name.partition("_")[2] or 0))]


def check_texts(rows: Dataset | IterableDataset, columns: Sequence[str]) -> None:
    """Raise a `UserError` for a column that is not text, or a null in it; nulls in a stream are not found."""
    for name in columns:
        if not _is_text(kind := rows.features[name]):
            raise UserError(f"train_dataset: the column {name!r} has the type {kind}; it needs one string in each row")
        # The table also holds rows that `select` left out.
        if isinstance(rows, Dataset) and rows.data.column(name).null_count and None in (found := list(rows[name])):
            raise _no_text(found.index(None), name, "null")


def _is_text(feature: object) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _no_text(number: int, name: str, what: str) -> UserError:
    return UserError(f"train_dataset:{number}: {name!r} is {what}; remove the row, or give it a text")


def wrong_columns(rows: Dataset | IterableDataset, wanted: str) -> UserError:
    """Return an error that lists the columns of a data set and those needed."""
    return UserError(f"train_dataset has the columns {', '.join(rows.column_names)}; it needs {wanted}")
