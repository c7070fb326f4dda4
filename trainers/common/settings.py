"""The settings of a run: which of them affect its result, and how two runs differ in them."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from revela_hub.renamed import with_new_names

# Arguments that do not affect the result, by their exact names: what is printed, stored, sent or how fast it goes. Every other
# one is compared when a run is resumed, those that a later transformers adds among them.
NO_EFFECT = {
    *("output_dir", "overwrite", "allow_changes", "quiet", "resume_from_checkpoint", "cache_dir", "trust_remote_code"),
    # said and reported
    *("logging_strategy", "logging_steps", "logging_first_step", "logging_dir", "logging_nan_inf_filter", "log_level"),
    *("log_level_replica", "log_on_each_node", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id"),
    *("trackio_bucket_id", "trackio_static_space_id", "include_num_input_tokens_seen", "include_tokens_per_second"),
    *("include_for_metrics", "skip_memory_metrics", "debug", "prediction_loss_only", "batch_eval_metrics"),
    # stored and sent
    *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node", "always_save"),
    *("enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "push_to_hub", "hub_model_id", "hub_token"),
    *("hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision"),
    # how fast, in how much memory, on what
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing", "activation_offloading"),
    *("activation_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cpu"),
    *("use_liger_kernel", "liger_kernel_config", "attn_implementation", "torch_empty_cache_steps", "local_rank"),
    *("fsdp", "fsdp_config", "parallelism_config", "distributed_state", "deepspeed_plugin", "dataset_num_proc"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph"),
    *("ddp_backend", "ddp_timeout", "per_device_eval_batch_size", "eval_accumulation_steps", "eval_use_gather_object"),
    *("eval_do_concat_batches", "eval_on_start", "do_train", "do_eval", "do_predict", "milvus_uri"),
    *("mini_batch_size", "mini_batch_num_tokens", "lm_batch_size", "likelihood_batch_size"),
    *("encode_batch_size",),
    # follow from others: a probe's place from the probe, the experts' columns from the data
    *("held_out", "router_mapping"),
}
# Arguments whose value may be a place on this machine, and the words that are none.
PLACES = {
    *("data", "corpus", "plain_text", "pairs", "mixture", "eval_corpus", "probe", "pseudo_labels", "query_generator"),
    *("retriever", "lm", "encoder", "query_encoder", "backbone", "reader", "deepspeed"),
}
WORDS = {"auto", "none", "bm25", "extractive"}
# Arguments that name data of which a checkpoint's record has the rows' digest.
OF_THE_ROWS = {"data", "plain_text", "pairs", "mixture"}
NOT_THE_FORM = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "auto_map"}
# How long the run goes on: a run may be made longer.
LENGTH = {"max_steps", "num_train_epochs"}

WHOLE = 256 * 2**20
"""Bytes of a file up to which all of it is in a digest; of a larger one blocks at equal distances."""
BLOCKS, BLOCK = 1024, 2**16
_HASH = " (sha256 "


def run_settings(arguments: Any) -> dict[str, Any]:
    """Return the fields of a run's arguments that affect its result, as JSON holds them, and places by their content."""
    return {
        entry.name: _identified(entry.name, getattr(arguments, entry.name))
        for entry in fields(arguments)
        if entry.name not in NO_EFFECT
    }


def shown(name: str, value: Any) -> Any:
    """Return an argument's value as a card shows it: what is a place on this machine by its last name alone."""
    return _map_places(name, plain(value), lambda path: path.expanduser().resolve().name)


def _identified(name: str, value: Any) -> Any:
    """Return an argument's value for comparison: what is a place on this machine by its last name and a digest."""
    return _map_places(name, plain(value), _identity)


