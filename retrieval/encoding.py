"""Encoding many texts in batches of about the same number of tokens, not of the same number of texts.

sentence-transformers encodes 32 texts at a time, whether they have 5 tokens or 250. Here it is called for each batch of as many texts
as fit `TOKENS_PER_BATCH`, longest first. On a CPU the activations then stay in the cache (see `benchmarks/retrieval.md`). The vectors
are the same.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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
    texts: list[str],
    kind: Literal["query", "document"],
    *,
    batch_size: int = 32,
    prompt: str | None = None,
    convert: Callable[[Any, int], NDArray[np.float32]] | None = None,
    progress: Callable[[int], object] = lambda _: None,
    **options: Any,
) -> NDArray[np.float32]:
    """Return the vectors (N, D) of texts.

    Args:
        encoder: A SentenceTransformer, or any other `Encoder`.
        texts: The N texts.
        kind: The encoder's method to call.
        batch_size: Texts per forward pass for encoders other than sentence-transformers models, and on a GPU for texts
            of a typical length (256 tokens); shorter texts are batched up to eight times as many.
        prompt: A prompt that replaces the encoder's own.
        convert: Converts the encoder's output for a number of texts to an array; default: `as_vectors`.
        progress: Called with the number of texts encoded since the last call.
        options: More keywords for the encoder's method.
    """
    texts = [without_surrogates(text) for text in texts]
    method: Callable[..., Any] = encoder.encode_query if kind == "query" else encoder.encode_document
    options = (
        {"show_progress_bar": False} | options | ({} if prompt is None else {"prompt": without_surrogates(prompt)})
    )
    convert = convert or (lambda encoded, count: as_vectors(encoded, count, normalize=False))
    if not texts or not _is_dense_transformer(encoder):
        vectors = convert(method(texts, batch_size=batch_size, **options), len(texts))
        progress(len(texts))
        return vectors

    def encode(rows: NDArray[np.int64]) -> "Tensor":
        batch = [texts[row] for row in rows]
        vectors_PD: Tensor = method(batch, batch_size=len(batch), convert_to_tensor=True, **options)
        return vectors_PD.float().cpu()

    budget = token_budget(str(getattr(encoder, "device", "cpu")), batch_size)
    lengths_N = _lengths(texts, getattr(encoder, "max_seq_length", None))
    made = list(batches(lengths_N, budget, 8 * batch_size))
    return convert(encode_batches(made, encode, progress), len(texts))


def encode_batches(
    batches_of_rows: list[NDArray[np.int64]],
    encode: Callable[[NDArray[np.int64]], "Tensor"],
    progress: Callable[[int], object] = lambda _: None,
) -> "Tensor":
    """Return the vectors (N, D) of N rows, encoded in batches; within `divided`, each process encodes some of the batches.

    Args:
        batches_of_rows: Row numbers of each batch; together 0 to N - 1.
        encode: Returns the vectors of a batch.
        progress: Called with the size of each batch, also of those that other processes encode.
    """
    rank, processes = _PART.get()
    own: list[tuple[NDArray[np.int64], Tensor]] = []
    for first in range(0, len(batches_of_rows), processes):
        turn = batches_of_rows[first : first + processes]
        # With sharded weights, all processes take part in each forward pass: in the last turn, some repeat a batch.
        rows = turn[rank % len(turn)]
        vectors_PD = encode(rows)
        if rank < len(turn):
            own.append((rows, vectors_PD))
        progress(sum(map(len, turn)))
    parts = own if processes == 1 else _gathered(own, vectors_PD.device)
    vectors_ND = vectors_PD.new_empty(sum(map(len, batches_of_rows)), *vectors_PD.shape[1:])
    for rows, found_PD in parts:
        vectors_ND[rows] = found_PD
    return vectors_ND


def _gathered(own: "list[tuple[NDArray[np.int64], Tensor]]", device: Any) -> "list[tuple[NDArray[np.int64], Tensor]]":
    from torch import distributed

    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, [(rows, vectors_PD.detach().cpu()) for rows, vectors_PD in own])
    return [(rows, vectors_PD.to(device)) for part in found for rows, vectors_PD in part]


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


def token_budget(device: str, batch_size: int) -> int:
    """Return the number of tokens per batch on a device."""
    return TOKENS_PER_BATCH.get(device, batch_size * TYPICAL_LENGTH)


def batches(lengths_N: NDArray[np.int64], budget: int, most: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches of row numbers, longest texts first; their padded size fits the budget, or they hold one text."""
    order_N = np.argsort(-lengths_N, kind="stable")
    start = 0
    while start < len(order_N):
        size = min(most, max(1, budget // max(1, int(lengths_N[order_N[start]]))))
        yield order_N[start : start + size]
        start += size


def _lengths(texts: list[str], longest: int | None) -> NDArray[np.int64]:
    """Return about the number of tokens of each text: a token has about four bytes in UTF-8, in most languages."""
    return np.minimum([len(text.encode()) // 4 + 2 for text in texts], longest or sys.maxsize)


def _is_dense_transformer(encoder: Any) -> bool:
    """Whether this is a SentenceTransformer with a transformers tokenizer, whose batches are padded."""
    library = sys.modules.get("sentence_transformers")  # imported already if the encoder is such a model
    if library is None or not isinstance(encoder, library.SentenceTransformer):
        return False
    from transformers import PreTrainedTokenizerBase

    return isinstance(encoder.tokenizer, PreTrainedTokenizerBase)
