"""Encoding many texts: in batches of about equally many tokens, not of equally many texts.

sentence-transformers sorts by the number of characters and takes 32 texts at a time, whether these have 5 tokens or 250.
Here it takes many, and its forward pass is done in parts: sorted by their tokens, as many texts as fit `TOKENS`. That is less
padding, and on a CPU activations that stay in its cache (`benchmarks/retrieval.md` has the figures). The vectors are those of
the model's own methods.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.retrieval.encoder import Encoder, as_vectors

TOKENS = {"cpu": 1024}
"""Tokens of a batch on a device; on others as many as `batch_size` texts of `TYPICAL` tokens."""
TYPICAL = 256
WINDOW = 512
"""Texts that are tokenised together."""


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
    texts = [without_surrogates(text) for text in texts]
    method = encoder.encode_query if kind == "query" else encoder.encode_document
    options = (
        {"show_progress_bar": False} | options | ({} if prompt is None else {"prompt": without_surrogates(prompt)})
    )
    convert = convert or (lambda encoded, count: as_vectors(encoded, count, normalize=False))
    if not _pads_tokens(encoder):
        vectors = convert(method(texts, batch_size=batch_size, **options), len(texts))
        progress(len(texts))
        return vectors
    budget = token_budget(str(getattr(encoder, "device", "cpu")), batch_size)
    with by_tokens(encoder, budget, 8 * batch_size, progress):
        return convert(method(texts, batch_size=WINDOW, **options), len(texts))


@contextmanager
def by_tokens(model: Any, budget: int, most: int, progress: Callable[[int], object]) -> Iterator[None]:
    """A sentence-transformers model's forward pass in parts of at most so many tokens and texts, each padded for itself."""
    import torch

    forward = model.forward

    def in_parts(features: dict[str, Any], **options: Any) -> dict[str, Any]:
        mask_BL, vectors_BD = features.get("attention_mask"), None
        if mask_BL is None:  # of a module of its own
            return dict(forward(features, **options))
        for chosen in batches(mask_BL.sum(1).cpu().numpy(), budget, most):
            rows = torch.from_numpy(chosen).to(mask_BL.device)
            columns = mask_BL[rows].any(0).nonzero()  # those of padding are at one end, or at both
            start, end = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 1)
            part = {
                key: value[rows, start:end] if getattr(value, "shape", None) == mask_BL.shape else value
                for key, value in features.items()
            }
            found_PD = forward(part, **options)["sentence_embedding"]
            if vectors_BD is None:
                vectors_BD = found_PD.new_empty(len(mask_BL), *found_PD.shape[1:])
            vectors_BD[rows] = found_PD
            progress(len(rows))
        return {"sentence_embedding": vectors_BD}

    model.forward = in_parts
    try:
        yield
    finally:
        del model.forward


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


def _pads_tokens(encoder: Any) -> bool:
    """Whether it is a sentence-transformers model whose texts become rows of tokens (B, L), padded."""
    library = sys.modules.get("sentence_transformers")  # who has such a model has imported it
    if library is None or not isinstance(encoder, (library.SentenceTransformer, library.SparseEncoder)):
        return False
    from transformers import PreTrainedTokenizerBase

    packs = any(getattr(module, "can_flatten_inputs", False) for module in encoder.modules())
    return isinstance(encoder.tokenizer, PreTrainedTokenizerBase) and not packs
