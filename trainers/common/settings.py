"""The settings of a run: which of them change what is learnt, and how two runs differ in them."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

# Fields that change what is printed, stored or measured, or how fast it goes, and not what is learnt; those of which a
# name begins with one of these words, and the rest by their names.
NOT_LEARNT_FROM = (
    "log",
    "save",
    "eval",
    "hub",
    "dataloader",
    "report",
    "push",
    "skip",
    "include",
    "torch_empty",
    "ddp",
    "probe",
    "keep_worse",
    "held_out",
)
NOT_LEARNT = {
    *("output_dir", "overwrite", "allow_changes", "quiet", "resume_from_checkpoint", "cache_dir", "trust_remote_code"),
    *("disable_tqdm", "run_name", "project", "trackio_space_id", "do_train", "do_eval", "do_predict", "debug"),
    *("prediction_loss_only", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "push_to_hub"),
    *("bf16_full_eval", "fp16_full_eval", "batch_eval_metrics", "local_rank", "length_column_name", "always_save"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing", "torch_compile"),
    *("activation_checkpointing_kwargs", "torch_compile_backend", "torch_compile_mode", "use_cpu", "tf32"),
    *("fsdp", "fsdp_config", "deepspeed", "accelerator_config", "parallelism_config", "distributed_state"),
    *("enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "use_liger_kernel", "liger_kernel_config"),
    *("mini_batch_size", "mini_batch_num_tokens", "attn_implementation", "export_max_length", "query_instruction"),
    *("ignore_data_skip", "average_tokens_across_devices", "deepspeed_plugin", "milvus_uri", "router_mapping"),
}
NOT_THE_FORM = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "auto_map"}
# How long the run goes on: a run may be made longer.
LENGTH = {"max_steps", "num_train_epochs"}


def run_settings(arguments: Any) -> dict[str, Any]:
    """The fields of a run's arguments that change what is learnt, as JSON holds them; folders by their last name alone."""
    return {
        entry.name: plain(getattr(arguments, entry.name))
        for entry in fields(arguments)
        if entry.name not in NOT_LEARNT and not entry.name.startswith(NOT_LEARNT_FROM)
    }


def model_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """What a model's configuration says of its form: `pooling`, `lm.hidden_size`, ..."""

    def leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")
            elif not str(name).startswith("_") and name not in NOT_THE_FORM:
                yield f"{prefix}{name}", plain(value)

    return dict(leaves(config.to_dict(), ""))


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What both say and say differently: the name, and both values."""
    return {name: (before[name], now[name]) for name in before if name in now and before[name] != now[name]}


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
    """A value as JSON holds it; what exists on this machine by its name alone."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str):
        kind = "lm:" if value.startswith("lm:") else ""
        path = value.removeprefix(
            kind
        )  # of what is here the name alone: nothing of this machine, the same after a move
        return kind + Path(path).resolve().name if path and os.path.exists(path) else value
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
