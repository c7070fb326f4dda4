"""Verify that a model loads and embeds correctly where only transformers and sentence-transformers are installed.

The model is loaded in a clean process, and the results are printed as a table. The checks cover private data (paths,
secrets), pickles, missing or unused weights, NaNs, remote code, tokenizer and length settings, and whether vectors
depend on batching or padding. The exit status is 1 if a check fails.

Examples:
  revela-hub check my-retriever
  revela-hub check sentence-transformers/all-MiniLM-L6-v2
  revela-hub check org/model --revision v1 --trust_remote_code
  revela-hub check my-retriever --json
"""

import json
from dataclasses import dataclass, field

from revela_hub.ranges import PositiveInt

POSITIONALS = ("model",)


@dataclass
class Arguments:
    """Arguments of `revela-hub check`."""

    model: str = field(metadata={"help": "Model folder or Hub id."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a model on the Hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Allow a model to run its own code from the Hub."})
    timeout: PositiveInt | None = field(
        default=None,
        metadata={"help": "Maximum number of seconds (default: 300, plus 180 per GB of weights)."},
    )
    json: bool = field(default=False, metadata={"help": "Print JSON."})


def run(arguments: Arguments) -> None:
    """Print the table."""
    from pathlib import Path

    from revela_hub.checkpoints import METHODS, is_checkpoint
    from revela_hub.errors import UserError
    from revela_hub.hub_cards import as_table, check
    from revela_hub.output import command_line

    model = arguments.model
    if Path(model).is_dir() and is_checkpoint(model):
        publish = command_line("publish", model, "NAME/MODEL", "--dry_run")
        raise UserError(f"{model} is a training checkpoint: `{publish}` exports it and checks the result")
    if arguments.revision and Path(arguments.model).expanduser().exists():
        raise UserError(f"--revision is for a model on the Hub, but {arguments.model} is a folder")
    checks = check(
        model,
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
        timeout=arguments.timeout,
        methods=METHODS,
    )
    failed = [row.name for row in checks if not row.ok]
    if arguments.json:
        print(json.dumps({"model": model, "ok": not failed, "checks": [row._asdict() for row in checks]}, indent=2))
    else:
        said = f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}" if failed else ""
        print(f"{as_table(checks)}\n\n{model}: {said or f'all {len(checks)} checks passed'}")
    if failed:
        raise SystemExit(1)
