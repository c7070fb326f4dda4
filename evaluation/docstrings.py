"""A retrieval task made from Python sources: a docstring is the query, its function without the docstring the document.

Held-out docstrings are removed from the functions and from the training text, so a retriever cannot have seen the answers.
"""

import ast
import contextlib
import io
import random
import re
import textwrap
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.text.chunks import count_words
from revela_hub.errors import UserError
from revela_hub.paths import local_path

MIN_WORDS = 5
MIN_LINES = 3


@dataclass(frozen=True)
class Function:
    """A function without its docstring, whose first paragraph in one line is the query; line numbers are those of the file.

    `first_line` includes decorators; `docstring_lines` are the first and the last line of the docstring.
    """

    path: str
    query: str
    code: str
    first_line: int
    docstring_lines: tuple[int, int]


@dataclass(frozen=True)
class DocstringTask:
    """A task, and the sources without its docstrings.

    Attributes:
        task: Queries (first paragraphs of docstrings), corpus (functions without docstring) and qrels.
        sources: The training text by relative path.
    """

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

    Raises:
        UserError: There are fewer than 20 documented functions.
    """
    root = local_path(root)
    sources = _read_sources(root)
    found = [f for path, text in sources.items() for f in documented_functions(path, text)]
    # A query whose docstring or function occurs twice would have two answers.
    count_query = Counter(f.query for f in found)
    count_code = Counter(f.code for f in found)
    found = [f for f in found if count_query[f.query] == count_code[f.code] == 1]
    if len(found) < 20:
        raise UserError(f"{root}: only {len(found)} functions with a unique docstring; at least 20 are required")
    drawn = random.Random(seed).sample(found, len(found))
    held_out = drawn[: min(queries, len(found) // 2)]
    searched = set(drawn if functions is None else drawn[: max(functions, len(held_out))])
    ids = {f: f"{f.path}:{f.first_line}" for f in found}
    task = RetrievalTask(
        corpus={ids[f]: f.code for f in found if f in searched},
        queries={ids[f]: f.query for f in held_out},
        qrels={ids[f]: {ids[f]: 1} for f in held_out},
        name=name,
    )
    remove: dict[str, set[int]] = {}
    for function in held_out:
        first, last = function.docstring_lines
        remove.setdefault(function.path, set()).update(range(first, last + 1))
    for path, removed in remove.items():
        kept = (line for number, line in enumerate(python_lines(sources[path]), start=1) if number not in removed)
        sources[path] = "".join(kept)
    return DocstringTask(task, sources)


def _read_sources(root: Path) -> dict[str, str]:
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        skipped = ("site-packages", "dist-packages", "test", "tests", "idle_test")
        if not any(part.startswith(".") or part in skipped for part in parts):
            with contextlib.suppress(UnicodeDecodeError, OSError):
                sources["/".join(parts)] = path.read_text(encoding="utf-8")
    return sources


def python_lines(text: str) -> list[str]:
    """Return the lines as Python counts them; splitlines() would also split at form feeds and U+2028."""
    return list(io.StringIO(text, newline=""))


def dedented(lines: Iterable[str]) -> str:
    r"""Return code without the indentation of all its lines, which `textwrap.dedent` finds only if they end in `\n`."""
    return textwrap.dedent(io.StringIO("".join(lines), newline=None).read()).strip()


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield functions in the order of `ast.walk`, but faster: without visiting expressions."""
    nodes: deque[ast.AST] = deque([tree])
    while nodes:
        node = nodes.popleft()
        for name in node._fields:
            children = getattr(node, name, None)
            if isinstance(children, list):
                nodes.extend(c for c in children if isinstance(c, ast.stmt | ast.ExceptHandler | ast.match_case))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def documented_functions(path: str, text: str) -> list[Function]:
    """Return functions and methods that have a docstring on separate lines and a body after it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = python_lines(text)
    found = []
    for node in _functions(tree):
        if len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        expression, following = node.body[0], node.body[1]
        if docstring is None or node.end_lineno is None or expression.end_lineno is None:
            continue
        alone = node.body[0].lineno > node.lineno and following.lineno > expression.end_lineno
        query = re.sub(r"\s+", " ", docstring.split("\n\n")[0]).strip()
        if not alone or count_words(query) < MIN_WORDS or node.end_lineno - following.lineno + 1 < MIN_LINES:
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        kept = lines[first - 1 : expression.lineno - 1] + lines[expression.end_lineno : node.end_lineno]
        found.append(Function(path, query, dedented(kept), first, (expression.lineno, expression.end_lineno)))
    return found
