"""Blocks for datatrove pipelines: cut documents into passages, and encode them.

datatrove runs a pipeline on one machine, Slurm, Ray or HF Jobs; the executor is all that differs. Its tasks are independent,
and completed ones are skipped when the pipeline is run again:

    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import ParquetWriter
    from revela_hub.retrieval.datatrove_blocks import CutPassages, EncodePassages

    if __name__ == "__main__":  # each worker imports this file again
        LocalPipelineExecutor(
            [
                JsonlReader("corpus"),
                CutPassages(max_words=120),
                EncodePassages("my-retriever"),
                ParquetWriter("vectors", expand_metadata=True),
            ],
            tasks=64,
            workers=4,
            logging_dir="logs",
        ).run()

The files have the columns text, id, document, start_line, end_line and vector; the vectors are the model's, not normalised.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from revela_hub.data.sources.documents import row_documents
from revela_hub.data.sources.rows import Row
from revela_hub.data.sources.source import Source
from revela_hub.data.text.passage_rows import passages_with_ids
from revela_hub.retrieval.encoder import Encoder, load_encoder
from revela_hub.retrieval.encoding import encode_texts

WINDOW = 4096
"""Passages that are sorted by length and encoded together."""


class CutPassages(PipelineStep):  # type: ignore[misc]
    """Cuts documents into passages of whole sentences (prose) or lines (code), as `revela-hub encode` does.

    The ids of passages are those of `passages_with_ids`. Empty documents have no passages.

    Args:
        max_words: Maximum number of words per passage.
        kind: Type of the documents: "text" or "code".
        title_column: Metadata with the title, which is put before the text. None: `title`, if it exists; "": no title.
    """

    type = "Passages"
    name = "Cut"

    def __init__(
        self, max_words: int = 120, kind: Literal["text", "code"] = "text", title_column: str | None = None
    ) -> None:
        super().__init__()
        self.max_words = max_words
        self.source = Source("documents", id_column="id", title_column=title_column, kind=kind)

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the passages of each document."""
        for document in data:
            columns = document.metadata | {"id": document.id, "text": document.text}
            (whole,) = row_documents([Row(document.id, columns)], self.source)
            for passage, chunk in passages_with_ids(whole, self.max_words):
                place = {"document": document.id, "start_line": chunk.start_line, "end_line": chunk.end_line}
                self.stat_update("passages")
                yield Document(chunk.text, passage, metadata=document.metadata | place)


class EncodePassages(PipelineStep):  # type: ignore[misc]
    """Adds the vector of each text to its metadata, as a list of numbers under `vector`.

    Args:
        model: Sentence-transformers folder or Hub id.
        prompt: A prompt that replaces the model's own for documents.
        max_length: Maximum number of tokens per text; None: the model's own limit.
        batch_size: Texts per forward pass on a GPU.
        device: "cpu", "cuda", ...; None: the fastest one.
        trust_remote_code: Allow the model to run its own code.
    """

    type = "Passages"
    name = "Encode"

    def __init__(
        self,
        model: str,
        *,
        prompt: str | None = None,
        max_length: int | None = None,
        batch_size: int = 32,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self.model = model  # loaded by each task when it begins
        self.loading: dict[str, Any] = {
            "device": device,
            "trust_remote_code": trust_remote_code,
            "max_seq_length": max_length,
        }
        self.encoding: dict[str, Any] = {"batch_size": batch_size, "prompt": prompt}

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents with their vectors, in their order.

        Raises:
            UserError: The model cannot be loaded, or a vector is NaN or infinite.
        """
        encoder: Encoder = load_encoder(self.model, **self.loading)
        rows = iter(data)
        while window := list(islice(rows, WINDOW)):
            with self.track_time("window"):
                vectors = encode_texts(encoder, [row.text for row in window], "document", **self.encoding)
            self.stat_update("encoded", value=len(window))
            for row, vector in zip(window, vectors, strict=True):
                row.metadata["vector"] = vector.tolist()
                yield row
