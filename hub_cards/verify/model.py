"""What a loaded model is checked for: all its weights, as they are in the files; then what it makes of texts (`vectors.py`).

Part of `verify.py`'s clean process: standard library and siblings only, until the libraries are imported in the functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import Check
from .loading import Loaded, UnknownKind
from .texts import LONGEST_PROBE, SENTENCE, SHORT, many_texts
from .vectors import check_vectors, difference

if TYPE_CHECKING:
    import torch

_HALF = {"torch.float16", "torch.bfloat16"}
_OPERATIONS_IN_HALF = 2e11  # that a batch may take in half precision, for which many processors have no instructions


def check_model(
    folder: Path, trust_remote_code: bool, adapter_only: bool, reference: Path | None, vectors: Path | None
) -> Iterator[Check]:
    """Yields the checks that need the model; the arguments are those of `verify`."""
    loads = _record_loads()
    try:
        model = Loaded(folder, trust_remote_code, vectors)
    except UnknownKind as error:
        yield Check("folder", False, str(error))
        return
    except Exception as error:  # whatever it is, the reader would see it, too
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        if not trust_remote_code and "trust_remote_code" in str(error):
            what = "it needs the code that it brings: read that, and let it run by --trust_remote_code"
        yield Check("loading", False, what)
        return
    yield Check("loading", True, f"{model.how}, {model.parameters:,} parameters, {model.dtype}")
    bad = [name for name, tensor in model.module.state_dict().items() if not _finite(tensor)]
    values = Check("values", not bad, f"{bad[0]} holds NaN or infinity" if bad else "every weight is a finite number")
    yield _weights_check(folder, model, loads, adapter_only)
    yield values
    if bad or not model.kinds:
        if not model.kinds:
            yield Check("vectors", True, "not looked at: the model takes other inputs than one text")
        return
    stored = _in_stored_type(model) if model.dtype in _HALF else []
    # What is stored in half precision is compared in float32: then a difference is a fault, not rounding.
    model.module.float()
    if stored:
        yield stored_type_check(model, stored)
    yield from check_vectors(model, reference)


_LOADS: list[tuple[Any, dict[str, Any]]] = []


def _record_loads() -> list[tuple[Any, dict[str, Any]]]:
    """Has transformers report, for every model loaded from now on, which weights were missing, left over or of another shape."""
    from transformers import PreTrainedModel

    _LOADS.clear()
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    if getattr(original, "records", False):
        return _LOADS

    def recording(cls: type, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("output_loading_info", False)
        model, report = original(cls, *args, output_loading_info=True, **kwargs)
        model.loaded_from = kwargs.get("subfolder") or ""  # a route's part of the folder
        _LOADS.append((model, report))
        return (model, report) if wanted else model

    recording.records = True  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(recording)  # type: ignore[assignment]
    return _LOADS


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _weights_check(folder: Path, model: Loaded, loads: list[tuple[Any, dict[str, Any]]], adapter_only: bool) -> Check:
    notes = []
    for part, report in loads:
        if mismatched := sorted(map(str, report.get("mismatched_keys") or ())):
            return _fault(mismatched, "of another shape than the model's")
        missing = set(map(str, report.get("missing_keys") or ()))
        if unread := {name for name in missing if model.kinds and not _is_read(model, part, name)}:
            notes.append(f"{_and_more(sorted(unread))} not in the file, but nothing reads it")
        if missing - unread:
            return _fault(sorted(missing - unread), "not in the file, would start at random")
        extra = set(map(str, report.get("unexpected_keys") or ()))
        if head := extra & (_of_the_whole(part) if extra else set()):
            notes.append(f"{_and_more(sorted(head))} of the whole {_architecture(part)}, which is not needed here")
        if extra - head:
            return _fault(sorted(extra - head), "in the file, but not in the model")
    fault, compared = _values_fault(folder, [] if adapter_only else [part for part, _ in loads])
    fine = "none missing, left over or initialised again" + f" ({compared} compared)" * (not adapter_only)
    return Check("weights", not fault, fault or "; ".join([fine, *notes]))


def _values_fault(folder: Path, parts: list[Any]) -> tuple[str, int]:
    """What is wrong with the values of the weights in memory, and the number of those compared with the files."""
    compared = 0
    for part in parts:
        if untied := _untied(folder, part):
            return untied, compared
        for name, same in _compared_with_files(folder, part):
            compared += 1
            if not same:
                return f"{name} has other values in memory than in the file: initialised again", compared
    return "", compared


def _fault(names: list[str], meaning: str) -> Check:
    return Check("weights", False, f"{_and_more(names)}: {meaning}")


def _and_more(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _is_read(model: Loaded, part: Any, name: str) -> bool:
    """Whether the vectors depend on a weight, as they do not on BERT's pooler: with other values they are the same."""
    import torch

    tensor = part.state_dict().get(name)
    if tensor is None:
        return True
    try:
        before = model.encode(model.kinds[0], [SHORT])
        kept = tensor.clone()
        with torch.no_grad():
            tensor.add_(1.0)
        after = model.encode(model.kinds[0], [SHORT])
        with torch.no_grad():
            tensor.copy_(kept)
    except Exception:  # the checks of vectors say what it is
        return True
    return bool((before != after).any())


