"""What can be read, and what it is read into.

A source is written as a string (a file, a folder, a glob pattern, or `hf:` and a data set), or in YAML as a mapping with
the fields of `Source`:

    data:
      - docs/                                  # a folder, with everything below it
      - "notes/**/*.md"                        # a glob pattern
      - corpus.jsonl.gz                        # JSON lines
      - hf:HuggingFaceFW/fineweb-edu:sample-10BT:train       # a data set of the Hub: name, configuration, split
      - {path: "hf:owner/name", split: train, text_column: body, kind: code}
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

Kind: TypeAlias = Literal["text", "code"]

HUB_PREFIX = "hf:"


@dataclass(frozen=True)
class Document:
    """One document as it was read.

    Attributes:
        id: Names it in groups and in search results: the path of a file, the `_id` of a row.
        text: All of it, unchanged.
        path: The file that it is, or None for a row of a larger file.
        kind: How it is cut into chunks: `"text"` at the ends of sentences, `"code"` at the ends of lines.
        first_line: The line of the file, from 1, on which the text begins.
    """

    id: str
    text: str
    path: str | None
    kind: Kind
    first_line: int = 1


@dataclass(frozen=True)
class Source:
    """One place to read documents from.

    Attributes:
        path: A file, a folder, a glob pattern, or `hf:` followed by a data set's Hub id or folder (or by the name of a
            loader such as `json`, for `data_files`).
        name: A data set's configuration.
        split: A data set's split.
        revision: A data set's branch, tag or commit.
        data_files: Which of a data set's files to read, as `datasets.load_dataset` takes them.
        text_column: The column (JSON lines: field) with the text; several are joined by an empty line.
        title_column: The column with the title, which goes before the text. None: `title`, where there is one; `""`: none.
        id_column: The column with the document's id. None: `_id`, where there is one; `""`: none, number the rows.
        merge_column: Rows in succession that agree in this column are the parts of one document (a corpus of passages).
        kind: `"text"` or `"code"`. None: by the file's extension, and text for rows.
        exclude: Patterns of file and folder names that are not read (`*.min.js`, `tests`, `docs/old/*`).
        max_documents: Stop after as many documents.
        max_file_mib: Files that are larger are not read (they are held in memory whole; JSON lines are not).
        held_out: A probe's folder, or its `held_out.jsonl`: what its queries say is taken out of the documents.
        rows: A data set that is open already, of which `path` is only the name.
    """

    path: str
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    data_files: str | tuple[str, ...] | None = None
    text_column: str | tuple[str, ...] = "text"
    title_column: str | None = None
    id_column: str | None = None
    merge_column: str | None = None
    kind: Kind | None = None
    exclude: tuple[str, ...] = ()
    max_documents: int | None = None
    max_file_mib: int = 64
    held_out: str | None = None
    rows: "Dataset | None" = field(default=None, repr=False, compare=False)

    @property
    def is_dataset(self) -> bool:
        """Whether `datasets` reads it."""
        return self.path.startswith(HUB_PREFIX)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The names in `text_column`."""
        return (self.text_column,) if isinstance(self.text_column, str) else self.text_column


SourceLike: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Source

_DATASET_FIELDS = ("name", "split", "revision", "data_files")


def parse_source(source: SourceLike, **defaults: Any) -> Source:
    """Reads one source as it is written on a command line or in a YAML file.

    Args:
        source: A path, a pattern, `hf:dataset[:configuration][:split]`, or a mapping with the fields of `Source`.
        defaults: Fields of `Source` for what the source itself does not say.

    Raises:
        UserError: A mapping without `path` or with a field that there is not, a wrong kind, or a data set's field on files.
    """
    if isinstance(source, Source):
        return source
    given = dict(source) if isinstance(source, Mapping) else {"path": fspath(source)}
    known = [each.name for each in fields(Source) if each.name != "rows"]
    unknown = [str(key) for key in given if key not in known]
    if unknown or not isinstance(given.get("path"), str) or not given["path"]:
        problem = f"no such field as {', '.join(unknown)}" if unknown else "it needs a path"
        raise UserError(f"source {given}: {problem}; the fields are {', '.join(known)}")
    values: dict[str, Any] = {**defaults, **given}
    for key, value in values.items():
        if isinstance(value, list) or key == "exclude":
            values[key] = (value,) if isinstance(value, str) else tuple(value)
    if values.get("kind") not in (None, "text", "code"):
        raise UserError(f"source {given['path']}: kind is {values['kind']!r}; it must be text or code")
    parsed = Source(**values)
    if parsed.is_dataset:
        return _with_dataset_parts(parsed)
    misplaced = [name for name in _DATASET_FIELDS if name in given]
    if misplaced:
        remedy = f"write path: {HUB_PREFIX}{parsed.path} if it is one"
        raise UserError(f"source {parsed.path}: {', '.join(misplaced)} is for a data set; {remedy}")
    return parsed


def _with_dataset_parts(source: Source) -> Source:
    """`hf:owner/name:configuration:split` -> the three, where `hf:owner/name::split` leaves the configuration out."""
    path, *parts = source.path.removeprefix(HUB_PREFIX).split(":")
    if not path or len(parts) > 2:
        raise UserError(f"source {source.path}: a data set is written {HUB_PREFIX}owner/name[:configuration][:split]")
    name, split = (*parts, "", "")[:2]
    return replace(
        source, path=HUB_PREFIX + path, name=source.name or name or None, split=source.split or split or None
    )


def parse_sources(sources: SourceLike | Iterable[SourceLike], **defaults: Any) -> list[Source]:
    """Reads a list of sources; see `parse_source`.

    Raises:
        UserError: There is none, or one of them is not well written.
    """
    if isinstance(sources, str | PathLike | Mapping | Source):
        sources = [sources]
    parsed = [parse_source(source, **defaults) for source in sources]
    if not parsed:
        raise UserError("no data: name a folder, a file, a pattern or a data set (hf:owner/name)")
    return parsed
