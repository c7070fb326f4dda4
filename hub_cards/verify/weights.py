"""Check weights by the headers of their files: complete files, all shards, no unmerged adapter."""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .contents import read_json
from .kinds import known_content

_SINGLE_FILE = re.compile(r"model(\.\w+)?\.safetensors")
_SHARD = re.compile(r"((?:adapter_)?model(?:\.\w+)?)-(\d{5})-of-(\d{5})\.safetensors")
_INDEX = ".safetensors.index.json"
_ADAPTER_FILE = re.compile(r"adapter_config\.json|adapter_model.*\.(safetensors|bin)")
# Names of weights in PEFT: LoRA and its variants, IA3, prompts and prefixes, and the wrapper around all of them.
_ADAPTER_WEIGHT = re.compile(
    r"lora_|ia3_|prompt_embeddings|prompt_encoder|^base_model\.model\.|hada_w|lokr_w|[bh]?oft_|vera_lambda|adaption_"
)
_PROMPT_TYPES = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT")
_QUANTIZED_TYPES = ("I", "U", "BOOL", "F8", "F6", "F4")
_MAX_HEADER_BYTES = 100 * 2**20


class NotReadable(ValueError):
    """A file is not what its name says; the message contains the name and the cause."""


def safetensors_header(file: Path, folder: Path | None = None) -> dict[str, Any]:
    """Return tensor name -> dtype, shape and offsets from the header of a safetensors file.

    Raises:
        NotReadable: the file has another format, or is incomplete.
    """
    name, size = file.relative_to(folder or file.parent), file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if head == b"version ":
            raise NotReadable(f"{name} is a Git LFS pointer, not the weights: run git lfs pull")
        if len(head) < 8:
            raise NotReadable(f"{name} is {'truncated' if head else 'empty'}: {size} bytes are too few for safetensors")
        (length,) = struct.unpack("<Q", head)
        if length > min(size - 8, _MAX_HEADER_BYTES):
            stream.seek(0)
            what = known_content(stream.read(4096)) or "truncated, or another format"
            raise NotReadable(f"{name} is not a safetensors file: {what}")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            expected = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError, AttributeError) as error:
            raise NotReadable(f"{name} is not a safetensors file: its header cannot be read") from error
    if expected != size:
        problem = "is truncated" if size < expected else "has extra bytes after the last weight"
        raise NotReadable(f"{name} {problem}: {size:,} bytes instead of {expected:,}")
    return header


def tensor_names(file: Path, folder: Path) -> set[str]:
    """Return the names of the tensors in a safetensors file."""
    return set(safetensors_header(file, folder)) - {"__metadata__"}


def weights_faults(folder: Path) -> Iterator[str]:
    """Yield faults in the weights of a model and its modules."""
    files = [file for file in sorted(folder.rglob("*.safetensors")) if not file.parent.name.startswith(".")]
    for file in files:
        yield from _type_faults(file, folder)
    for file in sorted([*folder.glob("*/pytorch_model*.bin"), *folder.glob("*/*/pytorch_model*.bin")]):
        if not any(file.parent.glob("*.safetensors")):
            yield f"{file.relative_to(folder)} is a pickle, which can run code when loaded: save the module as safetensors"
    if not files:
        pickled = next((f", such as {file.name}," for file in sorted(folder.glob("*.bin"))), "")
        yield f"no safetensors weights (pickled weights{pickled} can run code when loaded)"
    for place in sorted({file.parent for file in [*files, *sorted(folder.rglob(f"*{_INDEX}"))]}):
        yield from _shard_faults(place, folder)


def _type_faults(file: Path, folder: Path) -> Iterator[str]:
    header = safetensors_header(file, folder)
    if read_json(file.parent / "config.json", {}).get("quantization_config"):
        return
    for name, entry in header.items():
        if name.endswith(("weight", "bias")) and str(entry.get("dtype", "")).startswith(_QUANTIZED_TYPES):
            yield f"{name} is stored as {entry['dtype']}, but config.json has no quantization_config"