def _architecture(part: Any) -> str:
    return str(next(iter(getattr(part.config, "architectures", None) or ()), ""))


def _whole(part: Any) -> Any:
    """The model that config.json names, of which perhaps only the body was loaded; without weights, if it is transformers'."""
    import torch
    import transformers

    whole = getattr(transformers, _architecture(part), type(part))
    if not whole.__module__.startswith("transformers."):
        return part
    with torch.device("meta"):
        return whole(part.config)


def _of_the_whole(part: Any) -> set[str]:
    """The weights of the class that config.json names, of which only the body was loaded."""
    whole = _whole(part)
    return set() if isinstance(part, type(whole)) else set(whole.state_dict())


def _untied(folder: Path, part: Any) -> str:
    """Two matrices in the file that are one and the same by config.json: which of them is used depends on the library."""
    import torch
    from safetensors import safe_open

    whole = _whole(part)
    found: dict[str, torch.Tensor] = {}
    prefix = f"{whole.base_model_prefix}."
    ties = getattr(whole, "all_tied_weights_keys", None) or {}
    wanted = {name.removeprefix(prefix) for pair in ties.items() for name in pair}
    for file in sorted((folder / part.loaded_from).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.removeprefix(prefix) in wanted]  # noqa: SIM118 (no mapping)
            found |= {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}
    for name, other in ((one.removeprefix(prefix), two.removeprefix(prefix)) for one, two in ties.items()):
        if name in found and other in found and not torch.equal(found[name], found[other]):
            return f"{name} and {other} differ in the file, but config.json ties them: set tie_word_embeddings to false"
    return ""


def _compared_with_files(folder: Path, model: Any) -> Iterator[tuple[str, bool]]:
    import torch
    from safetensors import safe_open

    loaded, prefix = model.state_dict(), f"{model.base_model_prefix}."
    for file in sorted((folder / model.loaded_from).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping: it has no iterator)
                there = loaded.get(name, loaded.get(name.removeprefix(prefix)))
                if there is not None:
                    stored = tensors.get_tensor(name).to(there.dtype)
                    yield name, stored.shape == there.shape and torch.equal(stored.nan_to_num(), there.nan_to_num())


def _in_stored_type(model: Loaded) -> list[tuple[str, list[str], Any]]:
    """(what, texts, vectors) computed in the type of the weights: a short text, a batch, and one as long as can be.

    Empty where this processor cannot; short where half precision would take it minutes.
    """
    tokens, kind = model.tokens_in_all(_OPERATIONS_IN_HALF), model.kinds[0]
    batches = [(repr(SHORT), [SHORT])]
    if tokens >= 2 * len(many_texts(1)):
        many = many_texts(min(32, tokens // 36))
        batches.append((f"a batch of {len(many)} texts", many))
        words = min(model.max_length or LONGEST_PROBE, LONGEST_PROBE, tokens)
        batches.append((f"a text of {words} words", [" ".join((SENTENCE * words).split()[:words])]))
    try:
        return [(what, texts, model.encode(kind, texts)) for what, texts in batches]
    except (RuntimeError, NotImplementedError, TypeError):
        return []


def stored_type_check(model: Loaded, stored: list[tuple[str, list[str], Any]]) -> Check:
    """Compares the vectors in half precision, which readers on a GPU get, with those in float32."""
    import numpy as np

    kind, furthest = model.dtype.removeprefix("torch."), 0.0
    for what, texts, vectors in stored:
        if not np.isfinite(vectors).all():
            return Check("stored type", False, f"{what} gives NaN or infinity in {kind}, the type of the weights")
        away = difference(vectors, model.encode(model.kinds[0], texts))
        if away > 0.25:
            found = f"{what} gives another vector in {kind}, the type of the weights, by {away:.1e}"
            return Check("stored type", False, f"{found}: store them in float32 or bfloat16")
        furthest = max(furthest, away)
    return Check("stored type", True, f"the same in {kind} to {furthest:.0e}: {', '.join(what for what, *_ in stored)}")
