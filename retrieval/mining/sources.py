"""The input of `revela-hub mine`: pairs and a corpus from JSON lines and data sets, read row by row."""

from collections.abc import Iterator
from dataclasses import replace

from revela_hub.data.sources.beir import find_file, is_beir
from revela_hub.data.sources.rows import read_rows
from revela_hub.data.sources.source import SourceLike, parse_source
from revela_hub.retrieval.mining.pairs import TitledText


def read_pairs(source: SourceLike, anchor_column: str, positive_column: str) -> Iterator[tuple[str, str]]:
    """Read pairs; a list of positives makes one pair each, and null counts as an empty text."""
    for row in read_rows(parse_source(source)):
        anchor = row.text(anchor_column)
        yield from ((anchor, positive) for positive in row.texts(positive_column))


def read_corpus(source: SourceLike, text_column: str) -> Iterator[str]:
    """Read the texts of a corpus or of the corpus in a BEIR folder; a title is joined to its text as in BEIR.

    Titles are in the source's `title_column`, by default `title`.
    """
    parsed = parse_source(source)
    if not parsed.is_dataset and is_beir(parsed.path):
        parsed = replace(parsed, path=str(find_file(parsed.path, "corpus.jsonl")))
    name = "title" if parsed.title_column is None else parsed.title_column
    for row in read_rows(parsed):
        text = row.text(text_column)
        title = row.value(name) if parsed.title_column else row.columns.get(name)
        yield TitledText(title, text) if title and text_column != name else text