def _map_places(name: str, value: Any, of: Any) -> Any:
    if isinstance(value, list):
        return [_map_places(name, item, of) for item in value]
    if isinstance(value, dict):
        return {key: _map_places(name if key == "path" else "", item, of) for key, item in value.items()}
    if not isinstance(value, str) or not value or value in WORDS:
        return value
    kind = "lm:" if value.startswith("lm:") else ""  # of a pseudo-query generator
    path = Path(value.removeprefix(kind))
    named = name in PLACES or path.is_absolute()  # any other word is a word, whatever lies in the working folder
    return kind + of(path) if named and os.path.exists(path.expanduser()) else value


def _identity(path: Path) -> str:
    """Return the last name of a place, with a digest of its content: the same after a move; of the place if it is empty."""
    place = path.expanduser().resolve()
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if _counts(file, place))
    digest = hashlib.sha256(b"" if files else str(place).encode())
    for file in files:
        digest.update(f"{file.relative_to(place).as_posix()} {file.stat().st_size}\n".encode())
        _update(digest, file)
    return f"{place.name}{_HASH}{digest.hexdigest()[:12]})"


def _counts(file: Path, folder: Path) -> bool:
    """Whether a file is content: not hidden, nor a folder's description."""
    return (
        file.is_file()
        and file.name not in ("README.md", "LICENSE")
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _update(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE:
            while block := stream.read(2**20):
                digest.update(block)
            return
        for number in range(BLOCKS):
            stream.seek(number * (size - BLOCK) // (BLOCKS - 1))
            digest.update(stream.read(BLOCK))


def model_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """What a model's configuration says of its form: `pooling`, `lm.hidden_size`, ..."""

    def leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")
            elif not str(name).startswith("_") and name not in NOT_THE_FORM:
                yield f"{prefix}{name}", plain(value)

    return dict(leaves(config.to_dict(), ""))


def changes(before: dict[str, Any], now: dict[str, Any], *, by_name: bool = False) -> dict[str, tuple[Any, Any]]:
    """Return what both say and say differently: the name, and both values.

    Args:
        before: settings of a record.
        now: those of the run.
        by_name: whether the record, an older version's, has places by their last name alone.
    """
    before = with_new_names(before, now)
    return {
        name: (before[name], now[name])
        for name in before
        if name in now
        and name not in NO_EFFECT
        and before[name] != (_without_digests(now[name]) if by_name else now[name])
    }


def _without_digests(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_digests(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_digests(item) for key, item in value.items()}
    return value.partition(_HASH)[0] if isinstance(value, str) else value


def sample_rows(dataset: Any, number: int) -> list[dict[str, Any]]:
    """Some rows of a data set, or of each of several under their names, at equal distances from the first to the last."""
    if isinstance(dataset, dict):
        return [row for part in dataset.values() for row in sample_rows(part, number)]
    last = len(dataset) - 1
    return (
        [dataset[i] for i in sorted({round(i * last / max(1, number - 1)) for i in range(number)})] if last >= 0 else []
    )


def rows_digest(dataset: Any) -> str:
    """Stands for the rows of a data set: their number, and some of them."""
    count = sum(map(len, dataset.values())) if isinstance(dataset, dict) else len(dataset)
    rows = json.dumps(sample_rows(dataset, 64), default=str, sort_keys=True)
    return f"{count} rows, {hashlib.sha256(rows.encode()).hexdigest()[:12]}"


@torch.no_grad()
def frozen_digest(model: nn.Module) -> str:
    """Stands for the weights that a checkpoint does not hold because they are not trained; empty where there are none."""
    frozen = [p.flatten()[:4].float() for p in model.parameters() if not p.requires_grad and p.numel()]
    if not frozen:
        return ""
    values = torch.cat(frozen).cpu().contiguous()
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]


def plain(value: Any) -> Any:
    """Return a value as JSON holds it; of a dataclass what differs from its defaults, None if nothing does."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = {entry.name: getattr(value, entry.name) for entry in fields(value) if hasattr(value, entry.name)}
        defaults = {entry.name: entry.default for entry in fields(value)}
        return {name: plain(of) for name, of in own.items() if of != defaults[name]} or None
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
