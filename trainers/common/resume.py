"""Which checkpoint a run goes on from."""

from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from revela_hub.errors import UserError


def checkpoint_to_resume(arguments: TrainingArguments) -> str | None:
    """The folder to resume from: the one given, or the last one of the output folder for `last`; None to start anew.

    Raises:
        UserError: there is no such checkpoint.
    """
    wanted = arguments.resume_from_checkpoint
    if not wanted:
        return None
    output = Path(arguments.output_dir or ".")
    if wanted in ("last", "true", "True"):
        found: str | None = get_last_checkpoint(str(output)) if output.is_dir() else None
        if found is None:
            raise UserError(f"--resume_from_checkpoint: there is no checkpoint-* folder in {output}")
        return found
    if not (Path(wanted) / "trainer_state.json").is_file():
        raise UserError(f"--resume_from_checkpoint: {wanted} is not a checkpoint (it has no trainer_state.json)")
    return str(wanted)
