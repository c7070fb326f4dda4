"""Check a loaded model: all weights are there and as in the files, and its embeddings are right (`vectors.py`)."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel

from .files import Check
from .loading import LoadedModel, UnknownKind
from .onnx_files import check_onnx
from .texts import LONGEST_PROBE, SENTENCE, SHORT, many_texts
from .vectors import check_vectors, difference

_HALF = {"torch.float16", "torch.bfloat16"}
_MAX_HALF_OPERATIONS = 2e11  # per batch in half precision, which many processors do not support natively


def check_model(
    folder: Path, trust_remote_code: bool, adapter_only: bool, reference: Path | None, vectors: Path | None
) -> Iterator[Check]:
    """Yield the checks that load the model; see `verify` for the arguments."""
    loads = _record_loads()
    try:
        model = LoadedModel(folder, trust_remote_code, vectors)
    except UnknownKind as error:
        yield Check("folder", False, str(error))
        return
    except Exception as error:  # readers would get the same error
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        if not trust_remote_code and "trust_remote_code" in str(error):
            detail = "the model requires remote code: read the code, and add --trust_remote_code to run it"
        yield Check("loading", False, detail)
        return
    yield Check("loading", True, f"{model.how}, {model.parameters:,} parameters, {model.dtype}")
    weights = model.module.state_dict().items()
    bad = [name for name, tensor in weights if tensor.is_floating_point() and not tensor.isfinite().all()]
    yield _weights_check(folder, model, loads, adapter_only)
    yield Check("values", not bad, f"{bad[0]} contains NaN or infinity" if bad else "all weights are finite")
    if not model.kinds:
        yield Check("vectors", True, "not checked: the inputs of the model are not single texts")
    if bad or not model.kinds:
        return
    stored = _in_stored_type(model) if model.dtype in _HALF else []
    model.module.float()  # so that differences between embeddings are faults, not rounding errors
    if stored:
        yield stored_type_check(model, stored)
    yield from check_vectors(model, reference)
    yield from check_onnx(folder, model)


# --- weights


def _record_loads() -> list[tuple[Any, dict[str, Any]]]:
    """Record each model that transformers loads, and its missing, unexpected and mismatched weights."""
    loads: list[tuple[Any, dict[str, Any]]] = []
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def recording(cls: type, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("output_loading_info", False)
        model, report = original(cls, *args, output_loading_info=True, **kwargs)
        model.loaded_from = kwargs.get("subfolder") or ""  # the folder of a Router's route
        loads.append((model, report))
        return (model, report) if wanted else model

    PreTrainedModel.from_pretrained = classmethod(recording)  # type: ignore[assignment]
    return loads


def _weights_check(
    folder: Path, model: LoadedModel, loads: list[tuple[Any, dict[str, Any]]], adapter_only: bool
) -> Check:
    notes: list[str] = []
    faults = [fault for part, report in loads if (fault := _loading_fault(model, part, report, notes))]
    compared = 0
    for part in [] if adapter_only or faults else [part for part, _ in loads]:
        faults += _untied(folder, part)
        for name, same in _compared_with_files(folder, part):
            compared += 1
            if not same:
                faults.append(f"{name} was initialized again: it has other values in memory than in the file")
    fine = "none missing, unexpected or initialized again" + f" ({compared} compared)" * (not adapter_only)
    return Check("weights", not faults, faults[0] if faults else "; ".join([fine, *notes]))


def _loading_fault(model: LoadedModel, part: Any, report: dict[str, Any], notes: list[str]) -> str:
    """Return a fault in transformers' report about the weights, or add notes on harmless differences."""
    mismatched, missing, extra = (
        set(map(str, report.get(f"{kind}_keys") or ())) for kind in ("mismatched", "missing", "unexpected")
    )
    if mismatched:
        return f"{_and_more(mismatched)}: shape differs from the model's"
    if unread := {name for name in missing if model.kinds and not _is_used(model, part, name)}:
        notes.append(f"{_and_more(unread)} not in the file, but not used either")
    if missing - unread:
        return f"{_and_more(missing - unread)}: not in the file, would be initialized at random"
    whole = _whole(part) if extra else part
    head = extra & set(whole.state_dict()) if not isinstance(part, type(whole)) else set()
    if head:
        notes.append(f"{_and_more(head)} of {_architecture(part)}, not needed here")
    return f"{_and_more(extra - head)}: in the file, but not in the model" if extra - head else ""


