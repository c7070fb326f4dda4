"""Retrieval tasks in BEIR's form: a folder with corpus.jsonl, queries.jsonl and qrels/<split>.tsv, each plain or .gz."""

import gzip
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from revela_hub.errors import UserError

logger = logging.getLogger(__name__)

QRELS_HEADER = ["query-id", "corpus-id", "score"]


@dataclass(frozen=True)
class RetrievalTask:
    """A corpus, queries, and which documents answer them.

    Attributes:
        corpus: Document id to text.
        queries: Query id to text; only queries that have judgements.
        qrels: Query id to the judged documents, document id to grade (0 is "judged, not relevant").
        name: What tables call it.
    """

    corpus: dict[str, str]
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    name: str


def read_beir(folder: str | Path, split: str = "test") -> RetrievalTask:
    """Reads a BEIR folder.

    As in BEIR, title and text are joined by a space and only queries judged in the split are kept. Judgements of
    documents that are not in the corpus are kept too (such a document can never be found, so the score counts it as
    missed); judgements of unknown queries are left out. Both are logged as a warning.

    Raises:
        UserError: A file is missing, or a line cannot be understood; the message names file and line.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; a BEIR folder has corpus.jsonl, queries.jsonl and qrels/<split>.tsv")
    corpus_file, queries_file = find_file(folder, "corpus.jsonl"), find_file(folder, "queries.jsonl")
    qrels_file = find_qrels(folder, split)
    qrels = read_qrels(qrels_file)
    queries = {id_: record for id_, record in _read_texts(queries_file, with_title=False) if id_ in qrels}
    corpus = dict(_read_texts(corpus_file, with_title=True))
    if not corpus:
        raise UserError(f"{corpus_file} is empty: there is nothing to search")
    _report_unknown(qrels_file, qrels, queries, corpus)
    qrels = {query: judged for query, judged in qrels.items() if query in queries}
    if not queries:
        raise UserError(f"none of the queries judged in {qrels_file} is in {queries_file}")
    return RetrievalTask(corpus=corpus, queries=queries, qrels=qrels, name=f"{folder.resolve().name}/{split}")


def write_beir(task: RetrievalTask, folder: str | Path, split: str = "test") -> Path:
    """Writes a task as a BEIR folder, which `read_beir`, `revela-hub evaluate` and other programs read."""
    folder = Path(folder)
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    texts = {"corpus.jsonl": task.corpus, "queries.jsonl": task.queries}
    for name, entries in texts.items():
        lines = (
            json.dumps({"_id": id_, "title": "", "text": text}, ensure_ascii=False) for id_, text in entries.items()
        )
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    rows = [QRELS_HEADER, *([q, d, str(grade)] for q, judged in task.qrels.items() for d, grade in judged.items())]
    (folder / "qrels" / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def find_file(folder: Path, name: str) -> Path:
    """The file of that name in a BEIR folder, plain or .gz.

    Raises:
        UserError: There is neither.
    """
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise UserError(f"no {name} (or {name}.gz) in {folder}, which has: {there}")


def find_qrels(folder: Path, split: str) -> Path:
    """The file of a split's judgements, plain or .gz.

    Raises:
        UserError: There is none; says which splits there are.
    """
    for path in (folder / "qrels" / f"{split}.tsv", folder / "qrels" / f"{split}.tsv.gz"):
        if path.is_file():
            return path
    splits = sorted({path.name.split(".tsv")[0] for path in folder.glob("qrels/*.tsv*")})
    if not splits:
        raise UserError(f"no qrels/{split}.tsv in {folder}: a BEIR folder keeps its judgements there")
    raise UserError(f"no split {split!r} in {folder / 'qrels'}; there is: {', '.join(splits)} (choose with --split)")


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The non-empty lines of a file with their numbers, counted from 1."""
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text after line {number} ({error.reason})") from error
    except (EOFError, OSError) as error:  # a gzip file that is cut off, or is none
        raise UserError(f"{path}: cannot be read after line {number} ({error})") from error


def _read_texts(path: Path, *, with_title: bool) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for number, line in _lines(path):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
        id_, text = _record_fields(record, f"{path}, line {number}")
        if id_ in seen:
            raise UserError(f'{path}, line {number}: the "_id" {id_!r} was there before')
        seen.add(id_)
        # As mteb does it, so that the numbers are the same.
        yield id_, f"{record.get('title') or ''} {text}".strip() if with_title else text


def _record_fields(record: Any, where: str) -> tuple[str, str]:
    if not isinstance(record, dict):
        raise UserError(f'{where}: a JSON object with "_id" and "text" is needed, not {type(record).__name__}')
    id_, text = record.get("_id"), record.get("text")
    if not isinstance(id_, (str, int)) or isinstance(id_, bool):
        raise UserError(f'{where}: no "_id" (a string); it has: {", ".join(record) or "nothing"}')
    if not isinstance(text, str):
        raise UserError(f'{where}: no "text" (a string); it has: {", ".join(record)}')
    if not isinstance(record.get("title") or "", str):
        raise UserError(f'{where}: "title" is not a string')
    return str(id_), text


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Query id to the judged documents, document id to grade.

    Raises:
        UserError: A line that is not a judgement.
    """
    qrels: dict[str, dict[str, int]] = {}
    for position, (number, line) in enumerate(_lines(path)):
        fields = line.rstrip("\r\n").split("\t")
        if position == 0:
            if [field.strip() for field in fields] != QRELS_HEADER:
                header = "<tab>".join(QRELS_HEADER)
                raise UserError(f"{path}, line {number}: the first line must be the header {header}")
            continue
        if len(fields) != 3:
            raise UserError(f"{path}, line {number}: {len(fields)} fields, not 3 (query, document, grade) between tabs")
        query, document, grade = (field.strip() for field in fields)
        try:
            qrels.setdefault(query, {})[document] = int(grade)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: the grade {grade!r} is not a whole number") from error
    if not qrels:
        raise UserError(f"{path} has no judgements")
    return qrels


def _report_unknown(
    path: Path, qrels: dict[str, dict[str, int]], queries: dict[str, str], corpus: dict[str, str]
) -> None:
    unknown = [query for query in qrels if query not in queries]
    if unknown:
        logger.warning("%s: %d judged queries are not in the queries, left out (%s)", path, len(unknown), unknown[0])
    missing = {document for judged in qrels.values() for document in judged if document not in corpus}
    if missing:
        logger.warning(
            "%s: %d judged documents are not in the corpus, counted as not found (%s)", path, len(missing), min(missing)
        )
