"""Demonstration: improve a search, and train a retriever with Revela, on a CPU, without downloads.

Uses the small models in examples/quickstart and the source code of Python's standard library, or of --data. First,
`revela-hub adapt` improves the search of a small retriever; the line VERDICT reports whether the result is better on
held-out queries. Then `revela-hub train revela` makes a retriever of the language model, and the result is loaded in a
process without this package. Run it in a checkout of the repository.

Examples:
  revela-hub quickstart
  revela-hub quickstart --data path/to/python/project --output_dir outputs/project
"""

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    budget: str = option("2.5m", "Time of `adapt`, e.g. 90s, 30m or 2h.")
    seed: Seed = option(0, "Random seed.")


# Loads a run's folder in a process that cannot import this package.
_READER = """
import sys
sys.modules["revela_hub"] = None
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForCausalLM
retriever, lm = sys.argv[1:]
print(f"SentenceTransformer({retriever!r}): vectors of {len(SentenceTransformer(retriever).encode_query('a date'))} numbers")
print(f"AutoModel.from_pretrained({retriever!r}): {type(AutoModel.from_pretrained(retriever)).__name__}")
print(f"AutoModelForCausalLM.from_pretrained({lm!r}): {type(AutoModelForCausalLM.from_pretrained(lm)).__name__}")
"""


def run(arguments: Arguments) -> None:
    """Run `revela-hub adapt` and `revela-hub train revela`, and load what Revela trained without this package."""
    models = Path(arguments.models_dir)
    for part in ("retriever", "lm", "revela.yaml"):
        if not (models / part).exists():
            raise UserError(f"{models} has no {part}: run in a checkout of the repository, or give --models_dir FOLDER")
    text = {
        "data": [arguments.data or sysconfig.get_paths()["stdlib"]],
        "exclude": [] if arguments.data else EXCLUDED_FOLDERS,
        "max_documents": DOCUMENTS,
    }
    print("1. Improve a search: revela-hub adapt\n", flush=True)
    _adapt(arguments, models, text)
    print("\n2. Train a retriever from a language model: revela-hub train revela\n", flush=True)
    output = _train_revela(arguments, models, text)
    print("\n3. Load it in a process without this package\n", flush=True)
    subprocess.run([sys.executable, "-c", _READER, *(str(output / part) for part in ("retriever", "lm"))], check=True)


def _adapt(arguments: Arguments, models: Path, text: dict[str, Any]) -> None:
    from revela_hub.cli.commands import adapt

    adapt.run(
        AdaptOptions(
            **text,
            retriever=str(models / "retriever"),
            budget=arguments.budget,
            output_dir=arguments.output_dir,
            learning_rate=1e-3,  # chosen on a probe for this small retriever, which has not seen code
            max_length=160,  # tokens of a function: 512 gave the same scores at 1.6 times the cost
            seed=arguments.seed,
        )
    )


def _train_revela(arguments: Arguments, models: Path, text: dict[str, Any]) -> Path:
    import yaml

    from revela_hub.trainers.revela import command

    recipe = yaml.safe_load((models / "revela.yaml").read_text(encoding="utf-8"))
    recipe |= {"output_dir": str(Path(arguments.output_dir) / "revela"), "resume_from_checkpoint": "last"}
    lm = str(models / "lm")
    return command.train(command.Arguments(**text, **recipe, retriever=lm, lm=lm, seed=arguments.seed))
