"""The rows of a source: JSON lines, a data set (`hf:...`), or the judgements of a BEIR folder."""

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from revela_hub.data.sources.beir import read_judgements
from revela_hub.data.sources.documents import check_exists, source_files
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import JSON_LINES, Row, dataset_rows, json_lines_rows
from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.errors import UserError

logger = logging.getLogger(__name__)

_JUDGEMENTS = (".tsv", ".tsv.gz")


def read_rows(source: Source) -> Iterator[Row]:
    """Streams the rows of a source, `max_documents` at most; of judgements those above 0.

    Other files in a folder are skipped, with a warning.

    Raises:
        UserError: There is nothing to read, or it cannot be read.
    """
    rows = dataset_rows(source) if source.is_dataset else _file_rows(source)
    return islice(rows, source.max_documents)


def _file_rows(source: Source) -> Iterator[Row]:
    check_exists(source)
    files = list(source_files(source, ReadReport()))
    readable = [path for path in files if path.name.endswith(JSON_LINES) or _is_judgements(path)]
    if not readable:
        forms = f"{', '.join(JSON_LINES)}, a BEIR folder, or a data set ({HUB_PREFIX}csv with data_files, ...)"
        raise UserError(f"{source.path}: rows are read from {forms}")
    if skipped := len(files) - len(readable):
        logger.warning("%s: skipped %d files that are not JSON lines", source.path, skipped)
    for path in readable:
        if not _is_judgements(path):
            yield from json_lines_rows(path, ReadReport())
            continue
        for where, query, document, grade in read_judgements(path):
            if grade > 0:
                yield Row(where, {"query-id": query, "corpus-id": document, "score": grade})


def _is_judgements(path: Path) -> bool:
    return path.parent.name == "qrels" and path.name.endswith(_JUDGEMENTS)
