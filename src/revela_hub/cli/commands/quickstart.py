"""Demonstration: adapt a small retriever to Python code, on a CPU, without downloads.

Runs `revela-hub adapt` with the small models in examples/quickstart, on the source code of Python's standard library or
of --data. The last line reports whether the result is better than the base model on held-out queries. Run it in a
checkout of the repository.

Examples:
  revela-hub quickstart
  revela-hub quickstart --data path/to/python/project --output_dir outputs/project
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from revela_hub.adaptation.options import AdaptOptions
from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.ranges import Seed

DOCUMENTS = 200
"""Files that are read: each step reads the text, and all of the standard library would take two minutes of the demonstration."""
EXCLUDED_FOLDERS = ["site-packages", "test", "tests", "idlelib", "lib2to3"]
"""Folders of the standard library that are not part of it, or not typical code."""


@dataclass
class Arguments:
    """Arguments of `revela-hub quickstart`."""

    data: str | None = option(None, "Folder of Python sources (default: the standard library).")
    output_dir: str = option("quickstart", "Output folder.")
    models_dir: str = option(
        "examples/quickstart", "Folder with the base model (retriever/) and the language model (lm/)."
    )
    budget: str = option("3.5m", "Total time, e.g. 90s, 30m or 2h.")
    seed: Seed = option(0, "Random seed.")


def run(arguments: Arguments) -> None:
    """Run `revela-hub adapt`."""
    from revela_hub.cli.commands import adapt

    models = Path(arguments.models_dir)
    for part in ("retriever", "lm"):
        if not (models / part).exists():
            raise UserError(f"{models} has no {part}: run in a checkout of the repository, or give --models_dir FOLDER")
    adapt.run(
        AdaptOptions(
            data=[arguments.data or sysconfig.get_paths()["stdlib"]],
            retriever=str(models / "retriever"),
            lm=str(models / "lm"),
            budget=arguments.budget,
            output_dir=arguments.output_dir,
            exclude=[] if arguments.data else EXCLUDED_FOLDERS,
            max_documents=DOCUMENTS,
            learning_rate=1e-3,  # chosen on a probe for this small retriever, which has not seen code
            max_length=160,  # tokens of a function: 512 gave the same scores at 1.6 times the cost
            seed=arguments.seed,
        )
    )
