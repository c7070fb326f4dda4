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
from .loading import LONGEST_PROBE, Loaded, positions

if TYPE_CHECKING:
    import numpy as np

_SENTENCE = "Rivers carry sediment from the mountains to the sea, where it settles layer upon layer and turns to rock. "
SHORT = "What is the capital of France?"
# Texts that begin with the same words and mean something else.
_PAIRS = (
    (SHORT, "What is the capital of Japan?"),
    ("The old river is wide and slow.", "The old river is narrow and fast."),
    ("def area(width, height):", "def area(side):"),
)
_MAY_BE_ZERO = {"StaticEmbedding", "SparseStaticEmbedding", "BoW", "WordEmbeddings"}  # of a text without words

# How far a coordinate of a unit vector may move by rounding, by the type of the stored weights.
_TOLERANCE = {"torch.float32": 1e-5, "torch.float64": 1e-5, "torch.float16": 2e-3, "torch.bfloat16": 1.5e-2}


def probe_texts(max_length: int) -> list[str]:
    """Returns the texts that a model is verified on: short, long, empty, non-Latin, code, and one that is cut.

    Args:
        max_length: tokens the model keeps; the last text has more words than that, up to `LONGEST_PROBE`.
    """
    cut = _SENTENCE * (min(max_length, LONGEST_PROBE) // len(_SENTENCE.split()) + 1)
    code = "def area(width: float, height: float) -> float:\n    return width * height\n"
    return [SHORT, _SENTENCE * 8, "", "東京は日本の首都です。 Москва — столица России. القاهرة عاصمة مصر", code, cut]


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
        for check in _token_checks(model):
            yield check
            if not check.ok and check.name in ("tokens", "length"):
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


# --- tokens


def _token_checks(model: Loaded) -> Iterator[Check]:
    fault, note = _token_fault(model)
    yield Check("tokens", not fault, fault or note)
    if not model.kind or fault:
        return
    fault = _length_fault(model)
    yield Check("length", not fault, fault or f"{model.max_length} tokens")
    if not fault and _pools_last_token(model.module):
        yield _ending_check(model)


def _token_fault(model: Loaded) -> tuple[str, str]:
    """What is wrong with the tokenizer for this model, or what was found."""
    tokenizer = model.tokenizer
    ids = tokenizer(_SENTENCE + SHORT, add_special_tokens=False)["input_ids"]
    if not ids:
        return "a sentence has no tokens: is tokenizer.json, or the vocabulary, missing?", ""
    unknown = ids.count(tokenizer.unk_token_id) / len(ids) if tokenizer.unk_token_id is not None else 0.0
    if unknown > 0.5:
        return f"{unknown:.0%} of a sentence's tokens are unknown: is the vocabulary missing, or another model's?", ""
    highest = max(tokenizer.get_vocab().values(), default=0)
    rows = _embedding_rows(model.module)
    if rows and highest >= rows:
        return (
            f"the tokenizer has ids up to {highest}, the model's table of embeddings {rows} rows: they do not fit",
            "",
        )
    padding = "" if tokenizer.pad_token is not None else "; no padding token, so one text at a time"
    if padding and (model.kind or not model.causal):
        return "the tokenizer has no padding token, so texts cannot be encoded in batches: set pad_token", ""
    return "", f"{len(tokenizer)} in the vocabulary, {rows or 'unknown'} rows of embeddings{padding}"


def _embedding_rows(module: Any) -> int:
    from transformers import PreTrainedModel

    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            try:
                return int(part.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
            except (AttributeError, NotImplementedError):
                continue
    return 0


def _length_fault(model: Loaded) -> str:
    if model.max_length >= 10**9:
        return "no maximum length is saved: long texts will fail"
    room = positions(model.module)
    if room is not None and model.max_length > room:
        return f"{model.max_length} tokens are kept, but the model has {room} positions: longer texts fail"
    for name, prompt in model.prompts.items():
        tokens = len(model.tokenizer(prompt)["input_ids"])
        if tokens >= model.max_length:
            return f"the prompt {name!r} has {tokens} tokens, which leaves no room for text in {model.max_length}"
    return ""


def _ending_check(model: Loaded) -> Check:
    tokenizer = model.tokenizer
    texts = [model.prompts.get("query", "") + text for text in probe_texts(model.max_length)]
    rows = tokenizer(texts, truncation=True)["input_ids"]
    ends = [row[-1] if row else None for row in rows]
    names = tokenizer.convert_ids_to_tokens([end if end is not None else 0 for end in ends])
    if ends[0] not in tokenizer.all_special_ids:
        found = f"the vector is read off the last token, but {SHORT!r} ends with {names[0]!r}: EOS is not added"
        return Check("end of text", False, found)
    for text, row, end, name in zip(texts, rows, ends, names, strict=True):
        if end != ends[0]:
            found = f"{names[0]!r} is lost where a text is cut to {len(row)} tokens: {text[:30]!r} ends with {name!r}"
            return Check("end of text", False, found)
    return Check("end of text", True, f"every text ends with {names[0]!r}, cut or not")


def _pools_last_token(model: Any) -> bool:
    return any("lasttoken" in (getattr(module, "pooling_mode", None) or ()) for module in model.modules())


# --- vectors


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
    if model.kind and model.kind != "CrossEncoder":
        bare = [(kind, "without prompt", model.encode(kind, [SHORT], prompt="")[0]) for kind in vectors]
        cases += [*bare, *((kind, "", model.encode(kind, [""], prompt="")[0]) for kind in vectors)]
    zero = model.kind == "CrossEncoder" or any(type(part).__name__ in _MAY_BE_ZERO for part in model.module.modules())
    for kind, text, vector in cases:
        if not np.isfinite(vector).all():
            return Check("vectors", False, f"{kind} {text[:30]!r} gives NaN or infinity")
        empty = not text and model.kind == "SparseEncoder"  # no token, no term
        if not (zero or empty or vector.any()):
            return Check("vectors", False, f"{kind} {text[:30]!r} gives a vector of zeros")
    return Check("vectors", True, f"{found} dimensions, finite, also of the empty and of the cut text")


def _dependence_check(model: Loaded) -> Check:
    """Whether another text gives another vector."""
    texts = [text for pair in _PAIRS for text in pair]
    for kind in model.kinds:
        array = model.encode(kind, texts)
        same = [pair for place, pair in enumerate(_PAIRS) if difference(array[2 * place], array[2 * place + 1]) < 1e-5]
        if 2 * len(same) > len(_PAIRS):
            first, second = same[0]
            return Check("different texts", False, f"{kind}: {first!r} and {second!r} give the same vector")
    return Check("different texts", True, "give different vectors")


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
    alone = np.concatenate([model.encode(kind, [text]) for text in texts])
    found = _found(kind, texts, alone, together, 1e-5)
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
