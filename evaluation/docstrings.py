"""Python functions with a docstring, which describes the function: the query of a probe."""

import ast
import io
import re
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from revela_hub.data.text.words import count_words

MIN_WORDS = 5
MIN_LINES = 3


@dataclass(frozen=True)
class Function:
    """A function without its docstring, whose first paragraph in one line is the query; line numbers are those of the file.

    `first_line` includes decorators; `docstring_lines` are the first and the last line of the docstring.
    """

    query: str
    code: str
    first_line: int
    docstring_lines: tuple[int, int]


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


def documented_functions(text: str) -> list[Function]:
    """Return functions and methods that have a docstring on separate lines and a body after it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
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
        found.append(Function(query, dedented(kept), first, (expression.lineno, expression.end_lineno)))
    return found
