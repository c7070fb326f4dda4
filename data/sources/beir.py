"""The one reader of retrieval tasks in BEIR's form: a folder with corpus.jsonl, queries.jsonl and qrels/<split>.tsv, each plain or .gz."""

import json
import logging
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import json_lines_rows, text_lines
from revela_hub.errors import UserError

logger = logging.getLogger(__name__)

_GRADE = re.compile(r"[+-]?[0-9]{1,9}")  # not all that int() takes: 1_0, and numbers too large for trec_eval
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


class BeirFiles(NamedTuple):
    """The three files of a retrieval task."""

    corpus: Path
    queries: Path
    qrels: Path


class Judgement(NamedTuple):
    """A line of the judgements, and where it stands (`test.tsv:3`)."""

    where: str
    query: str
    document: str
    grade: int


def beir_files(folder: str | Path, split: str) -> BeirFiles:
    """The files of a BEIR folder, each plain or .gz.

    Raises:
        UserError: One is missing; says what there is.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; a BEIR folder has corpus.jsonl, queries.jsonl and qrels/<split>.tsv")
    return BeirFiles(find_file(folder, "corpus.jsonl"), find_file(folder, "queries.jsonl"), _find_qrels(folder, split))


def read_beir(folder: str | Path, split: str = "test") -> RetrievalTask:
    """Reads a BEIR folder.

    As in BEIR, title and text are joined by a space and only queries judged in the split are kept. Judgements of
    documents that are not in the corpus are kept too (such a document can never be found, so the score counts it as
    missed); judgements of unknown queries are left out. Both are logged as a warning, and so are empty texts.

    Raises:
        UserError: A file is missing, a line cannot be understood (the message names file and line), judgements
            contradict each other, or none is above 0.
    """
    files = beir_files(folder, split)
    qrels = read_qrels(files.qrels)
    queries = {id_: text for id_, text in _texts(files.queries, with_titles=False) if id_ in qrels}
    corpus = dict(_texts(files.corpus))
    if not corpus:
        raise UserError(f"{files.corpus} is empty: there is nothing to search")
    _warn(files, qrels, queries, corpus)
    qrels = {query: judged for query, judged in qrels.items() if query in queries}
    if not queries:
        raise UserError(f"none of the queries judged in {files.qrels} is in {files.queries}")
    if not any(grade > 0 for judged in qrels.values() for grade in judged.values()):
        raise UserError(f"{files.qrels}: no grade is above 0: nothing answers a query, so nothing can be found")
    if not any(grade > 0 and document in corpus for judged in qrels.values() for document, grade in judged.items()):
        raise UserError(f"none of the documents that answer a query by {files.qrels} is in {files.corpus}")
    return RetrievalTask(corpus=corpus, queries=queries, qrels=qrels, name=f"{Path(folder).resolve().name}/{split}")


def read_beir_pairs(folder: str | Path, split: str) -> Iterator[tuple[str, str]]:
    """Reads a BEIR folder's judged queries with each document that answers them (a grade above 0).

    Only these documents are held in memory, not the corpus.

    Raises:
        UserError: A file is missing or damaged, or there is no such pair.
    """
    corpus, queries, qrels_file = beir_files(folder, split)
    qrels = read_qrels(qrels_file)
    wanted = {document for judged in qrels.values() for document, grade in judged.items() if grade > 0}
    documents = dict(_texts(corpus, wanted))
    if len(documents) < len(wanted):
        logger.warning(
            "%s: %d judged documents are not in the corpus, left out", qrels_file, len(wanted) - len(documents)
        )
    found = False
    for id_, query in _texts(queries, qrels, with_titles=False):
        for document, grade in qrels[id_].items():
            if grade > 0 and document in documents:
                found = True
                yield query, documents[document]
    if not found:
        raise UserError(f"none of the judgements in {qrels_file} joins a query in {queries} to a document in {corpus}")


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


def is_beir(folder: str | Path) -> bool:
    """Whether a folder has the queries of a BEIR folder."""
    return _plain_or_gzipped(Path(folder).expanduser() / "queries.jsonl") is not None


def find_file(folder: str | Path, name: str) -> Path:
    """The file of that name in a BEIR folder, plain or .gz.

    Raises:
        UserError: There is neither.
    """
    folder = Path(folder).expanduser()
    if path := _plain_or_gzipped(folder / name):
        return path
    there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise UserError(f"no {name} (or {name}.gz) in {folder}, which has: {there}")


def _plain_or_gzipped(path: Path) -> Path | None:
    return next((file for file in (path, path.with_name(f"{path.name}.gz")) if file.is_file()), None)


def _find_qrels(folder: Path, split: str) -> Path:
    if path := _plain_or_gzipped(folder / "qrels" / f"{split}.tsv"):
        return path
    if splits := beir_splits(folder):
        raise UserError(
            f"no split {split!r} in {folder / 'qrels'}; there is: {', '.join(splits)}", split="choose with --split"
        )
    raise UserError(f"no qrels/{split}.tsv in {folder}: a BEIR folder keeps its judgements there")


def beir_splits(folder: str | Path) -> list[str]:
    """The splits of a BEIR folder; none of another folder."""
    return sorted({path.name.split(".tsv")[0] for path in Path(folder).glob("qrels/*.tsv*")})


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Query id to the judged documents, document id to grade.

    Raises:
        UserError: A line that is not a judgement, or contradicts one before it.
    """
    qrels: dict[str, dict[str, int]] = {}
    for where, query, document, grade in read_judgements(path):
        before = qrels.setdefault(query, {}).setdefault(document, grade)
        if before != grade:
            raise UserError(f"{where}: query {query}, document {document} has grade {grade} here and {before} above")
    if not qrels:
        raise UserError(f"{path} has no judgements")
    return qrels


