"""Settings of a run: which of them affect the result, and how two runs differ in them."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from revela_hub.data.sources.source import HUB_ADDRESS, HUB_PREFIX
from revela_hub.data.sources.unicode import printable_name
from revela_hub.digests import content_digest
from revela_hub.hub_cards.method import Method
from revela_hub.paths import local_path

# Arguments of every trainer that do not affect the result, by exact name; those of one method are in its record. All other
# arguments are compared when a run resumes, including any that a later version of transformers adds.
NO_EFFECT = {
    *("output_dir", "overwrite", "allow_changes", "quiet", "resume_from_checkpoint", "cache_dir", "trust_remote_code"),
    # logging
    *("logging_strategy", "logging_steps", "logging_first_step", "logging_dir", "logging_nan_inf_filter", "log_level"),
    *("log_level_replica", "log_on_each_node", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id"),
    *("trackio_bucket_id", "trackio_static_space_id", "include_num_input_tokens_seen", "include_tokens_per_second"),
    *("include_for_metrics", "skip_memory_metrics", "debug", "prediction_loss_only", "batch_eval_metrics"),
    # checkpoints and upload
    *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node", "always_save"),
    *("enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "push_to_hub", "hub_model_id", "hub_token"),
    *("hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision"),
    # speed, memory and hardware
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing", "activation_offloading"),
    *("activation_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cpu"),
    *("use_liger_kernel", "liger_kernel_config", "attn_implementation", "torch_empty_cache_steps", "local_rank"),
    *("fsdp", "fsdp_config", "parallelism_config", "distributed_state", "deepspeed_plugin", "dataset_num_proc"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph"),
    *("ddp_backend", "ddp_timeout", "per_device_eval_batch_size", "eval_accumulation_steps", "eval_use_gather_object"),
    *("eval_do_concat_batches", "eval_on_start", "do_train", "do_eval", "do_predict", "milvus_uri"),
    "router_mapping",  # derived from other arguments: the columns of the routes
}
# Arguments of every trainer whose value may be a file or folder. Their default values, and none, never are.
FILE_ARGUMENTS = {"eval_corpus", "probe", "deepspeed"}
# Fields of a model's configuration that do not describe its architecture.
NOT_ARCHITECTURE = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "auto_map"}
# Arguments that set the length of a run, which may grow when it resumes.
LENGTH_ARGUMENTS = {"max_steps", "num_train_epochs"}

_HASH = " (sha256 "


def run_settings(arguments: Any, method: Method) -> dict[str, Any]:
    """Return the arguments that affect the result, as JSON values, with files and folders identified by their content."""
    ignored = NO_EFFECT | method.neutral_settings
    return {
        entry.name: value if value == entry.default else _map_paths(entry.name, value, method, content_identity)
        for entry in fields(arguments)
        for value in [plain(getattr(arguments, entry.name))]
        if entry.name not in ignored
    }


def shown(name: str, value: Any, method: Method) -> Any:
    """Return an argument's value for a model card: files and folders of this machine without their parent folders."""
    return _map_paths(name, plain(value), method, lambda path: printable_name(path.resolve().name), missing=True)


def _map_paths(name: str, value: Any, method: Method, replace: Callable[[Path], str], *, missing: bool = False) -> Any:
    """Replace the files and folders in a value; with `missing`, also patterns and paths that do not exist."""
    if isinstance(value, list):
        return [_map_paths(name, item, method, replace, missing=missing) for item in value]
    if isinstance(value, dict):
        names = {key: name if key in ("path", "data_files") else "" for key in value}
        return {key: _map_paths(names[key], item, method, replace, missing=missing) for key, item in value.items()}
    if not isinstance(value, str) or not value or value == "none" or value.startswith(HUB_ADDRESS):
        return value
    prefix = next((kind for kind in ("lm:", HUB_PREFIX) if value.startswith(kind)), "")  # lm: a pseudo-query generator
    path = local_path(value.removeprefix(prefix))
    absolute = path.is_absolute()
    # Any other argument is not a path, even if a file of that name exists in the working folder.
    names_file = name in FILE_ARGUMENTS or name in (*method.models, *method.data, *method.files)
    local = os.path.exists(path) or (missing and absolute and (names_file or name == "exclude"))
    return prefix + replace(path) if local and (names_file or absolute) else value


def content_identity(path: Path) -> str:
    """Return a path's name and a digest of its content, which a move does not change; of an empty folder, a digest of its path."""
    path = path.resolve()
    return f"{printable_name(path.name)}{_HASH}{content_digest(path)[:12]})"


def model_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a model's configuration that describe its architecture: `pooling`, `lm.hidden_size`, ..."""

    def leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")
            elif not str(name).startswith("_") and name not in NOT_ARCHITECTURE:
                yield f"{prefix}{name}", plain(value)

    return dict(leaves(config.to_dict(), ""))


def changes(before: dict[str, Any], now: dict[str, Any], method: Method) -> dict[str, tuple[Any, Any]]:
    """Return the settings whose values differ: name -> (before, now). Settings of only one of the two runs are ignored."""
    ignored = NO_EFFECT | method.neutral_settings
    return {
        name: (before[name], now[name])
        for name in before
        if name in now and name not in ignored and before[name] != now[name]
    }


def without_names(value: Any) -> Any:
    """Return a setting with the digests of files and folders, but without their names, which may differ between nodes."""
    return _map_strings(value, lambda text: text.rpartition(_HASH)[2])


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _map_strings(item, change) for key, item in value.items()}
    return change(value) if isinstance(value, str) else value


def sample_rows(dataset: Any, number: int) -> list[dict[str, Any]]:
    """Return evenly spaced rows of a data set, or of each data set in a dict."""
    if isinstance(dataset, dict):
        return [row for part in dataset.values() for row in sample_rows(part, number)]
    if not len(dataset):
        return []
    last = len(dataset) - 1
    return [dataset[i] for i in sorted({round(i * last / max(1, number - 1)) for i in range(number)})]


def rows_digest(dataset: Any, without: str = "") -> str:
    """Return the number of rows of a data set and a digest of some of them, without one of the columns."""
    count = sum(map(len, dataset.values())) if isinstance(dataset, dict) else len(dataset)
    sample = sample_rows(dataset, 64)
    if without:
        sample = [{name: value for name, value in row.items() if name != without} for row in sample]
    rows = json.dumps(sample, default=str, sort_keys=True)
    return f"{count} rows, {hashlib.sha256(rows.encode()).hexdigest()[:12]}"


@torch.no_grad()
def weights_digest(weights: Iterable[Tensor]) -> str:
    """Return a digest of the first values of weights; empty without weights."""
    first = [p.flatten()[:4].float() for p in weights if p.numel()]
    if not first:
        return ""
    values = torch.cat(first).cpu().contiguous()
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]


def plain(value: Any) -> Any:
    """Return a value as JSON types; of a dataclass, the fields that differ from their defaults, or None."""
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
