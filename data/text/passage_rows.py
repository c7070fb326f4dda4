"""Cutting a batch of rows into passages: a function for `ray.data.Dataset.map_batches`, which many machines run.

    import ray
    from revela_hub.data.text.passage_rows import cut_rows

    rows = ray.data.read_json("corpus/", lines=True)
    rows.map_batches(cut_rows, fn_kwargs={"max_words": 120}).write_parquet("passages")

`revela-hub encode --corpus "passages/*.parquet"` and `revela-hub train ... --data "passages/*.parquet"` read the files. A row is
read and cut by the code of these commands, so the passages are those of the rows; the order of the files is Ray's.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from revela_hub.data.sources.documents import row_documents
from revela_hub.data.sources.rows import Row
from revela_hub.data.sources.source import Kind, Source
from revela_hub.data.text.chunks import chunk_document


def cut_rows(
    batch: Mapping[str, Sequence[Any]],
    *,
    max_words: int = 120,
    kind: Kind = "text",
    id_column: str = "_id",
    text_column: str | tuple[str, ...] = "text",
    title_column: str | None = None,
) -> dict[str, list[Any]]:
    """Cut rows into passages of whole sentences (prose) or lines (code), as `revela-hub encode` does.

    Args:
        batch: Columns of R rows, for example `{"_id": ["a", "b"], "text": ["...", "..."]}`.
        max_words: Maximum number of words per passage.
        kind: Type of the texts: "text" or "code".
        id_column: Column with the id of the document, which must be unique in the corpus.
        text_column: Column with the text; several are joined by an empty line.
        title_column: Column with the title, which is put before the text. None: `title`, if it exists; "": no title.

    Returns:
        Columns of P passages: `_id`, `text`, `document`, `start_line` and `end_line`. The id is `DOCUMENT:FIRST-LAST`, with the
        numbers of its lines, and `#2`, `#3`, ... for more passages of the same lines. Empty texts have no passages.

    >>> cut_rows({"_id": [7], "text": ["Rivers carry sediment. It settles in the sea."]}, max_words=5)["text"]
    ['Rivers carry sediment.', 'It settles in the sea.']
    """
    source = Source("batch", text_column=text_column, id_column=id_column, title_column=title_column, kind=kind)
    rows = (Row("a row", dict(zip(batch, values, strict=True))) for values in zip(*batch.values(), strict=True))
    chunks = [chunk for document in row_documents(rows, source) for chunk in chunk_document(document, max_words)]
    columns = {
        name: [getattr(chunk, name) for chunk in chunks] for name in ("text", "document", "start_line", "end_line")
    }
    seen, ids = Counter[str](), []
    for chunk in chunks:
        lines = f"{chunk.document}:{chunk.start_line}-{chunk.end_line}"
        seen[lines] += 1
        ids.append(lines if seen[lines] == 1 else f"{lines}#{seen[lines]}")
    return {"_id": ids, **columns}
