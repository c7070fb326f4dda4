"""What can be said about weights by their files' heads: whole files, complete shards, no adapter that was left unmerged.

Part of `verify.py`'s clean process: standard library and siblings only.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .contents import read_json
from .kinds import known_content

_MODEL = re.compile(r"model(\.\w+)?\.safetensors")
_SHARD = re.compile(r"((?:adapter_)?model(?:\.\w+)?)-(\d{5})-of-(\d{5})\.safetensors")
_INDEX = ".safetensors.index.json"
_ADAPTER_FILE = re.compile(r"adapter_config\.json|adapter_model.*\.(safetensors|bin)")
# How PEFT's methods call their weights: LoRA and its kin, IA3, prompts and prefixes, and the wrapper around all of them.
_ADAPTER_WEIGHT = re.compile(
    r"lora_|ia3_|prompt_embeddings|prompt_encoder|^base_model\.model\.|hada_w|lokr_w|[bh]?oft_|vera_lambda|adaption_"
)
_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT")
_NOT_READ_AS_NUMBERS = ("I", "U", "BOOL", "F8", "F6", "F4")
_LARGEST_HEAD = 100 * 2**20


class NotReadable(ValueError):
    """A file is not what its name says; the message names it and the cause."""


def safetensors_header(file: Path, folder: Path | None = None) -> dict[str, Any]:
    """Returns tensor name -> type, shape and place, from the head of a safetensors file (8 bytes of length, then JSON).

    Raises:
        NotReadable: the file is something else, or not whole.
    """
    name, size = file.relative_to(folder or file.parent), file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if head == b"version ":
            raise NotReadable(f"{name} is a Git-LFS pointer, not the weights: run git lfs pull")
        if len(head) < 8:
            raise NotReadable(f"{name} is {'empty' if not head else 'cut off'}: {size} bytes are no safetensors file")
        (length,) = struct.unpack("<Q", head)
        if length > min(size - 8, _LARGEST_HEAD):
            stream.seek(0)
            what = known_content(stream.read(4096)) or "cut off, or another format"
            raise NotReadable(f"{name} is not a safetensors file: {what}")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError, AttributeError) as error:
            raise NotReadable(f"{name} is not a safetensors file: its header cannot be read") from error
    if (expected := 8 + length + max(ends, default=0)) != size:
        cut = "is cut off" if size < expected else "has bytes behind its last weight"
        raise NotReadable(f"{name} {cut}: {size:,} bytes instead of {expected:,}")
    return header


def tensor_names(file: Path, folder: Path) -> set[str]:
    """The names of a safetensors file's tensors."""
    return set(safetensors_header(file, folder)) - {"__metadata__"}


def weights_faults(folder: Path) -> Iterator[str]:
    """Yields what is wrong with the weights of a model and its modules."""
    files = [file for file in sorted(folder.rglob("*.safetensors")) if not file.parent.name.startswith(".")]
    for file in files:
        yield from _type_faults(file, folder)
    for file in sorted([*folder.glob("*/pytorch_model*.bin"), *folder.glob("*/*/pytorch_model*.bin")]):
        if not any(file.parent.glob("*.safetensors")):
            where = file.relative_to(folder)
            yield f"{where} is a pickle, which can run code on the reader's machine: save the module as safetensors"
    if not files:
        pickled = next((f": {file.name} is one" for file in sorted(folder.glob("*.bin"))), "")
        yield f"no weights in safetensors form (pickled weights can run code on the reader's machine{pickled})"
    places = [file.parent for file in [*files, *sorted(folder.rglob(f"*{_INDEX}"))]]
    for place in sorted(set(places)):
        yield from _shard_faults(place, folder)


def _type_faults(file: Path, folder: Path) -> Iterator[str]:
    header, config = safetensors_header(file, folder), read_json(file.parent / "config.json")
    if isinstance(config, dict) and config.get("quantization_config"):
        return
    for name, entry in header.items():
        if name.endswith(("weight", "bias")) and str(entry.get("dtype", "")).startswith(_NOT_READ_AS_NUMBERS):
            yield f"{name} is stored as {entry['dtype']}, and config.json has no quantization_config to read it with"


