"""What `revela-hub mine` reads: pairs and a corpus from JSON lines and data sets, row by row."""

from collections.abc import Iterator

from revela_hub.data.sources.beir import find_file, is_beir, titled
from revela_hub.data.sources.row_files import read_rows
from revela_hub.data.sources.rows import Row, column_text, column_value
from revela_hub.data.sources.source import SourceLike, parse_source


def read_pairs(source: SourceLike, anchor_column: str, positive_column: str) -> Iterator[tuple[str, str]]:
    """Reads pairs; a positive may be a list, each of whose texts makes a pair. What is null is an empty text.

    Raises:
        UserError: There is no such source, a column is not there, or holds something else than text.
    """
    remedy = "choose with --positive_column"
    for row in read_rows(parse_source(source)):
        anchor = column_text(row, anchor_column, "choose with --anchor_column")
        value = column_value(row, positive_column, remedy)
        for positive in value if isinstance(value, list) else [value]:
            yield anchor, column_text(Row(row.where, {positive_column: positive}), positive_column, remedy)


def read_corpus(source: SourceLike, text_column: str) -> Iterator[str]:
    """Reads the texts of a corpus, with the title before the text where there is one, as BEIR joins them.

    A BEIR folder is read as the corpus that is in it.

    Raises:
        UserError: There is no such source, a column is not there, or holds something else than text.
    """
    parsed = parse_source(source)
    if not parsed.is_dataset and is_beir(parsed.path):
        parsed = parse_source(find_file(parsed.path, "corpus.jsonl"))
    for row in read_rows(parsed):
        text, title = column_text(row, text_column, "choose with --text_column"), row.columns.get("title")
        yield titled(title, text) if title and text_column != "title" else text
