"""Check the embeddings of a model: they are finite and depend on the text and its kind only."""

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from transformers.utils import chat_template_utils

from .files import Check
from .loading import LoadedModel
from .texts import LONGEST_PROBE, PAIRS, SENTENCE, SHORT, many_texts, probe_texts
from .tokens import token_checks, tokenizers_of, tokens_around, tokens_of_nothing

_MAX_OPERATIONS = 5e12  # of one check on more texts than the probe's: minutes on one core
_ENDINGS = ("gold.", "What is the price?", "17 + 4 = 21")
_ALLOW_ZERO = {"StaticEmbedding", "SparseStaticEmbedding", "BoW", "WordEmbeddings"}  # for texts without known words

# Largest difference that rounding can make in a unit vector, by type of the stored weights.
_TOLERANCE = {"torch.float32": 1e-5, "torch.float64": 1e-5, "torch.float16": 2e-3, "torch.bfloat16": 1.5e-2}


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of a coordinate, relative to the norm of the longest expected vector."""
    scale = float(np.linalg.norm(expected, axis=-1).max(initial=0.0))
    return float(np.abs(got - expected).max(initial=0.0)) / (scale or 1.0)


def check_vectors(model: LoadedModel, reference: Path | None) -> Iterator[Check]:
    """Yield the checks of tokens, lengths and embeddings, up to a fault that would make the following checks fail too."""
    similarity = getattr(model.module, "similarity_fn_name", None)
    if model.kind in ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder"):
        yield Check("prompts", True, f"{model.prompts or 'none'}, {similarity} similarity")
    if model.tokenizer is not None:
        for check in token_checks(model):
            yield check
            if not check.ok and check.name in ("tokens", "length"):
                return
    if fault := _empty_text_fault(model):
        yield Check("vectors", False, fault)
        return
    texts = probe_texts(model.max_length)
    parts = (texts[:-1], texts[-1:])  # the last text is long, and all in its batch would be padded to it
    vectors = {kind: np.concatenate([model.encode(kind, part) for part in parts]) for kind in model.kinds}
    yield (found := _vectors_check(model, vectors, texts))
    if not found.ok:
        return
    yield Check.of("different texts", _dependence_faults(model), "different vectors, also if only the end differs")
    yield _reference_check(reference, model, vectors, texts, similarity)
    yield Check.of("repetition", _repetition_faults(model), "the same text gives the same vector again")
    # Without the truncated text, to which all others in its batch would be padded.
    short, together = texts[:-1], vectors[model.kinds[0]][:-1]
    yield Check.of("batching", _batching_faults(model, short, together), "same vectors alone and in a batch")
    yield _padding_check(model, short, together)


# --- vectors


def _empty_text_fault(model: LoadedModel) -> str:
    """Return why readers cannot encode an empty text, which many corpora contain; empty if they can."""
    if model.kind in ("", "CrossEncoder") or tokens_of_nothing(model):
        return ""
    for kind in model.kinds:
        try:
            model.encode(kind, [""])
        except Exception as error:  # readers would get the same error
            reason = " ".join(str(error).split())[:80]
            return (
                f"encode_{kind} fails for an empty text, which has no tokens ({type(error).__name__}: {reason}): add BOS or EOS"
                f" to post_processor in tokenizer.json, or save a prompt for {kind!r}"
            )
    return ""


def _vectors_check(model: LoadedModel, vectors: dict[str, np.ndarray], texts: list[str]) -> Check:
    dimensions = {kind: array.shape[1] for kind, array in vectors.items()}
    if len(set(dimensions.values())) > 1:
        return Check("vectors", False, f"queries and documents have different dimensions: {dimensions}")
    (found,) = set(dimensions.values())
    declared = getattr(model.module, "get_embedding_dimension", lambda: None)()
    if model.kind in ("SentenceTransformer", "SparseEncoder") and declared and declared != found:
        return Check("vectors", False, f"the vectors have {found} dimensions, but the folder says {declared}")
    cases = [(kind, text, vector) for kind, array in vectors.items() for text, vector in zip(texts, array, strict=True)]
    note = "also for empty and truncated texts"
    if model.kind and model.kind != "CrossEncoder":
        cases += [(kind, "without prompt", model.encode(kind, [SHORT], prompt="")[0]) for kind in vectors]
        if tokens_of_nothing(model):
            cases += [(kind, "", model.encode(kind, [""], prompt="")[0]) for kind in vectors]
        else:
            note = (
                "also for truncated texts and for a prompt with an empty text, which has no tokens without the prompt"
            )
    zero = model.kind == "CrossEncoder" or any(type(part).__name__ in _ALLOW_ZERO for part in model.module.modules())
    for kind, text, vector in cases:
        if not np.isfinite(vector).all():
            return Check("vectors", False, f"{kind} {text[:30]!r} gives NaN or infinity")
        empty = not text and model.kind == "SparseEncoder"  # no tokens, so no terms
        if not (zero or empty or vector.any()):
            return Check("vectors", False, f"{kind} {text[:30]!r} gives a vector of zeros")
    return Check("vectors", True, f"{found} dimensions, finite, {note}")


def _dependence_faults(model: LoadedModel) -> Iterator[str]:
    texts = [text for pair in PAIRS for text in pair]
    for kind in model.kinds:
        array = model.encode(kind, texts)
        same = [pair for place, pair in enumerate(PAIRS) if difference(array[2 * place], array[2 * place + 1]) < 1e-5]
        if 2 * len(same) > len(PAIRS):
            yield f"{kind}: {same[0][0]!r} and {same[0][1]!r} give the same vector"
        long = _long_text(model, kind)
        array = model.encode(kind, [f"{long} {ending}" for ending in _ENDINGS])
        if long and (array == array[:1]).all():
            found = f"{kind}: texts of {len(long.split())} words that differ only at the end give the same vector"
            yield f"{found}: a chat template or the tokenizer truncates them"


def _long_text(model: LoadedModel, kind: str) -> str:
    """Return a text that is almost as long as the maximum length; empty if that leaves no room for a text."""
    lengths = [getattr(part, f"{kind}_length", None) for part in model.module.modules()]
    lengths += [tokenizer.model_max_length for tokenizer in tokenizers_of(model)]
    room = min([LONGEST_PROBE, model.tokens_in_all(_MAX_OPERATIONS), *(one for one in lengths if isinstance(one, int))])
    if model.tokenizer is None:
        return SENTENCE * 10
    room -= 24 + tokens_around(model, kind)
    words = (SENTENCE * (max(room, 0) // len(SENTENCE.split()) + 1)).split()
    tokens = len(model.tokenizer(" ".join(words), add_special_tokens=False)["input_ids"])
    return " ".join(words[: int(0.95 * len(words) * min(1, max(room, 0) / tokens))])


def _reference_check(
    file: Path | None, model: LoadedModel, vectors: dict[str, np.ndarray], texts: list[str], similarity: str | None
) -> Check:
    name = "same as checkpoint"
    if file is None:
        return Check(name, True, "not checked: no reference for pooling, normalization, prompts, casing and similarity")
    with safe_open(file, framework="np") as stored:
        expected = {kind: stored.get_tensor(kind) for kind in stored.keys()}  # noqa: SIM118 (not a mapping)
        trained = json.loads((stored.metadata() or {}).get("settings", "{}"))
    if int(trained.get("max_length", model.max_length)) != model.max_length:
        found = (
            f"the maximum length is {model.max_length}, but {trained['max_length']} in the checkpoint: export it again"
        )
        return Check(name, False, found)
    if trained.get("similarity", similarity) != similarity:
        return Check(name, False, f"the similarity is {similarity}, but {trained['similarity']} in the checkpoint")
    tolerance = _TOLERANCE.get(model.dtype, 1e-5)
    faults = [_first_difference(kind, texts, vectors[kind], array, tolerance) for kind, array in expected.items()]
    found = "; ".join(filter(None, faults))
    return Check(name, not found, found or f"to {tolerance:g} on {len(texts)} texts")


def _first_difference(
    kind: str, texts: list[str], got: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5
) -> str:
    """Return which text differs most, or an empty string if all are within the tolerance."""
    if got.shape != expected.shape:
        return f"{kind}: shape {got.shape} instead of {expected.shape}"
    differences = [difference(one, other[None]) for one, other in zip(got, expected, strict=True)]
    worst = max(range(len(texts)), key=differences.__getitem__)
    if differences[worst] <= tolerance or difference(got, expected) <= tolerance:
        return ""
    return f"{kind} {texts[worst][:30]!r} differs by {differences[worst]:.1e}"


def _repetition_faults(model: LoadedModel) -> Iterator[str]:
    """Encode a text twice, then on another day, which differs if a chat template contains the date."""
    templates: Any = chat_template_utils
    kind = model.kinds[0]
    first = model.encode(kind, [SHORT])
    if difference(model.encode(kind, [SHORT]), first) > 1e-5:
        yield f"{SHORT!r} gives another vector the second time"
    if (now := getattr(templates, "datetime", None)) is None:
        return
    try:
        templates.datetime = _AnotherDay
        later = model.encode(kind, [SHORT])
    finally:
        templates.datetime = now
    if difference(later, first) > 1e-5:
        yield f"{SHORT!r} gives another vector on another day: remove the date from the chat template"


class _AnotherDay(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_AnotherDay":
        return cls(1999, 2, 3, 4, 5, 6, tzinfo=tz)


def _batching_faults(model: LoadedModel, texts: list[str], together: np.ndarray) -> Iterator[str]:
    kind = model.kinds[0]
    many = many_texts(max(1, min(48, model.tokens_in_all(_MAX_OPERATIONS) // 24)))
    for batch, vectors in ((texts, together), (many, model.encode(kind, many))):
        alone = np.concatenate([model.encode(kind, [text]) for text in batch])
        if found := _first_difference(kind, batch, alone, vectors):
            yield f"alone and in a batch: {found}"


def _padding_check(model: LoadedModel, texts: list[str], as_saved: np.ndarray) -> Check:
    if not model.kind or model.tokenizer is None:
        return Check("padding", True, "right")
    saved, kind = model.tokenizer.padding_side, model.kinds[0]
    model.tokenizer.padding_side = "left" if saved == "right" else "right"
    found = _first_difference(kind, texts, model.encode(kind, texts), as_saved)
    model.tokenizer.padding_side = saved
    if not found:
        return Check("padding", True, f"{saved} is saved; left and right give the same vectors")
    if saved == "right" and _has_position_table(model.module):
        return Check("padding", True, "right is saved, which absolute positions require")
    return Check("padding", False, f"left and right: {found}")


def _has_position_table(module: Any) -> bool:
    """Return whether the model has a table of absolute positions, as BERT and GPT-2 do."""
    tables = [name.rpartition(".")[2] for name, part in module.named_modules() if hasattr(part, "num_embeddings")]
    return any("position" in name or name == "wpe" for name in tables)
