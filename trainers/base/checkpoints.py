"""Checkpoints of the Trainer, and the record of a run in its output folder.

The Trainer writes `trainer_state.json` last, so a checkpoint with that file is complete.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

RECORD = "run.json"
# Options that do not change the trained weights, or that a trainer sets itself.
_WITHOUT_EFFECT = re.compile(
    "output_dir|overwrite|quiet|resume_from_checkpoint|cache_dir|trust_remote_code|disable_tqdm|use_cpu|local_rank|debug"
    "|report_to|run_name|project|trackio_.*|log_.*|logging_.*|save_.*|hub_.*|push_to_hub|remove_unused_columns"
    "|dataloader_(num_|pin_|persist|prefetch|multi).*|(dataset_)?num_proc|accelerator_config|ddp_.*|fsdp.*|deepspeed.*"
    "|distributed_state|parallelism_config|do_(train|eval|predict)|eval_on_start|router_mapping|prompts|attn_implementation"
    "|gradient_checkpointing.*|activation_.*|torch_compile.*|include_.*|prediction_loss_only|mini_batch_size|lm_batch_size"
    "|likelihood_batch_size|encode_batch_size|per_device_eval_batch_size"
)


@dataclass
class RunRecord:
    """Content of `run.json`: options that can change the result, changes of resumed runs, and whether the run was exported."""

    settings: dict[str, Any]
    changes: list[str] = field(default_factory=list)  # `from step 20 on: learning_rate 0.1 (before: 0.2)`
    finished: bool = False

    @classmethod
    def read(cls, output: Path) -> "RunRecord | None":
        """Read the record of an output folder; None if it has none."""
        try:
            return cls(**json.loads((output / RECORD).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, output: Path) -> None:
        """Write the record."""
        (output / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def run_settings(arguments: TrainingArguments) -> dict[str, Any]:
    """Return the options that can change the result of a run, as JSON values."""
    values = {name: value for name, value in arguments.to_dict().items() if not _WITHOUT_EFFECT.fullmatch(name)}
    return json.loads(json.dumps(values, default=str))  # type: ignore[no-any-return]


def checkpoints_in(output: Path) -> list[Path]:
    """Return the checkpoints of an output folder, including incomplete ones."""
    return [path for path in output.glob("checkpoint-*") if path.is_dir() and path.name[11:].isdecimal()]


def last_checkpoint(output: Path) -> Path | None:
    """Return the newest complete checkpoint of an output folder, if any."""
    complete = [path for path in checkpoints_in(output) if is_complete(path)]
    return max(complete, key=lambda at: ((at / TRAINER_STATE_NAME).stat().st_mtime_ns, int(at.name[11:])), default=None)


def is_complete(checkpoint: Path) -> bool:
    """Whether a run can resume from a checkpoint: it has the Trainer's state and the random state of `--save_only_model false`."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return any(checkpoint.glob("rng_state*"))


def how_to_resume(output: Path, resume: str = "the same command and --resume_from_checkpoint last") -> str:
    """Return what an interrupted run has saved and how to continue."""
    checkpoint = last_checkpoint(output)
    return f"{checkpoint} was saved: resume with {resume}" if checkpoint else "no checkpoint was saved: run it again"
