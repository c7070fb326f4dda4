"""Encoding many texts: in batches of about equally many tokens, not of equally many texts.

sentence-transformers sorts by the number of characters and takes 32 texts at a time, whether these have 5 tokens or 250.
Here texts are sorted by their tokens, and a batch holds as many as fit `TOKENS`: less padding, and on a CPU activations that
stay in its cache (`benchmarks/retrieval.md` has the figures). The vectors are those of the model's own methods.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from revela_hub.retrieval.encoder import Encoder, as_vectors

TOKENS = {"cpu": 1024}
"""Tokens of a batch on a device; on others as many as `batch_size` texts of `TYPICAL` tokens."""
TYPICAL = 256


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
    """The vectors (N, D) of texts, as the encoder gives them.

    Args:
        encoder: A SentenceTransformer, or anything like `Encoder`.
        texts: The N texts.
        kind: Which of the encoder's two methods is called.
        batch_size: Texts per forward pass, for an encoder whose tokens are not known, and on a GPU for texts of a
            typical length (256 tokens); a forward pass never has more than eight times as many.
        prompt: Goes before every text, instead of the encoder's own.
        convert: Makes vectors of what the encoder returned for so many texts; by default `as_vectors`.
        progress: Is told how many texts are done, each time some are.
        options: For the encoder's method.

    Raises:
        UserError: A number is NaN or infinite.
        ValueError: The encoder returned something else than a vector for each text.
    """
    method = encoder.encode_query if kind == "query" else encoder.encode_document
    options = {"show_progress_bar": False} | options | ({} if prompt is None else {"prompt": prompt})
    convert = convert or (lambda encoded, count: as_vectors(encoded, count, normalize=False))
    lengths_N = token_lengths(encoder, texts)
    if lengths_N is None:
        vectors = convert(method(texts, batch_size=batch_size, **options), len(texts))
        progress(len(texts))
        return vectors
    budget = token_budget(str(getattr(encoder, "device", "cpu")), batch_size)
    vectors_ND: NDArray[np.float32] | None = None
    for rows in batches(lengths_N, budget, 8 * batch_size):
        block_BD = convert(method([texts[row] for row in rows], batch_size=len(rows), **options), len(rows))
        if vectors_ND is None:
            vectors_ND = np.empty((len(texts), block_BD.shape[1]), dtype=np.float32)
        vectors_ND[rows] = block_BD
        progress(len(rows))
    assert vectors_ND is not None  # lengths are None where there is no text
    return vectors_ND


def token_budget(device: str, batch_size: int) -> int:
    """Tokens of a batch on a device."""
    return TOKENS.get(device, batch_size * TYPICAL)


def batches(lengths_N: NDArray[np.int64], budget: int, most: int) -> Iterator[NDArray[np.int64]]:
    """Rows, the longest first, in batches whose longest text times their number is within the budget (or one text)."""
    order_N = np.argsort(-lengths_N, kind="stable")
    start = 0
    while start < len(order_N):
        size = min(most, max(1, budget // max(1, int(lengths_N[order_N[start]]))))
        yield order_N[start : start + size]
        start += size


def token_lengths(encoder: Any, texts: Sequence[str]) -> NDArray[np.int64] | None:
    """How many tokens (N,) a SentenceTransformer with a tokenizer of its own makes of each text; None for others."""
    library = sys.modules.get("sentence_transformers")  # who has such a model has imported it
    if library is None or not isinstance(encoder, (library.SentenceTransformer, library.SparseEncoder)):
        return None
    from transformers import PreTrainedTokenizerFast

    tokenizer = encoder.tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not texts:
        return None
    longest = encoder.max_seq_length
    encoded = tokenizer(
        list(texts), truncation=longest is not None, max_length=longest, padding=False, return_attention_mask=False
    )
    return np.fromiter(map(len, encoded["input_ids"]), dtype=np.int64, count=len(texts))
