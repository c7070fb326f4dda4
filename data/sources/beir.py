"""Reading and writing BEIR folders: corpus.jsonl, queries.jsonl and qrels/<split>.tsv, each plain or .gz; and queries without judgements."""

import json
import logging
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from revela_hub.data.sources.report import counted
from revela_hub.data.sources.rows import QRELS_HEADER, file_rows, has_rows, id_text, location, qrels_rows, text_lines
from revela_hub.data.sources.source import Source
from revela_hub.data.text.same_text import text_key
from revela_hub.errors import UserError
from revela_hub.files import local_path

logger = logging.getLogger(__name__)

QUERY_COLUMNS = ("text", "query", "question", "anchor")
"""Columns of JSON lines and tables that may hold the query, the first one present."""


@dataclass(frozen=True)
class RetrievalTask:
    """A corpus, queries, and relevance judgements.

    Attributes:
        corpus: Document id to text.
        queries: Query id to text; only queries with judgements.
        qrels: Query id to document id to grade (0 means judged as not relevant).
        name: The name shown in tables.
        groups: Query id to the document that the query was made from, if several queries may share one. In a BEIR folder, it is
            `metadata.document` of the query.
    """

    corpus: dict[str, str]
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    name: str
    groups: dict[str, str] = field(default_factory=dict)

    def subset(self, queries: Iterable[str], name: str | None = None) -> "RetrievalTask":
        """Return the task with these of its queries and the whole corpus, under another name if one is given."""
        texts = {query: self.queries[query] for query in queries}
        return replace(self, queries=texts, qrels={query: self.qrels[query] for query in texts}, name=name or self.name)


def beir_files(folder: str | Path, split: str) -> tuple[Path, ...]:
    """Return the files of a BEIR folder, each plain or .gz: corpus, queries and judgements."""
    if (splits := beir_splits(folder)) and split not in splits:
        raise UserError(f"no split {split!r} in {local_path(folder) / 'qrels'}; the splits are {', '.join(splits)}")
    return tuple(find_file(folder, name) for name in ("corpus.jsonl", "queries.jsonl", f"qrels/{split}.tsv"))


def beir_splits(folder: str | Path) -> list[str]:
    """Return the splits of a BEIR folder; an empty list for any other folder."""
    return sorted({path.name.split(".tsv")[0] for path in local_path(folder).glob("qrels/*.tsv*")})


def is_beir(folder: str | Path) -> bool:
    """Whether a folder has the queries of a BEIR folder."""
    return _plain_or_gzipped(local_path(folder) / "queries.jsonl") is not None


def find_file(folder: str | Path, name: str) -> Path:
    """Return the file with this name in a BEIR folder, plain or .gz."""
    if path := _plain_or_gzipped(local_path(folder) / name):
        return path
    raise UserError(f"no {name} (or {name}.gz) in {folder}: a BEIR folder has corpus.jsonl, queries.jsonl and qrels")


def _plain_or_gzipped(path: Path) -> Path | None:
    return next((file for file in (path, path.with_name(f"{path.name}.gz")) if file.is_file()), None)


def read_beir(folder: str | Path, split: str = "test") -> RetrievalTask:
    """Read a BEIR folder.

    As in BEIR, title and text are joined by a space, and only queries with judgements in the split are kept. Judged
    documents that are missing from the corpus are kept in the qrels (they count as not retrieved); judgements of unknown
    queries are dropped. Both are logged as warnings, and so are empty texts.

    Raises:
        UserError: A file is missing, a line is invalid (the message has file and line), judgements contradict each other,
            or no document of the corpus is relevant.
    """
    corpus_file, queries_file, qrels_file = beir_files(folder, split)
    judged = read_qrels(qrels_file)
    asked = dict(_entries(queries_file, judged))
    queries = {id_: entry["text"] for id_, entry in asked.items()}
    corpus = {id_: titled(entry.get("title"), entry["text"]) for id_, entry in _entries(corpus_file)}
    qrels = {query: grades for query, grades in judged.items() if query in queries}
    documents = {document for grades in judged.values() for document in grades}
    for file, ids, words in (
        (qrels_file, judged.keys() - queries.keys(), "missing from the queries file (skipped)"),
        (qrels_file, documents - corpus.keys(), "missing from the corpus (counted as not retrieved)"),
        (queries_file, [query for query, text in queries.items() if not text.strip()], "empty"),
        (corpus_file, [document for document, text in corpus.items() if not text.strip()], "empty"),
    ):
        if ids:
            logger.warning("%s: %s %s (first: %s)", file, counted(len(ids), "id"), words, min(ids))
    if not any(grade > 0 and document in corpus for grades in qrels.values() for document, grade in grades.items()):
        raise UserError(f"no document of {corpus_file} is relevant to a query of {queries_file} in {qrels_file}")
    metadata = {id_: entry.get("metadata") for id_, entry in asked.items()}
    groups = {id_: str(made["document"]) for id_, made in metadata.items() if made and "document" in made}
    return RetrievalTask(corpus, queries, qrels, f"{Path(folder).resolve().name}/{split}", groups)


