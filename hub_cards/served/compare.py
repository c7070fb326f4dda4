"""Compare the vectors of a server with those of the folder that it serves, and name the cause of a difference."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.hub_cards.served.hypotheses import FLOAT_TOLERANCE, HALF_TOLERANCE, Fit, Hypotheses, relative_difference
from revela_hub.hub_cards.verify.files import Check
from revela_hub.hub_cards.verify.onnx_files import lowest_cosine
from revela_hub.hub_cards.verify.texts import CODE, FOREIGN, LONGEST_PROBE, PAIRS, SENTENCE, SHORT
from revela_hub.retrieval.endpoint import EmbeddingServer, RejectedTexts
from revela_hub.retrieval.model_settings import ModelSettings

TEXTS = [SHORT, CODE, FOREIGN, PAIRS[1][0]]
ROUNDING_FACTOR = 4
"""Largest ratio to the difference of half precision on this machine that still counts as rounding."""


def compare(model: Any, server: EmbeddingServer, settings: ModelSettings) -> Iterator[Check]:
    """Yield the checks of a server: compare it with the folder's SentenceTransformer and its settings.

    Raises:
        UserError: The server fails, or does not return vectors.
    """
    model.float()  # so that differences are the server's
    server.normalize = settings.normalizes
    yield Check("server", True, server.description)
    fits: dict[str, Fit] = {}
    query, document = settings.prompts["query"], settings.prompts["document"]
    sent = {"vectors": query} if query == document else {"query vectors": query, "document vectors": document}
    for kind, prompt in sent.items():
        texts = [text for text in TEXTS if _tokens(settings, prompt + text) < settings.max_length] or TEXTS[:1]
        served_ND = server.embed([prompt + text for text in texts])
        hypotheses = Hypotheses(model, prompt, texts, settings.prompts)
        fit = fits[kind] = hypotheses.best(served_ND)
        yield _vectors_check(kind, fit, served_ND, hypotheses)
    alike = all(fit.difference <= HALF_TOLERANCE and not fit.mistake.causes for fit in fits.values())
    if alike and any(settings.prompts.values()):
        yield _prompts_check(server, model, settings)
    yield _batching_check(server)
    yield _length_check(server, settings)
    yield _empty_check(server)


def _vectors_check(name: str, fit: Fit, served_ND: NDArray[np.float32], hypotheses: Hypotheses) -> Check:
    own_ND = hypotheses.vectors()
    causes, cosine, dimensions = " and ".join(fit.mistake.causes), "", ""
    if own_ND is not None and own_ND.shape == served_ND.shape:
        cosine = f"cosine {lowest_cosine(served_ND, own_ND):.3f}"
    elif own_ND is not None:
        dimensions = f"{served_ND.shape[1]} dimensions instead of {own_ND.shape[1]}: "
    if fit.difference > HALF_TOLERANCE:
        dimensions = f"{cosine} to the folder's: " if cosine else dimensions
        closest = f" (closest: {causes}, which leaves a difference of {fit.difference:.2f})" if causes else ""
        fault = "no known mistake, and no two together, give the server's vectors: another model, other weights, or an older"
        return Check(name, False, f"{dimensions}{fault} version of this one{closest}")
    if causes:
        agree = f"they agree to {fit.difference:.0e}{cosine and f'; {cosine}'} to the folder's"
        return Check(name, False, f"{causes} (recomputed so, {agree})")
    if fit.difference <= FLOAT_TOLERANCE:
        return Check(name, True, f"same as the folder's, to {fit.difference:.0e}")
    return _precision_check(name, fit.difference, hypotheses)


def _precision_check(name: str, found: float, hypotheses: Hypotheses) -> Check:
    """Compare a small difference with those of half precision on this machine."""
    rounding = _rounding(hypotheses)
    for dtype, difference in rounding.items():
        if found <= ROUNDING_FACTOR * difference:
            return Check(
                name, True, f"same up to rounding: they differ by {found:.0e}, as in {dtype} ({difference:.0e} here)"
            )
    most = max(rounding.values(), default=0.0)
    fault = f"they differ by {found:.0e}, more than by rounding in half precision ({most:.0e} here)"
    return Check(name, False, f"{fault}: quantised weights, or another tokenizer or version of the model")


def _rounding(hypotheses: Hypotheses) -> dict[str, float]:
    """Return the difference of the folder's own vectors in half precision from those in float32; the model stays float32."""
    model, own_ND = hypotheses.model, hypotheses.vectors()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found: dict[str, float] = {}
    try:
        for dtype in (torch.float16, torch.bfloat16):
            model.to(dtype)
            again = Hypotheses(model, hypotheses.prompt, hypotheses.texts, {})
            vectors_ND = again.vectors()
            if vectors_ND is not None and own_ND is not None and np.isfinite(vectors_ND).all():
                found[str(dtype).removeprefix("torch.")] = relative_difference(vectors_ND, own_ND)
            model.float().load_state_dict(kept)
    except (RuntimeError, NotImplementedError, TypeError):  # the processor does not support the type
        model.float().load_state_dict(kept)
    return found


