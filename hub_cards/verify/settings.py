"""Where the settings of a folder contradict each other: pooling, the order of modules, prompts, similarity, vocabularies.

Libraries take one of two values without a word, and not all of them the same one.
Part of `verify.py`'s clean process: standard library and siblings only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .contents import module_folders, read_json

_SIMILARITIES = ("cosine", "dot", "dot_score", "euclidean", "manhattan", "maxsim", "meanmaxsim")
_MODES = {
    "cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken",
}  # fmt: skip


def setting_faults(folder: Path) -> Iterator[str]:
    """Yield what in the settings cannot all be true.

    Args:
        folder: the model.
    """
    yield from _prompts_and_similarity(folder)
    yield from _order(folder)
    for place in sorted(module_folders(folder)):
        yield from _pooling(f"{place}/config.json", read_json(folder / place / "config.json"))
    for place in ["", *sorted(module_folders(folder))]:
        if isinstance(stored := read_json(folder / place / "tokenizer.json"), dict):
            yield from _vocabulary(folder / place, stored)


def _prompts_and_similarity(folder: Path) -> Iterator[str]:
    name = "config_sentence_transformers.json"
    if not isinstance(config := read_json(folder / name), dict):
        return
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        yield f"{name}: prompts is not a table of names and texts: {str(prompts)[:60]}"
    elif default is not None and default not in prompts:
        yield f"{name}: default_prompt_name is {default!r}, which is not the name of a prompt"
    if (similarity := config.get("similarity_fn_name")) is not None and similarity not in _SIMILARITIES:
        yield f"{name}: similarity_fn_name is {similarity!r}, which no library knows: one of {', '.join(_SIMILARITIES)}"


def _order(folder: Path) -> Iterator[str]:
    """sentence-transformers goes by the list, others by `idx`; a Normalize before the Pooling does nothing."""
    listed = read_json(folder / "modules.json")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    numbers = [entry["idx"] for entry in entries if isinstance(entry.get("idx"), int)]
    if numbers != sorted(set(numbers)):
        yield f"modules.json: the order of the modules is not that of their idx, which are {numbers}"
    kinds = [str(entry.get("type")).rpartition(".")[2] for entry in entries]
    if "Normalize" in kinds and "Pooling" in kinds[kinds.index("Normalize") :]:
        yield "modules.json: Normalize stands before Pooling, where it does nothing: put it behind"


def _pooling(where: str, config: Any) -> Iterator[str]:
    """The form before sentence-transformers 6 has a switch for each mode, the new one a name; some files have both."""
    switches = (
        {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
        if isinstance(config, dict)
        else {}
    )
    on = {key.removeprefix("pooling_mode_") for key, value in switches.items() if value}
    mode = config.get("pooling_mode") if switches else None
    if isinstance(mode, str) and on != {_MODES.get(mode, mode)}:
        yield f"{where}: pooling_mode is {mode}, but the switches say {', '.join(sorted(on)) or 'none'}"
    elif mode is None and len(switches) > 1 and not on:
        yield f"{where}: every pooling_mode is false: set one to true"


def _vocabulary(folder: Path, stored: dict[str, Any]) -> Iterator[str]:
    """Libraries without tokenizer.json read vocab.txt, or vocab.json and merges.txt; they would give other tokens."""
    model = stored.get("model")
    if not isinstance(model, dict) or not isinstance(vocabulary := model.get("vocab"), dict):
        return
    known = {number: token for token, number in vocabulary.items()}
    for token in stored.get("added_tokens") or ():
        text, number = token.get("content"), token.get("id")
        if known.get(number, text) != text:
            yield f"tokenizer.json: the id {number} is of {known[number]!r} and of the added token {text!r}"
    other: dict[str, int] = {}
    if model.get("type") == "WordPiece" and (file := folder / "vocab.txt").is_file():
        other = {line: number for number, line in enumerate(file.read_text("utf-8", "replace").split("\n")) if line}
    if model.get("type") == "BPE" and isinstance(found := read_json(file := folder / "vocab.json"), dict):
        other = found
    for token, number in other.items():
        if vocabulary.get(token, number) != number:
            yield f"{file.name}: {token!r} is the token {number}, in tokenizer.json {vocabulary[token]}: save the tokenizer again"
            return
    if model.get("type") == "BPE" and (file := folder / "merges.txt").is_file():
        lines = [line.rstrip("\r") for line in file.read_text("utf-8", "replace").split("\n")]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or ()]
        if [line for line in lines if line and not line.startswith("#version")] != merges:
            yield "merges.txt has other merges than tokenizer.json: save the tokenizer again"