def _shard_faults(place: Path, folder: Path) -> Iterator[str]:
    """What is wrong with the shards in a folder, of which each index has to name all, and all weights in them."""
    names = {file.name for file in place.glob("*.safetensors")}
    shards = {name: match for name in sorted(names) if (match := _SHARD.fullmatch(name))}
    first = next(iter(shards), None)
    if first and (single := next((name for name in sorted(names) if _MODEL.fullmatch(name)), None)):
        yield f"{single} lies beside {first}: two sets of weights, of which only the first is loaded"
    for name, match in shards.items():
        stem, _, total = match.groups()
        if not (place / f"{stem}{_INDEX}").is_file():
            yield f"{name} has no {stem}{_INDEX}, without which it is not loaded"
        for number in range(1, int(total) + 1):
            if (other := f"{stem}-{number:05d}-of-{total}.safetensors") not in names:
                yield f"{name} lies there without {other}"
    for index in sorted(place.glob(f"*{_INDEX}")):
        stem = index.name.removesuffix(_INDEX)
        own = {name for name, match in shards.items() if match.group(1) == stem}
        yield from _index_faults(index, own, names, folder)


def _index_faults(index: Path, shards: set[str], names: set[str], folder: Path) -> Iterator[str]:
    where, content = index.relative_to(folder), read_json(index)
    placed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        yield f"{where} has no weight_map from weights to files"
        return
    for name in sorted(set(placed.values())):
        if "/" in name or "\\" in name:
            yield f"{where} names {name}, which is not a file beside it"
            return
        if name not in names:
            yield f"{where} names {name}, which is not in the folder"
            return
        listed, stored = (
            {key for key, file in placed.items() if file == name},
            tensor_names(index.parent / name, folder),
        )
        if missing := sorted(listed - stored):
            yield f"{where}: {missing[0]} is not in {name}"
        if unlisted := sorted(stored - listed):
            yield f"{where} does not name {unlisted[0]} of {name}, which is not loaded then"
    if left := sorted(shards - set(placed.values())):
        yield f"{where} does not name {left[0]}: its weights are not loaded"


def adapter_faults(folder: Path, names: list[str], adapter_only: bool) -> Iterator[str]:
    """Yields which adapters are among the files of a whole model; of an adapter's own folder, what is wrong with it."""
    if adapter_only:
        yield from _own_adapter_faults(folder)
        return
    if (folder / "adapter_config.json").is_file():
        yield "adapter_config.json is in the folder: the LoRA weights were not merged into the model"
    for name in names:
        if what := unmerged(folder / name, folder):
            yield f"{name} {what}: the adapter was not merged into the model"


def unmerged(file: Path, folder: Path) -> str | None:
    """Returns in words by what a file is of an adapter, by its name or the weights in it; None for other files."""
    if file.suffix == ".safetensors":
        try:
            if name := next(
                (name for name in sorted(tensor_names(file, folder)) if _ADAPTER_WEIGHT.search(name)), None
            ):
                return f"holds {name}"
        except (NotReadable, OSError):  # said where weights are checked; one that is no part of the model stays
            pass
    return "is a file of PEFT" if _ADAPTER_FILE.fullmatch(file.name) else None


def _own_adapter_faults(folder: Path) -> Iterator[str]:
    """PEFT ignores weights of another kind than its configuration says, and a reader gets the base model."""
    config = read_json(folder / "adapter_config.json")
    if not isinstance(config, dict):
        yield "adapter_config.json is missing"
        return
    if config.get("peft_type") in _PROMPTS:
        yield f"adapter_config.json: {config['peft_type']} changes prompts, which no reader of an encoder applies"
    files = sorted(folder.glob("adapter_model*.safetensors"))
    if not files:
        yield "adapter_model.safetensors is missing"
    names = sorted(set().union(*(tensor_names(file, folder) for file in files)))
    if config.get("peft_type") == "LORA" and not any("lora_" in name for name in names):
        yield f"adapter_model.safetensors holds no weights of LoRA{f', but {names[0]}' if names else ''}"
