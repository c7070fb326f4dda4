"""What `revela-hub mine` reads: pairs and a corpus from JSON lines, data sets and BEIR folders, row by row."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from revela_hub.data.sources.beir import beir_files, find_file, read_qrels
from revela_hub.data.sources.documents import source_files
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import JSON_LINES, Row, dataset_rows, json_lines_rows
from revela_hub.data.sources.source import Source, SourceLike, parse_source
from revela_hub.errors import UserError

logger = logging.getLogger(__name__)


def read_pairs(source: SourceLike, anchor_column: str, positive_column: str) -> Iterator[tuple[str, str]]:
    """Reads pairs; a positive may be a list, each of whose texts makes a pair. What is null is an empty text.

    Raises:
        UserError: There is no such source, a column is not there, or holds something else than text.
    """
    for row in _rows(parse_source(source)):
        anchor = _text(row, anchor_column, "--anchor-column")
        value = row.columns.get(positive_column)
        for positive in value if isinstance(value, list) else [value]:
            columns = {**row.columns, positive_column: positive} if positive_column in row.columns else row.columns
            yield anchor, _text(Row(row.where, columns), positive_column, "--positive-column")


def read_corpus(source: SourceLike, text_column: str) -> Iterator[str]:
    """Reads the texts of a corpus, with the title before the text where there is one, as BEIR joins them.

    A BEIR folder is read as the corpus that is in it.

    Raises:
        UserError: There is no such source, a column is not there, or holds something else than text.
    """
    parsed = parse_source(source)
    folder = Path(parsed.path).expanduser()
    if not parsed.is_dataset and folder.is_dir() and (folder / "queries.jsonl").exists():
        parsed = parse_source(find_file(folder, "corpus.jsonl"))
    for row in _rows(parsed):
        yield _document(row, text_column)


def read_beir_pairs(folder: str | Path, split: str) -> Iterator[tuple[str, str]]:
    """Reads a BEIR folder's judged queries with each document that answers them (a grade above 0).

    Only these documents are held in memory, not the corpus.

    Raises:
        UserError: A file is missing or damaged, or there is no such pair.
    """
    corpus, queries, qrels_file = beir_files(folder, split)
    qrels = read_qrels(qrels_file)
    wanted = {document for judged in qrels.values() for document, grade in judged.items() if grade > 0}
    documents = {id_: _document(row, "text") for row in _rows(parse_source(corpus)) if (id_ := _id(row)) in wanted}
    if len(documents) < len(wanted):
        logger.warning(
            "%s: %d judged documents are not in the corpus, left out", qrels_file, len(wanted) - len(documents)
        )
    found = False
    for row in _rows(parse_source(queries)):
        for document, grade in qrels.get(_id(row), {}).items():
            if grade > 0 and document in documents:
                found = True
                yield _text(row, "text", "text"), documents[document]
    if not found:
        raise UserError(f"none of the judgements in {qrels_file} joins a query in {queries} to a document in {corpus}")


def _rows(source: Source) -> Iterator[Row]:
    if source.is_dataset:
        yield from dataset_rows(source)
        return
    files = [path for path in source_files(source, ReadReport()) if path.name.endswith(JSON_LINES)]
    if not files:
        there = Path(source.path).expanduser().exists()
        problem = "no JSON lines (.jsonl or .jsonl.gz) there" if there else "no such file or folder"
        raise UserError(f"{source.path}: {problem}; a data set of the Hub is written hf:owner/name")
    for path in files:
        yield from json_lines_rows(path, ReadReport())


def _id(row: Row) -> str:
    return str(row.columns.get("_id"))


def _document(row: Row, text_column: str) -> str:
    title = row.columns.get("title")
    text = _text(row, text_column, "--text-column")
    # As BEIR and mteb join them, and so as `revela-hub evaluate` shows a passage to the model.
    return f"{title} {text}".strip() if isinstance(title, str) and title and text_column != "title" else text


def _text(row: Row, column: str, option: str) -> str:
    if column not in row.columns:
        columns = ", ".join(map(repr, row.columns)) or "none"
        raise UserError(f"{row.where}: no column {column!r}; the columns are {columns} (choose with {option})")
    value: Any = row.columns[column]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{row.where}: column {column!r} holds {type(value).__name__}, not text (choose with {option})")
    return value
