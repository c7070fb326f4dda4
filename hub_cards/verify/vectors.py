"""What a model makes of texts: vectors that are numbers, that depend on the text, and on nothing else.

Part of `verify.py`'s clean process: standard library and siblings only, until the libraries are imported in the functions.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import Check
from .loading import Loaded
from .texts import LONGEST_PROBE, PAIRS, SENTENCE, SHORT, many_texts, probe_texts
from .tokens import token_checks, tokenizers_of, tokens_around, tokens_of_nothing

if TYPE_CHECKING:
    import numpy as np

_OPERATIONS = 5e12  # that one check may spend on texts beside the probe's: minutes on one core
_ENDINGS = ("gold.", "What is the price?", "17 + 4 = 21")
_MAY_BE_ZERO = {"StaticEmbedding", "SparseStaticEmbedding", "BoW", "WordEmbeddings"}  # of a text without words

# How far a coordinate of a unit vector may move by rounding, by the type of the stored weights.
_TOLERANCE = {"torch.float32": 1e-5, "torch.float64": 1e-5, "torch.float16": 2e-3, "torch.bfloat16": 1.5e-2}


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of a coordinate, as a share of the longest expected vector."""
    import numpy as np

    scale = float(np.linalg.norm(expected, axis=-1).max(initial=0.0))
    return float(np.abs(got - expected).max(initial=0.0)) / (scale or 1.0)


def check_vectors(model: Loaded, reference: Path | None) -> Iterator[Check]:
    """Yields the checks of tokens, lengths and vectors; stops where the next ones would only repeat a fault."""
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
    vectors = {kind: model.encode_all(kind, texts) for kind in model.kinds}
    yield (found := _vectors_check(model, vectors, texts))
    if not found.ok:
        return
    yield _dependence_check(model)
    yield _reference_check(reference, vectors, texts, _TOLERANCE.get(model.dtype, 1e-5), similarity, model.max_length)
    # Without the text that is cut: it would make all the others in its batch as long as itself.
    first, short = model.kinds[0], texts[:-1]
    yield _repetition_check(model)
    yield _batching_check(model, short, vectors[first][:-1])
    yield _padding_check(model, short, vectors[first][:-1])


# --- vectors


def _empty_text_fault(model: Loaded) -> str:
    """Says that readers cannot encode an empty text, as there is in many a corpus; nothing if they can."""
    if model.kind in ("", "CrossEncoder") or tokens_of_nothing(model):
        return ""
    for kind in model.kinds:
        try:
            model.encode(kind, [""])
        except Exception as error:  # whatever it is, the reader would see it, too
            reason = " ".join(str(error).split())[:80]
            return (
                f"the empty text '' has no tokens, so encode_{kind} fails on it ({type(error).__name__}: {reason}): let the"
                f" post_processor of tokenizer.json add BOS or EOS, or save a prompt for {kind!r}"
            )
    return ""


def _vectors_check(model: Loaded, vectors: dict[str, np.ndarray], texts: list[str]) -> Check:
    import numpy as np

    dimensions = {kind: array.shape[1] for kind, array in vectors.items()}
    if len(set(dimensions.values())) > 1:
        return Check("vectors", False, f"queries and documents have other dimensions: {dimensions}")
    (found,) = set(dimensions.values())
    declared = getattr(model.module, "get_embedding_dimension", lambda: None)()
    if model.kind in ("SentenceTransformer", "SparseEncoder") and declared and declared != found:
        return Check("vectors", False, f"the folder says {declared} dimensions, the vectors have {found}")
    cases = [(kind, text, vector) for kind, array in vectors.items() for text, vector in zip(texts, array, strict=True)]
    note = "also of the empty and of the cut text"
    if model.kind and model.kind != "CrossEncoder":
        cases += [(kind, "without prompt", model.encode(kind, [SHORT], prompt="")[0]) for kind in vectors]
        if tokens_of_nothing(model):
            cases += [(kind, "", model.encode(kind, [""], prompt="")[0]) for kind in vectors]
        else:
            note = "also of the cut text, and of the empty one with its prompt: without one it has no tokens"
    zero = model.kind == "CrossEncoder" or any(type(part).__name__ in _MAY_BE_ZERO for part in model.module.modules())
    for kind, text, vector in cases:
        if not np.isfinite(vector).all():
            return Check("vectors", False, f"{kind} {text[:30]!r} gives NaN or infinity")
        empty = not text and model.kind == "SparseEncoder"  # no token, no term
        if not (zero or empty or vector.any()):
            return Check("vectors", False, f"{kind} {text[:30]!r} gives a vector of zeros")
    return Check("vectors", True, f"{found} dimensions, finite, {note}")


def _dependence_check(model: Loaded) -> Check:
    """Whether another text gives another vector."""
    texts = [text for pair in PAIRS for text in pair]
    for kind in model.kinds:
        array = model.encode(kind, texts)
        same = [pair for place, pair in enumerate(PAIRS) if difference(array[2 * place], array[2 * place + 1]) < 1e-5]
        if 2 * len(same) > len(PAIRS):
            first, second = same[0]
            return Check("different texts", False, f"{kind}: {first!r} and {second!r} give the same vector")
        long = _long_text(model, kind)
        array = model.encode(kind, [f"{long} {ending}" for ending in _ENDINGS])
        if long and (array == array[:1]).all():
            found = f"{kind}: texts of {len(long.split())} words that differ in the last ones give the same vector"
            return Check("different texts", False, f"{found}: a chat template, or the tokenizer, cuts them off")
    return Check("different texts", True, "give different vectors, also where only the end differs")


