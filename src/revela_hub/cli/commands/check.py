"""Verifies that a model loads and embeds as its readers will expect, and prints a table.

The model is loaded in a process that has transformers and sentence-transformers only, whatever else is installed here.
Checked are: no path or token of the machine it was made on, adapters merged, remote code that imports nothing its readers
lack, no weight missing, left over, initialised again or not a number, EOS at the end of every text, the same vector alone
and in a batch and with padding on either side. Exit status 1 if a check fails.

Examples:
  revela-hub check my-retriever
  revela-hub check sentence-transformers/all-MiniLM-L6-v2
  revela-hub check org/model --revision v1 --trust-remote-code
"""

from dataclasses import dataclass, field

POSITIONALS = ("model",)


@dataclass
class Arguments:
    """Arguments of `revela-hub check`."""

    model: str = field(metadata={"help": "A model folder, or the id of a model on the Hub."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a model on the Hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the code that the model brings with it."})


def run(arguments: Arguments) -> None:
    """Prints the table."""
    from revela_hub.hub_cards import as_table, check

    checks = check(arguments.model, revision=arguments.revision, trust_remote_code=arguments.trust_remote_code)
    print(as_table(checks))
    if failed := [row.name for row in checks if not row.ok]:
        print(f"\n{arguments.model}: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")
        raise SystemExit(1)
    print(f"\n{arguments.model}: all {len(checks)} checks passed")