def _shard_faults(place: Path, folder: Path) -> Iterator[str]:
    """Yield faults of the shards in a folder: each index must list all shards, and all weights in them."""
    names = {file.name for file in place.glob("*.safetensors")}
    shards = {name: match for name in sorted(names) if (match := _SHARD.fullmatch(name))}
    first = next(iter(shards), None)
    if first and (single := next((name for name in sorted(names) if _SINGLE_FILE.fullmatch(name)), None)):
        yield f"the folder contains both {single} and {first}: only the first is loaded, delete one set of weights"
    for name, match in shards.items():
        stem, _, total = match.groups()
        if not (place / f"{stem}{_INDEX}").is_file():
            yield f"{name} is not loaded, because {stem}{_INDEX} is missing"
        for number in range(1, int(total) + 1):
            if (other := f"{stem}-{number:05d}-of-{total}.safetensors") not in names:
                yield f"{name} is there, but {other} is missing"
    for index in sorted(place.glob(f"*{_INDEX}")):
        stem = index.name.removesuffix(_INDEX)
        own = {name for name, match in shards.items() if match.group(1) == stem}
        yield from _index_faults(index, own, names, folder)


def _index_faults(index: Path, shards: set[str], names: set[str], folder: Path) -> Iterator[str]:
    where, placed = index.relative_to(folder), read_json(index, {}).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        yield f"{where} has no weight_map from weights to files"
        return
    for name in sorted(set(placed.values())):
        if "/" in name or "\\" in name:
            yield f"{where} refers to {name}, which is not a file in the same folder"
            return
        if name not in names:
            yield f"{where} refers to {name}, which is missing"
            return
        listed = {key for key, file in placed.items() if file == name}
        stored = tensor_names(index.parent / name, folder)
        if missing := sorted(listed - stored):
            yield f"{where}: {missing[0]} is not in {name}"
        if unlisted := sorted(stored - listed):
            yield f"{where} does not list {unlisted[0]} of {name}, which would not be loaded"
    if left := sorted(shards - set(placed.values())):
        yield f"{where} does not list {left[0]}, whose weights would not be loaded"


def adapter_faults(folder: Path, names: list[str], adapter_only: bool) -> Iterator[str]:
    """Yield unmerged adapters among the files of a model, or the faults of a folder that holds only an adapter."""
    if adapter_only:
        yield from _own_adapter_faults(folder)
        return
    if (folder / "adapter_config.json").is_file():
        yield "the folder contains adapter_config.json: merge the LoRA weights into the model"
    for name in names:
        if what := unmerged(folder / name, folder):
            yield f"{name} {what}: merge the adapter into the model"


def unmerged(file: Path, folder: Path) -> str | None:
    """Return why a file is part of an adapter, judged by its name and weights; None for other files."""
    if file.suffix == ".safetensors":
        try:
            if found := [name for name in sorted(tensor_names(file, folder)) if _ADAPTER_WEIGHT.search(name)]:
                return f"contains the adapter weight {found[0]}"
        except (NotReadable, OSError):  # reported by weights_faults, if the file belongs to the model
            pass
    return "is a PEFT file" if _ADAPTER_FILE.fullmatch(file.name) else None


def _own_adapter_faults(folder: Path) -> Iterator[str]:
    """PEFT ignores weights of another type than `peft_type`, so that readers get the base model."""
    if not (config := read_json(folder / "adapter_config.json", {})):
        yield "adapter_config.json is missing"
        return
    kind = config.get("peft_type")
    if kind in _PROMPT_TYPES:
        yield f"adapter_config.json: {kind} adapters change prompts, which encoders do not apply"
    files = sorted(folder.glob("adapter_model*.safetensors"))
    if not files:
        yield "adapter_model.safetensors is missing"
    names = sorted(set().union(*(tensor_names(file, folder) for file in files)))
    if kind == "LORA" and not any("lora_" in name for name in names):
        yield f"adapter_model.safetensors has no LoRA weights{f', but {names[0]}' if names else ''}"