def _prompts_check(server: EmbeddingServer, model: Any, settings: ModelSettings) -> Check:
    """Find out which prompt the server adds to a text without one."""
    served_ND = server.embed([SHORT])
    names = {"": "none: clients send prompt and text, as --endpoint of our commands does"}
    names |= {
        text: f"{text!r} to every text: clients must not send it again" for text in settings.prompts.values() if text
    }
    own = {text: model.encode([SHORT], prompt=text, show_progress_bar=False) for text in names}
    closest = min(own, key=lambda text: relative_difference(served_ND, own[text]))
    return Check("prompts", not closest, f"the server adds {names[closest]}")


def _batching_check(server: EmbeddingServer) -> Check:
    """Compare the vectors of texts in one request, in another order, with those of single requests."""
    together_ND = server.embed(TEXTS[::-1])[::-1]
    alone_ND = np.concatenate([server.embed([text]) for text in TEXTS])
    found = relative_difference(together_ND, alone_ND)
    detail = f"the vectors of texts sent together and alone differ by {found:.0e}"
    return Check(
        "batching",
        found <= HALF_TOLERANCE,
        detail + ("" if found <= HALF_TOLERANCE else ": padding or the order of the texts is wrong"),
    )


def _length_check(server: EmbeddingServer, settings: ModelSettings) -> Check:
    """Compare the number of tokens that the server reads with the folder's maximum."""
    limit = min(settings.max_length, LONGEST_PROBE)
    words = (SENTENCE * (limit // len(SENTENCE.split()) + 1)).split()
    text = settings.cut(" ".join(words))
    kept = len(text.split())
    try:
        whole_ND = server.embed([text])
    except RejectedTexts as error:
        fault = f"a text of {_tokens(settings, text)} tokens, which the folder reads, is rejected: {error}"
        return Check("length", False, fault)
    read = _words_read(server, words[:kept], whole_ND)
    if read < kept:
        tokens = _tokens(settings, " ".join(words[:read]))
        fault = f"the server reads only the first {tokens} tokens, the folder {settings.max_length}"
        return Check("length", False, fault)
    note = f"the server reads all of a text of {_tokens(settings, text)} tokens"
    if kept < len(words) or settings.max_length < LONGEST_PROBE:
        try:
            longer_ND = server.embed([f"{text} {' '.join(words[::-1][:kept])}"])
            if relative_difference(longer_ND, whole_ND) > FLOAT_TOLERANCE:
                note += f", and reads on after the folder's maximum of {settings.max_length}: clients must cut texts"
                note += ", as --endpoint of our commands does"
        except RejectedTexts:
            note += ", and rejects longer ones: clients must cut them, as --endpoint of our commands does"
    return Check("length", True, note)


def _words_read(server: EmbeddingServer, words: list[str], whole_ND: NDArray[np.float32]) -> int:
    """Return how many words the server reads: the vector does not depend on those that follow."""

    def same(middle: int) -> bool:
        changed_ND = server.embed([" ".join([*words[:middle], *("other" for _ in words[middle:])])])
        return relative_difference(changed_ND, whole_ND) <= FLOAT_TOLERANCE / 2

    low, high = 0, len(words) - max(1, len(words) // 50)
    if not same(high):
        return len(words)
    while high - low > 1:  # the vector depends on the words from `low` on, and not on those from `high` on
        middle = (low + high) // 2
        low, high = (low, middle) if same(middle) else (middle, high)
    return high


def _tokens(settings: ModelSettings, text: str) -> int:
    return len(settings.tokenizer(text, truncation=True, max_length=settings.max_length)["input_ids"])


def _empty_check(server: EmbeddingServer) -> Check:
    try:
        server.embed([""])
    except RejectedTexts as error:
        return Check("empty text", True, f"is rejected: leave empty texts out ({error})")
    except UserError as error:
        return Check("empty text", False, str(error))
    return Check("empty text", True, "has a vector")