def _long_text(model: Loaded, kind: str) -> str:
    """As long a text as the model keeps whole, with room for an ending; empty if there is no room for any."""
    lengths = [getattr(part, f"{kind}_length", None) for part in model.module.modules()]
    lengths += [tokenizer.model_max_length for tokenizer in tokenizers_of(model)]
    room = min([LONGEST_PROBE, model.tokens_in_all(_OPERATIONS), *(one for one in lengths if isinstance(one, int))])
    if model.tokenizer is None:
        return SENTENCE * 10
    room -= 24 + tokens_around(model, kind)
    words = (SENTENCE * (max(room, 0) // len(SENTENCE.split()) + 1)).split()
    tokens = len(model.tokenizer(" ".join(words), add_special_tokens=False)["input_ids"])
    return " ".join(words[: int(0.95 * len(words) * min(1, max(room, 0) / tokens))])


def _reference_check(
    file: Path | None,
    vectors: dict[str, np.ndarray],
    texts: list[str],
    tolerance: float,
    similarity: str | None,
    max_length: int,
) -> Check:
    from safetensors import safe_open

    if file is None:
        found = "nothing to compare with: pooling, normalisation, prompts, casing and similarity are taken as they are"
        return Check("same as checkpoint", True, found)
    with safe_open(file, framework="np") as stored:
        expected = {kind: stored.get_tensor(kind) for kind in stored.keys()}  # noqa: SIM118 (no mapping)
        facts = stored.metadata() or {}
    facts = json.loads(facts["settings"]) if "settings" in facts else facts  # older files have an entry for each
    if int(facts.get("max_length", max_length)) != max_length:
        found = f"the folder keeps {max_length} tokens of a text, the checkpoint {facts['max_length']}: export it again"
        return Check("same as checkpoint", False, found)
    if facts.get("similarity", similarity) != similarity:
        return Check("same as checkpoint", False, f"{similarity} similarity, the checkpoint's is {facts['similarity']}")
    faults = [_found(kind, texts, vectors[kind], array, tolerance) for kind, array in expected.items()]
    found = "; ".join(filter(None, faults))
    return Check("same as checkpoint", not found, found or f"to {tolerance:g} on {len(texts)} texts")


def _found(kind: str, texts: list[str], got: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """Says which text differs most, or nothing where all are within the tolerance."""
    if got.shape != expected.shape:
        return f"{kind}: shape {got.shape} instead of {expected.shape}"
    differences = [difference(one, other[None]) for one, other in zip(got, expected, strict=True)]
    worst = max(range(len(texts)), key=differences.__getitem__)
    if differences[worst] <= tolerance or difference(got, expected) <= tolerance:
        return ""
    return f"{kind} {texts[worst][:30]!r} differs by {differences[worst]:.1e}"


def _repetition_check(model: Loaded) -> Check:
    """Whether the same text gives the same vector again, and on another day, as with a chat template that has a date in it."""
    from transformers.utils import chat_template_utils

    templates: Any = chat_template_utils
    kind = model.kinds[0]
    first = model.encode(kind, [SHORT])
    if difference(model.encode(kind, [SHORT]), first) > 1e-5:
        return Check("repetition", False, f"{SHORT!r} gives another vector the second time")
    now = getattr(templates, "datetime", None)
    if now is None:
        return Check("repetition", True, "the same text gives the same vector again")
    try:
        templates.datetime = _AnotherDay
        later = model.encode(kind, [SHORT])
    finally:
        templates.datetime = now
    if difference(later, first) > 1e-5:
        return Check(
            "repetition", False, f"{SHORT!r} gives another vector on another day: the chat template asks for the date"
        )
    return Check("repetition", True, "the same text gives the same vector again, also on another day")


class _AnotherDay(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _AnotherDay:
        return cls(1999, 2, 3, 4, 5, 6, tzinfo=tz)


def _batching_check(model: Loaded, texts: list[str], together: np.ndarray) -> Check:
    import numpy as np

    kind = model.kinds[0]
    many = many_texts(max(1, min(48, model.tokens_in_all(_OPERATIONS) // 24)))
    batches = [(texts, together), (many, model.encode(kind, many))]
    found = ""
    for batch, vectors in batches:
        alone = np.concatenate([model.encode(kind, [text]) for text in batch])
        found = found or _found(kind, batch, alone, vectors, 1e-5)
    return Check("batching", not found, f"alone and in a batch: {found}" if found else "alone or in a batch, the same")


def _padding_check(model: Loaded, texts: list[str], as_saved: np.ndarray) -> Check:
    if not model.kind or model.tokenizer is None:
        return Check("padding", True, "right")
    saved, kind = model.tokenizer.padding_side, model.kinds[0]
    model.tokenizer.padding_side = "left" if saved == "right" else "right"
    found = _found(kind, texts, model.encode(kind, texts), as_saved, 1e-5)
    model.tokenizer.padding_side = saved
    if not found:
        return Check("padding", True, f"{saved} is saved; left or right, the same")
    if saved == "right" and _counts_positions_from_the_edge(model.module):
        return Check("padding", True, "right is saved, and needed: positions are counted from the left edge")
    return Check("padding", False, f"left and right: {found}")


def _counts_positions_from_the_edge(module: Any) -> bool:
    """Whether the model has a table of absolute positions, as BERT and GPT-2 do; rotary ones are no table."""
    tables = [name.rpartition(".")[2] for name, part in module.named_modules() if hasattr(part, "num_embeddings")]
    return any("position" in name or name == "wpe" for name in tables)
