"""Encoding many texts in batches of about the same number of tokens, not of the same number of texts.

sentence-transformers encodes 32 texts at a time, whether they have 5 tokens or 250. Here it is called for each batch of as many texts
as fit `TOKENS_PER_BATCH`, longest first. On a CPU the activations then stay in the cache (see `benchmarks/retrieval.md`). The vectors
are the same.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.loading import varying_shapes
from revela_hub.retrieval.encoder import Encoder, as_vectors

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_PER_BATCH = {"cpu": 1536}
"""Estimated tokens per batch by device; on other devices as many as `batch_size` texts of `TYPICAL_LENGTH` tokens."""
TYPICAL_LENGTH = 256
_PART: ContextVar[tuple[int, int]] = ContextVar("_PART", default=(0, 1))
"""Number of this process, and number of processes that divide the batches (`divided`)."""


@varying_shapes()
def encode_texts(
    encoder: Encoder,
    texts: Sequence[str],
    kind: Literal["query", "document"],
    *,
    batch_size: int = 32,
    prompt: str | None = None,
) -> NDArray[np.float32]:
    """Return the vectors (N, D) of N texts; a prompt replaces the encoder's own.

    `batch_size` is that of encoders other than sentence-transformers models, and on a GPU that of texts of a typical length (256
    tokens); shorter texts are batched up to eight times as many.
    """
    if not texts or not _is_dense_transformer(encoder):
        return as_vectors(encoded(encoder, texts, kind, batch_size, prompt), len(texts), normalize=False)

    def encode(rows: NDArray[np.int64]) -> "Tensor":
        batch = [texts[row] for row in rows]
        vectors_PD: Tensor = encoded(encoder, batch, kind, len(batch), prompt, convert_to_tensor=True)
        return vectors_PD.float().cpu()

    budget = TOKENS_PER_BATCH.get(str(getattr(encoder, "device", "cpu")), batch_size * TYPICAL_LENGTH)
    # A token has about four bytes in UTF-8, in most languages.
    lengths = [len(text.encode("utf-8", "replace")) // 4 + 2 for text in texts]
    lengths_N = np.minimum(lengths, getattr(encoder, "max_seq_length", None) or sys.maxsize)
    vectors_ND = encode_batches(list(batches(lengths_N, budget, 8 * batch_size)), encode)
    return as_vectors(vectors_ND, len(texts), normalize=False)


def encoded(
    encoder: Any, texts: Sequence[str], kind: str, batch_size: int = 32, prompt: str | None = None, **options: Any
) -> Any:
    """Return what an encoder's own method returns for texts, without lone surrogates, which tokenizers do not accept."""
    method = encoder.encode_query if kind == "query" else encoder.encode_document
    if prompt is not None:
        options["prompt"] = without_surrogates(prompt)
    return method(list(map(without_surrogates, texts)), batch_size=batch_size, show_progress_bar=False, **options)


def encode_batches(
    batches_of_rows: list[NDArray[np.int64]], encode: Callable[[NDArray[np.int64]], "Tensor"]
) -> "Tensor":
    """Return the vectors (N, D) of the rows 0 to N - 1 in batches; within `divided`, each process encodes some of the batches."""
    rank, processes = _PART.get()
    parts: list[tuple[NDArray[np.int64], Tensor]] = []
    for first in range(0, len(batches_of_rows), processes):
        turn = batches_of_rows[first : first + processes]
        # With sharded weights, all processes take part in each forward pass: in the last turn, some repeat a batch.
        rows = turn[rank % len(turn)]
        vectors_PD = encode(rows)
        parts.append((rows, vectors_PD))
    vectors_ND = vectors_PD.new_empty(sum(map(len, batches_of_rows)), *vectors_PD.shape[1:])
    if processes > 1:
        from torch import distributed

        of_process: list[Any] = [None] * processes
        distributed.all_gather_object(of_process, [(rows, part_PD.detach().cpu()) for rows, part_PD in parts])
        parts = list(chain.from_iterable(of_process))
    for rows, part_PD in parts:
        vectors_ND[rows] = part_PD.to(vectors_ND.device)
    return vectors_ND


@contextmanager
def divided() -> Iterator[None]:
    """Divide the batches of texts between the processes of a training run, all of which must encode the same texts.

    The batches are those of one process, so the vectors are bit-identical to its vectors.
    """
    from torch import distributed

    several = distributed.is_available() and distributed.is_initialized()
    token = _PART.set((distributed.get_rank(), distributed.get_world_size()) if several else (0, 1))
    try:
        yield
    finally:
        _PART.reset(token)


def batches(lengths_N: NDArray[np.int64], budget: int, most: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches of row numbers, longest texts first; their padded size fits the budget, or they hold one text."""
    order_N = np.argsort(-lengths_N, kind="stable")
    start = 0
    while start < len(order_N):
        size = min(most, max(1, budget // max(1, int(lengths_N[order_N[start]]))))
        yield order_N[start : start + size]
        start += size


def _is_dense_transformer(encoder: Any) -> bool:
    """Whether this is a SentenceTransformer with a transformers tokenizer, whose batches are padded."""
    library = sys.modules.get("sentence_transformers")  # imported already if the encoder is such a model
    if library is None or not isinstance(encoder, library.SentenceTransformer):
        return False
    from transformers import PreTrainedTokenizerBase

    return isinstance(encoder.tokenizer, PreTrainedTokenizerBase)
