"""Sources of documents, and documents.

A source is a string (a file, a folder, a glob pattern, or `hf:` and a data set), or in YAML a mapping with the fields of
`Source`:

    data:
      - docs/                                  # a folder and everything below it
      - "notes/**/*.md"                        # a glob pattern
      - corpus.jsonl.gz                        # JSON lines
      - hf:HuggingFaceFW/fineweb-edu:sample-10BT:train       # a data set of the Hub: name, configuration, split
      - hf://datasets/owner/name/data/*.parquet              # files of a data set of the Hub
      - {path: "hf:owner/name", split: train, text_column: body, kind: code}
"""

import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import unquote

from revela_hub.errors import UserError
from revela_hub.files import local_path

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Kind: TypeAlias = Literal["text", "code"]

HUB_PREFIX = "hf:"
HUB_ADDRESS = "hf://"
_ADDRESS = re.compile(r"hf://datasets/([^/@:]+/[^/@:]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?")
_DATASET = re.compile(r"hf:(?!//)([^:]+)(?::([^:]*))?(?::([^:]*))?")


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        id: Identifies it in groups and search results: the path of a file, or the `_id` of a row.
        text: The unchanged text.
        path: Its file, or None for a row of a larger file.
        kind: Determines where it is split into chunks: `"text"` at the ends of sentences, `"code"` at the ends of lines.
        first_line: The line of the file, from 1, on which the text begins.
        title: The title with which the text begins, whose words do not count in the length of a passage that is not split.
    """

    id: str
    text: str
    path: str | None
    kind: Kind
    first_line: int = 1
    title: str = ""


@dataclass(frozen=True)
class Source:
    """A source of documents.

    Attributes:
        path: A file, a folder, a glob pattern, or `hf:` followed by a data set's Hub id or folder (or by the name of a
            loader such as `json`, for `data_files`).
        name: A data set's configuration.
        split: A data set's split.
        revision: A data set's branch, tag or commit.
        data_files: The files of a data set to read, as in `datasets.load_dataset`.
        text_column: The column (JSON lines: field) with the text; several columns are joined by an empty line.
        title_column: The column with the title, which is put before the text. None: `title`, if it exists; `""`: no title.
        id_column: The column with the document's id. None: `_id`, if it exists; `""`: number the rows.
        merge_column: Consecutive rows with the same value in this column form one document (a corpus of passages).
        merge_rows: This many consecutive rows form one document (a corpus of sentences).
        kind: `"text"` or `"code"`. None: by the file's extension, and text for rows.
        exclude: Patterns of file and folder names to skip (`*.min.js`, `tests`, `docs/old/*`); paths are as in `path`, or below it.
        max_documents: Stop after this many documents.
        max_file_mib: Skip larger files, because files are read whole (JSON lines are streamed).
        held_out: A probe's folder, or its `held_out.jsonl`: the texts of its queries are removed from the documents.
        rows: An open data set; `path` is then only its name.
    """

    path: str
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    data_files: str | tuple[str, ...] | Mapping[str, Any] | None = None
    text_column: str | tuple[str, ...] = "text"
    title_column: str | None = None
    id_column: str | None = None
    merge_column: str | None = None
    merge_rows: int | None = None
    kind: Kind | None = None
    exclude: tuple[str, ...] = ()
    max_documents: int | None = None
    max_file_mib: int = 64
    held_out: str | None = None
    rows: "Dataset | IterableDataset | None" = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check settings that the reader would ignore or read in another way, without an error."""
        if self.kind not in (None, "text", "code"):
            raise UserError(f"source {self.path}: kind is {self.kind!r}; it must be text or code")
        for name in ("max_documents", "max_file_mib", "merge_rows"):
            number = getattr(self, name)
            if number is not None and not (type(number) is int and number > 0):
                raise UserError(f"source {self.path}: {name} is {number!r}; it must be a whole number above 0")

    @property
    def is_dataset(self) -> bool:
        """Whether `datasets` reads it."""
        return self.path.startswith(HUB_PREFIX)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The names in `text_column`."""
        return (self.text_column,) if isinstance(self.text_column, str) else self.text_column

    def excludes(self, path: Path, inside: Path) -> bool:
        """Return whether `exclude` matches a file or folder: its name, its path, or its path `inside` the source."""
        names = path.name, inside.as_posix(), path.as_posix()
        return any(fnmatch(name, pattern) for pattern in self.exclude for name in names)


SourceLike: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Source


def parse_source(source: SourceLike, **defaults: Any) -> Source:
    """Parse one source from a command line or a YAML file.

    Args:
        source: A path, a pattern, `hf:dataset[:configuration][:split]`, or a mapping with the fields of `Source`.
        defaults: Default values for fields of `Source`.

    Raises:
        UserError: A mapping without `path` or with an unknown field, a wrong value, or a data set that is not written as above.
    """
    if isinstance(source, Source):
        return source
    given = dict(source) if isinstance(source, Mapping) else {"path": fspath(source)}
    known = [each.name for each in fields(Source) if each.name != "rows"]
    if not given.get("path") or not given.keys() <= {*known}:
        raise UserError(f"source {given}: it needs a path, and may have the fields {', '.join(known[1:])}")
    values = {key: value for key, value in {**defaults, **given}.items() if value is not None}
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    exclude = values.get("exclude", ())
    patterns = (exclude,) if isinstance(exclude, str) else exclude
    values["exclude"] = tuple(map(posixpath.normpath, patterns))  # `tests/` and `./tests`
    if str(values["path"]).startswith(HUB_PREFIX):
        parts = _dataset_parts(values["path"])
        values = parts | values | {"path": parts["path"]}
    parsed = Source(**values)
    if not parsed.is_dataset and (other := {"name", "split", "revision", "data_files"} & values.keys()):
        raise UserError(
            f"source {parsed.path}: {', '.join(other)} is for a data set, whose path begins with {HUB_PREFIX}"
        )
    return parsed


def _dataset_parts(path: str) -> dict[str, str]:
    """Return path, configuration and split of `hf:owner/name:configuration:split`, or those of an address; `::split` omits one."""
    if found := _ADDRESS.fullmatch(path):
        name, revision, files = found.groups()
        parts = {"path": HUB_PREFIX + name, "revision": unquote(revision or ""), "data_files": files}
    elif found := _DATASET.fullmatch(path):
        name, configuration, split = found.groups()
        parts = {"path": HUB_PREFIX + os.path.expanduser(name), "name": configuration, "split": split}
    else:
        raise UserError(
            f"source {path}: a data set is written hf:owner/name[:configuration][:split], and its files"
            " hf://datasets/owner/name[@revision]/path, with patterns such as data/*.parquet"
        )
    return {key: value for key, value in parts.items() if value}


def parse_sources(sources: SourceLike | Iterable[SourceLike], **defaults: Any) -> list[Source]:
    """Parse a list of sources; see `parse_source`."""
    if isinstance(sources, str | PathLike | Mapping | Source):
        sources = [sources]
    parsed = [parse_source(source, **defaults) for source in sources]
    if not parsed:
        raise UserError("no data: pass a folder, a file, a pattern or a data set (hf:owner/name)")
    return parsed


def check_apart(sources: Iterable[Source], output: Path) -> None:
    """Check that the output is not inside the data, where the next run would read it."""
    for source in sources:
        folder, place = local_path(source.path).resolve(), output.resolve()
        if not source.is_dataset and folder.is_dir() and place.is_relative_to(folder):
            inside = place.relative_to(folder)
            if not any(source.excludes(folder / part, part) for part in (inside, *inside.parents)):
                raise UserError(f"{output} is inside the data folder {folder}: choose another one, or --exclude it")