def read_beir_pairs(folder: str | Path, split: str) -> Iterator[tuple[str, str]]:
    """Read pairs of a query and a relevant document (grade above 0) from a BEIR folder.

    Memory holds these documents, not the whole corpus.
    """
    corpus_file, queries_file, qrels_file = beir_files(folder, split)
    qrels = read_qrels(qrels_file)
    wanted = {document for judged in qrels.values() for document, grade in judged.items() if grade > 0}
    documents = {id_: titled(entry.get("title"), entry["text"]) for id_, entry in _entries(corpus_file, wanted)}
    if missing := len(wanted) - len(documents):
        logger.warning("%s: skipped %s missing from the corpus", qrels_file, counted(missing, "judged document"))
    for id_, query in _entries(queries_file, qrels):
        found = (documents[name] for name, grade in qrels[id_].items() if grade > 0 and name in documents)
        yield from ((query["text"], text) for text in found)


def write_beir(task: RetrievalTask, folder: str | Path, split: str = "test") -> Path:
    """Write a task as a BEIR folder, which `read_beir`, `revela-hub evaluate` and other programs read."""
    folder = local_path(folder)
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    texts = {"corpus.jsonl": task.corpus, "queries.jsonl": task.queries}
    for name, entries in texts.items():
        with (folder / name).open("w", encoding="utf-8") as file:
            for id_, text in entries.items():
                document = task.groups.get(id_) if entries is task.queries else None
                metadata = {"metadata": {"document": document}} if document else {}
                line = json.dumps({"_id": id_, "title": "", "text": text} | metadata, ensure_ascii=False)
                file.write(f"{line}\n")
    rows = [QRELS_HEADER, *([q, d, str(grade)] for q, judged in task.qrels.items() for d, grade in judged.items())]
    (folder / "qrels" / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Read judgements: query id to document id to grade."""
    qrels: dict[str, dict[str, int]] = {}
    for row in qrels_rows(path):
        query, document, grade = row.columns.values()
        before = qrels.setdefault(query, {}).setdefault(document, grade)
        if before != grade:
            raise UserError(
                f"{row.where}: query {query}, document {document} has grade {grade} here and {before} above"
            )
    return qrels


def _entries(path: Path, wanted: Container[str] | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the ids and columns of a file with texts, or only those with a wanted id."""
    seen = set[str]()
    for row in file_rows(path):
        id_, text = row.columns.get("_id"), row.columns.get("text")
        if not isinstance(id_, str | int) or not isinstance(text, str):
            raise UserError(f'{row.where}: "_id" and "text" must be strings; it has: {row.columns}')
        id_ = id_text(id_)
        if wanted is not None and id_ not in wanted:
            continue
        if id_ in seen:
            raise UserError(f'{row.where}: duplicate "_id" {id_!r}')
        seen.add(id_)
        yield id_, row.columns


def titled(title: object, text: str) -> str:
    """Join title and text with a space, as BEIR and mteb do."""
    return f"{title if isinstance(title, str) else ''} {text}".strip()


def read_queries(path: str | Path) -> dict[str, str]:
    """Read queries: id (in JSON lines the `_id`, elsewhere `file:line`) to text, without empty and repeated ones.

    They are the lines of a text file, JSON lines or a table with a column of `QUERY_COLUMNS`, or those of a BEIR folder.
    """
    place = local_path(path)
    found: dict[str, tuple[str, str]] = {}
    for id_, text in _queries(find_file(place, "queries.jsonl") if place.is_dir() else place):
        if query := " ".join(text.split()):
            found.setdefault(text_key(query), (id_, query))
    if not found:
        raise UserError(f"{path} has no queries: give a file with one query per line, JSON lines, or a BEIR folder")
    return dict(found.values())


def _queries(path: Path) -> Iterator[tuple[str, str]]:
    if not has_rows(path, Source(str(path))):
        yield from ((location(path, number), line) for number, line in text_lines(path))
        return
    for row in file_rows(path):
        column = next((name for name in QUERY_COLUMNS if name in row.columns), " or ".join(QUERY_COLUMNS))
        yield id_text(row.columns.get("_id") or row.where), row.text(column)