def read_judgements(path: Path) -> Iterator[Judgement]:
    """The lines of a file of judgements, one by one.

    Raises:
        UserError: A line that is not a judgement, or a file that is damaged.
    """
    report, header = ReadReport(), True
    for where, line in text_lines(path, report):
        fields = [field.strip() for field in line.rstrip("\r\n").split("\t")]
        if header:
            header = False
            if fields != QRELS_HEADER:
                raise UserError(f"{where}: the first line must be the header {'<tab>'.join(QRELS_HEADER)}")
            continue
        if len(fields) != 3:
            raise UserError(f"{where}: {len(fields)} fields, not 3 (query, document, grade) between tabs")
        query, document, grade = fields
        if not query or not document:
            raise UserError(f"{where}: the id of the {'document' if query else 'query'} is empty")
        if not _GRADE.fullmatch(grade):
            raise UserError(f"{where}: the grade {grade!r} is not a whole number of at most 9 digits")
        yield Judgement(where, query, document, int(grade))
    if report.replaced:
        raise UserError(f"{path}: not UTF-8 text; ids that were changed join nothing")


def _texts(path: Path, wanted: Container[str] | None = None, *, with_titles: bool = True) -> Iterator[tuple[str, str]]:
    """The ids and texts of a file, or of those that are wanted."""
    report, seen = ReadReport(), set[str]()
    for row in json_lines_rows(path, report):
        id_, text = row.columns.get("_id"), row.columns.get("text")
        if not isinstance(id_, (str, int)) or isinstance(id_, bool):
            raise UserError(f'{row.where}: no "_id" (a string); it has: {", ".join(row.columns) or "nothing"}')
        if not isinstance(text, str):
            has = f'its "text" is {_json_type(text)}' if "text" in row.columns else f"it has: {', '.join(row.columns)}"
            raise UserError(f'{row.where}: no "text" (a string); {has}')
        title = row.columns.get("title") or ""
        if not isinstance(title, str):
            raise UserError(f'{row.where}: "title" is not a string')
        if wanted is not None and str(id_) not in wanted:
            continue
        if str(id_) in seen:
            raise UserError(f'{row.where}: the "_id" {str(id_)!r} was there before')
        seen.add(str(id_))
        yield str(id_), titled(title, text) if with_titles else text
    if report.replaced:
        raise UserError(f"{path}: not UTF-8 text; a task whose texts are not what was judged measures nothing")


def titled(title: object, text: str) -> str:
    """A passage as BEIR and mteb show it to a model, so that the numbers are the same: its title, a space, its text."""
    return f"{title if isinstance(title, str) else ''} {text}".strip()


def _json_type(value: object) -> str:
    return {type(None): "null", list: "a list", dict: "an object"}.get(type(value), "a number")


def _warn(files: BeirFiles, qrels: dict[str, dict[str, int]], queries: dict[str, str], corpus: dict[str, str]) -> None:
    unknown = [query for query in qrels if query not in queries]
    missing = {document for judged in qrels.values() for document in judged if document not in corpus}
    empty = [[id_ for id_, text in texts.items() if not text.strip()] for texts in (queries, corpus)]
    for file, ids, what in (
        (files.qrels, unknown, "judged queries are not in the queries, left out"),
        (files.qrels, sorted(missing), "judged documents are not in the corpus, counted as not found"),
        (files.queries, empty[0], "queries are empty, and find nothing in particular"),
        (files.corpus, empty[1], "documents are empty"),
    ):
        if ids:
            logger.warning("%s: %d %s (%s)", file, len(ids), what, ids[0])