def _and_more(names: set[str]) -> str:
    return min(names) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _is_used(model: LoadedModel, part: Any, name: str) -> bool:
    """Return whether the embeddings depend on a weight, unlike on BERT's pooler."""
    tensor = part.state_dict().get(name)
    if tensor is None:
        return True
    try:
        with torch.no_grad():
            before, kept = model.encode(model.kinds[0], [SHORT]), tensor.clone()
            tensor.add_(1.0)
            after = model.encode(model.kinds[0], [SHORT])
            tensor.copy_(kept)
    except Exception:  # reported by check_vectors
        return True
    return bool((before != after).any())


def _architecture(part: Any) -> str:
    return str(next(iter(getattr(part.config, "architectures", None) or ()), ""))


def _whole(part: Any) -> Any:
    """Return the model that config.json names, without weights, if transformers has its class; otherwise the part."""
    whole = getattr(transformers, _architecture(part), type(part))
    if not whole.__module__.startswith("transformers."):
        return part
    with torch.device("meta"):
        return whole(part.config)


def _stored(folder: Path, part: Any) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield the name of each tensor in the files of a loaded model, and a function that reads it."""
    for file in sorted((folder / part.loaded_from).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, partial(tensors.get_tensor, name)


def _untied(folder: Path, part: Any) -> Iterator[str]:
    """Yield tied matrices that differ in the file: which one is used depends on the library."""
    whole = _whole(part)
    prefix, ties = f"{whole.base_model_prefix}.", getattr(whole, "all_tied_weights_keys", None) or {}
    pairs = [(one.removeprefix(prefix), two.removeprefix(prefix)) for one, two in ties.items()]
    wanted = {name for pair in pairs for name in pair}
    names = ((name.removeprefix(prefix), read) for name, read in _stored(folder, part))
    found = {name: read() for name, read in names if name in wanted}
    for one, two in pairs:
        if one in found and two in found and not torch.equal(found[one], found[two]):
            yield f"{one} and {two} differ in the file, but config.json ties them: set tie_word_embeddings to false"


def _compared_with_files(folder: Path, model: Any) -> Iterator[tuple[str, bool]]:
    loaded, prefix = model.state_dict(), f"{model.base_model_prefix}."
    for name, read in _stored(folder, model):
        tensor = loaded.get(name, loaded.get(name.removeprefix(prefix)))
        if tensor is not None:
            stored = read().to(tensor.dtype)
            yield name, stored.shape == tensor.shape and torch.equal(stored.nan_to_num(), tensor.nan_to_num())


# --- half precision


def _in_stored_type(model: LoadedModel) -> list[tuple[str, list[str], Any]]:
    """Return (label, texts, embeddings) of a short text, a batch and a long text, in the type of the stored weights.

    Empty if the processor does not support the type; only the short text if the others would take minutes.
    """
    tokens, kind = model.tokens_in_all(_MAX_HALF_OPERATIONS), model.kinds[0]
    batches = [(repr(SHORT), [SHORT])]
    if tokens >= 2 * len(many_texts(1)):
        many = many_texts(min(32, tokens // 36))
        batches.append((f"a batch of {len(many)} texts", many))
        words = min(model.max_length or LONGEST_PROBE, LONGEST_PROBE, tokens)
        batches.append((f"a text of {words} words", [" ".join((SENTENCE * words).split()[:words])]))
    try:
        return [(label, texts, model.encode(kind, texts)) for label, texts in batches]
    except (RuntimeError, NotImplementedError, TypeError):
        return []


def stored_type_check(model: LoadedModel, stored: list[tuple[str, list[str], Any]]) -> Check:
    """Compare embeddings in half precision, which readers get on a GPU, with those in float32."""
    kind, largest = model.dtype.removeprefix("torch."), 0.0
    for label, texts, vectors in stored:
        if not np.isfinite(vectors).all():
            return Check("stored type", False, f"{label} gives NaN or infinity in {kind}, the type of the weights")
        distance = difference(vectors, model.encode(model.kinds[0], texts))
        if distance > 0.25:
            found = f"the vector of {label} in {kind}, the type of the weights, differs from float32 by {distance:.1e}"
            return Check("stored type", False, f"{found}: store the weights in float32 or bfloat16")
        largest = max(largest, distance)
    labels = ", ".join(label for label, *_ in stored)
    return Check("stored type", True, f"{kind} and float32 agree to {largest:.0e}: {labels}")
