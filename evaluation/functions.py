"""Functions with a docstring or a comment above them, which describes the function: the query of a probe.

Python is parsed. For other languages (Java, JavaScript, C++, Go, Rust, Ruby and others) a parser is not needed: code is indented, so
a declaration ends before the next line that is not indented more than its first line, closing brackets aside.
"""

import ast
import io
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from revela_hub.data.text.words import count_words

MIN_WORDS = 5
MIN_LINES = 3
MAX_LINES = 100
"""Longer declarations are not functions."""
SUFFIXES = frozenset(
    ".bash .c .cc .cjs .cpp .cs .cu .cxx .dart .ex .exs .f90 .go .groovy .h .hh .hpp .hs .java .jl .js .jsx .kt .kts .lua .m .mjs "
    ".ml .mm .nim .php .pl .pm .ps1 .r .rb .rs .scala .sh .sol .sql .swift .ts .tsx .v .zig .zsh".split()
)

_LINE = re.compile(r"[ \t]*(?://[/!]?|#'?(?=\s|$)|--[|-]?(?=\s|$)|!>|;;)[ \t]?(?P<text>.*)")
_BLOCK_START = re.compile(r"[ \t]*/\*[*!]?[ \t]?(?P<text>.*)")
_TAG = re.compile(r"[ \t]*[@\\:](?:param|returns?|throws|exception|see|since|author|tparam|arg|type|deprecated)\b")
_MARKUP = re.compile(r"\{@\w+\s+([^}]*)\}|</?\w+[^>]*>|[\\@](?:brief|ref|link|code|em|c|p)\b")
# Types contain the functions, and their comments.
_TYPE = re.compile(
    r"[ \t]*(?:\w+[ \t]+)*(?:class|enum|extension|impl|interface|module|namespace|object|package|protocol|record|struct|trait|union)\b"
)
_STATEMENT = re.compile(
    r"[ \t]*(?:(?:await|case|catch|do|elif|elsif|else|export default|for|foreach|if|import|raise|return|switch|throw|try|unless|until|while|with)\b"
    r"|default\s*:|\}|[#{(\[]\s*\w*\s*$"
    r"|#[ \t]*(?:define|elif|else|endif|error|if|ifdef|ifndef|include|pragma|undef)\b)"
)
_ANNOTATION = re.compile(r"[ \t]*(?:@|#?\[|template\b)")
_CLOSES = re.compile(r"[ \t]*(?:[})\]]|end\b|fi\b|done\b|esac\b)")
_OPENS = re.compile(r"[ \t]*(?:\{|\)|do\b|then\b|where\b)")


@dataclass(frozen=True)
class Function:
    """The code of a function from a line (of a decorator) on, without its docstring or comment and without their indentation.

    `removed` is the docstring or comment as it is in the file; its first paragraph in one line is the query.
    """

    query: str
    code: str
    removed: str
    line: int


def documented_functions(text: str) -> Iterator[Function]:
    """Yield Python functions and methods that have a docstring on separate lines and a body after it."""
    if "def " not in text:  # parsing two million words takes a minute
        return
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    # As Python counts them; splitlines() also splits at form feeds and U+2028.
    lines = list(io.StringIO(text, newline=""))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or len(node.body) < 2:
            continue
        first, last = node.body[0].lineno, node.body[0].end_lineno or 0
        following, end = node.body[1].lineno, node.end_lineno or 0
        query = " ".join(docstring.split("\n\n")[0].split())
        alone = first > node.lineno and following > last
        if alone and count_words(query) >= MIN_WORDS and end - following + 1 >= MIN_LINES:
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            kept = lines[start - 1 : first - 1] + lines[last:end]
            yield Function(query, _dedented(kept), "".join(lines[first - 1 : last]), start)


def _dedented(lines: Iterable[str]) -> str:
    r"""Return code without the indentation of all its lines, which `textwrap.dedent` finds only if they end in `\n`."""
    return textwrap.dedent(io.StringIO("".join(lines), newline=None).read()).strip()


def commented_functions(text: str) -> Iterator[Function]:
    """Yield declarations of 3 to 100 lines that follow a comment of at least five words without an empty line."""
    lines = text.splitlines(keepends=True)
    number = 0
    while number < len(lines):
        end, words = _comment(lines, number)
        query = _first_paragraph(words)
        code = _declaration(lines, end) if count_words(query) >= MIN_WORDS else []
        if MIN_LINES <= len(code) <= MAX_LINES:
            yield Function(query, _dedented(code), "".join(lines[number:end]), end + 1)
            end += len(code)  # comments in a function stay in it
        number = max(end, number + 1)


def _comment(lines: list[str], start: int) -> tuple[int, list[str]]:
    """Return the line after a comment that starts at a line (the same line: none does), and its text without markers."""
    if block := _BLOCK_START.match(lines[start]):
        words = [block["text"]]
        end = start
        while "*/" not in lines[end]:
            end += 1
            if end == len(lines):
                return start, []
            words.append(re.sub(r"^[ \t]*\*(?!/)[ \t]?", "", lines[end]))
        words[-1] = words[-1].partition("*/")[0]
        return end + 1, words
    end, words = start, []
    while end < len(lines) and (line := _LINE.match(lines[end])):
        words.append(line["text"])
        end += 1
    return end, words


def _first_paragraph(lines: list[str]) -> str:
    kept: list[str] = []
    for line in map(str.strip, lines):
        ends = not line or _TAG.match(line)
        if kept and ends:
            break
        if not ends:
            kept.append(line)
    return " ".join(_MARKUP.sub(lambda match: match[1] or " ", " ".join(kept)).split())


def _declaration(lines: list[str], start: int) -> list[str]:
    """Return the lines of the declaration that starts at a line."""
    named = next((line for line in lines[start : start + 5] if not _ANNOTATION.match(line)), "")
    # Another comment may follow: then the first one often is a licence.
    if start == len(lines) or not lines[start].strip() or _TYPE.match(named):
        return []
    if _STATEMENT.match(lines[start]) or _BLOCK_START.match(lines[start]):
        return []
    depth, end = _indentation(lines[start]), start + 1
    annotation = _ANNOTATION.match(lines[start])
    while end < len(lines) and end - start <= MAX_LINES:
        line = lines[end]
        if line.strip() and _indentation(line) <= depth:
            if _OPENS.match(line) or annotation:
                annotation = _ANNOTATION.match(line)
            elif _CLOSES.match(line) and _indentation(line) == depth:
                return lines[start : end + 1]
            else:
                break
        end += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    return lines[start:end]


def _indentation(line: str) -> int:
    return len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip())
