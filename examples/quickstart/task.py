"""Write a retrieval task of held-out docstrings, and the code without them.

    python examples/quickstart/task.py --output outputs

writes outputs/task (a BEIR folder) and outputs/text (Python files) from Python's standard library or the sources in --data.
"""

import argparse
import sysconfig
from pathlib import Path

from revela_hub.data.sources.beir import write_beir
from revela_hub.evaluation import docstring_task


def main() -> None:
    """Write both folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=sysconfig.get_paths()["stdlib"], help="folder of Python sources")
    parser.add_argument("--output", type=Path, default=Path("outputs"))
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--functions", type=int, default=1500)
    given = parser.parse_args()
    made = docstring_task(given.data, queries=given.queries, functions=given.functions)
    write_beir(made.task, given.output / "task")
    for name, text in made.sources.items():
        path = given.output / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{len(made.task.queries)} queries, {len(made.task.corpus):,} functions, {len(made.sources):,} files")


if __name__ == "__main__":
    main()
