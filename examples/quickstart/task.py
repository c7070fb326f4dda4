"""Write a retrieval task of held-out docstrings, and the code without them.

    python examples/quickstart/task.py --output outputs

writes outputs/task (a BEIR folder) and outputs/text (Python files) from Python's standard library or the sources in --data. A docstring is
a query, its function without the docstring the document. Held-out docstrings are removed from the functions and from the text, so a
retriever that is trained on the text cannot have seen the answers.
"""

import argparse
import contextlib
import random
import sysconfig
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from revela_hub.data import RetrievalTask, write_beir
from revela_hub.evaluation.functions import documented_functions


class DocstringTask(NamedTuple):
    """A task, and the sources without the docstrings of its queries, by relative path."""

    task: RetrievalTask
    sources: dict[str, str]


def docstring_task(
    root: str | Path, *, queries: int = 500, functions: int | None = None, seed: int = 0, name: str = "docstrings"
) -> DocstringTask:
    """Build a docstring-to-function task from the Python files in a folder.

    Args:
        root: The folder, searched for `*.py` without `site-packages`, tests and hidden folders.
        queries: Number of documented functions to hold out, at most half of them.
        functions: Size of the corpus, which always includes the functions of the queries; None for all.
        seed: The seed of the sample.
        name: The name of the task.
    """
    sources = read_sources(Path(root))
    found = [(path, f) for path, text in sources.items() for f in documented_functions(text)]
    # A query whose docstring or function occurs twice would have two answers.
    count_query = Counter(f.query for _, f in found)
    count_code = Counter(f.code for _, f in found)
    found = [(path, f) for path, f in found if count_query[f.query] == count_code[f.code] == 1]
    if len(found) < 20:
        raise SystemExit(f"{root}: only {len(found)} functions with a unique docstring; at least 20 are required")
    drawn = random.Random(seed).sample(found, len(found))
    held_out = drawn[: min(queries, len(found) // 2)]
    searched = set(drawn if functions is None else drawn[: max(functions, len(held_out))])
    asked = {f"{path}:{f.line}": f for path, f in held_out}
    task = RetrievalTask(
        corpus={f"{path}:{f.line}": f.code for path, f in found if (path, f) in searched},
        queries={id_: f.query for id_, f in asked.items()},
        qrels={id_: {id_: 1} for id_ in asked},
        name=name,
    )
    for path, function in held_out:
        sources[path] = sources[path].replace(function.removed, "")
    return DocstringTask(task, sources)


def read_sources(root: Path) -> dict[str, str]:
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        skipped = ("site-packages", "dist-packages", "test", "tests", "idle_test")
        if not any(part.startswith(".") or part in skipped for part in parts):
            with contextlib.suppress(UnicodeDecodeError, OSError):
                sources["/".join(parts)] = path.read_text(encoding="utf-8")
    return sources


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
