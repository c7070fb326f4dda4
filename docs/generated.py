"""Sphinx extension that adapts the pages of the repository, which are plain Markdown for GitHub, to the site.

It makes pages from the parsers and the benchmarks, entries of the Python API and contents from lists of links, examples and options
in docstrings, pictures in two themes, equations as MathML, and llms.txt.
"""

import argparse
import ast
import dataclasses
import importlib
import os
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from typing import Any, get_type_hints

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation
from transformers import TrainingArguments

from revela_hub.cli import main as cli
from revela_hub.cli.parser import OTHER_OPTIONS, value_of

# Folder of copied pages -> the pages that are copied into it.
COPIES = {"benchmarks": "benchmarks/**/*.md", "examples": "examples/quickstart/README.md"}
PICTURE = r"(!\[[^\]]*\]\([^)]*)-light\.svg\)"
# `<!-- pages: CAPTION -->` above a list of links makes these pages the entries of a part of the contents.
CONTENTS = re.compile(r"<!-- pages: ?(.*?) -->\n+((?:- .*\n)+)")
# "- [`Name`](its/file.py): `method`, `method`" in a page of the Python API is replaced by the name's documentation.
ENTRY = re.compile(r"^- \[`(\w+)`\]\((\S+\.py)\)(?:: (.*))?\n", re.MULTILINE)


def command_page(name: str) -> str:
    """Return the page of a command: its usage, its description, and a table for each group of options."""
    parser = cli.parser_of(name)
    others = 0
    parts = [f"# {name}", _sentence(cli.COMMANDS[name].summary), f"```text\n{parser.usage}\n```"]
    parts.append(_description(parser.description or ""))
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        rows = [_row(action) for action in shown]
        if group.title == OTHER_OPTIONS:
            others = len(rows)
        elif rows:
            heading = f"{str(group.title)[0].upper()}{str(group.title)[1:]}"
            parts.append("\n".join([f"## {heading}\n", "| option | description |", "|---|---|", *rows]))
    if others:
        parts.append(
            f"The other {others} options of `transformers.TrainingArguments` are accepted, too;"
            f" `revela-hub {name} --help-all` lists them."
        )
    return "\n\n".join(parts) + "\n"


def _row(action: argparse.Action) -> str:
    shown = f"{action.option_strings[0]} {value_of(action)}".strip().replace("|", r"\|")
    return f"| `{shown}` | {_cell((action.help or '').replace('%%', '%'))} |"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _cell(text: str) -> str:
    """Return a help text as the cell of a Markdown table."""
    pieces = re.split(r"(`[^`]*`|--[a-z][\w-]*)", " ".join(text.split()))
    pieces[::2] = [re.sub(r"([<>*_\[\]$])", r"\\\1", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"`{piece.strip('`')}`" for piece in pieces[1::2]]
    return "".join(pieces).replace("|", r"\|")


def _description(text: str) -> str:
    """Return a command's docstring, with its indented lines as code blocks."""
    parts: list[str] = []
    for code, lines in groupby(text.strip().splitlines(), key=lambda line: line.startswith("  ")):
        block = "\n".join(lines)
        parts.append(f"\n```bash\n{dedent(block)}\n```\n" if code else re.sub(r"([*<>])", r"\\\1", block))
    return "\n".join(parts)


def write_reference(source: Path) -> None:
    """Write one page for each command, and the page that lists them."""
    pages = {f"{name.replace(' ', '-')}.md": command_page(name) for name in cli.COMMANDS}
    _write_pages(source / "cli", pages | {"overview.md": "\n".join(_overview())})


def write_copies(source: Path) -> None:
    """Write a page for each page of the repository that belongs to the documentation, at the same path."""
    root = source.parent
    for folder, pattern in COPIES.items():
        texts = {str(file.relative_to(root / folder)): file.read_text(encoding="utf-8") for file in root.glob(pattern)}
        _write_pages(source / folder, texts)


def _write_pages(folder: Path, pages: dict[str, str]) -> None:
    for page, text in pages.items():
        file = folder / page
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:  # unchanged pages are not read again
            file.write_text(text, encoding="utf-8")
    for stale in {str(file.relative_to(folder)) for file in folder.rglob("*.md")} - set(pages):
        (folder / stale).unlink()


def _adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """Make links between files of the repository links between pages, and show each picture in the page's theme."""
    root, docs = Path(app.srcdir).parent, Path(app.srcdir)
    copied = {str(file.relative_to(root)) for pattern in COPIES.values() for file in root.glob(pattern)}
    reference = {
        _file_of(command.module): f"/cli/{name.replace(' ', '-')}.md" for name, command in cli.COMMANDS.items()
    }
    reference[_file_of(cli.__name__)] = "/cli/overview.md"
    folder = (root if f"{page}.md" in copied else docs) / Path(page).parent

    def link(found: re.Match[str]) -> str:
        text, address, anchor = found[1], found[2], found[3] or ""
        target = Path(os.path.normpath(folder / address))
        name = str(target.relative_to(root))
        if name in reference:
            return f"[{text}]({reference[name]})"
        if name in copied:
            return f"[{text}](/{name}{anchor})"
        if docs in target.parents:
            return f"[{text}](/{target.relative_to(docs)}{anchor})"
        return text if f"{page}.md" in copied else found[0]  # code of the repository

    def contents(found: re.Match[str]) -> str:
        pages = "\n".join(re.findall(r"^- \[.*?\]\(([^)#]*)", found[2], re.MULTILINE))
        caption = f":caption: {found[1]}\n" if found[1] else ""
        return f"```{{toctree}}\n{caption}:hidden:\n\n{pages}\n```\n\n{found[2]}"

    if page.startswith("api/"):
        source[0] = ENTRY.sub(
            lambda found: _entry(found[1], (folder / found[2]).resolve().relative_to(root), found[3]), source[0]
        )
    source[0] = re.sub(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)", link, source[0])
    source[0] = CONTENTS.sub(contents, source[0])
    source[0] = re.sub(PICTURE, r"\1-light.svg){.only-light}\1-dark.svg){.only-dark}", source[0])


def _file_of(module: str) -> str:
    """Return the file of a module of the package, from the root of the repository."""
    package, folder, *rest = module.split(".")
    return "/".join([*(["src", package] if folder == "cli" else []), folder, *rest]) + ".py"


def _entry(name: str, file: Path, members: str | None) -> str:
    """Return the documentation of a name of the package, under the module to import it from."""
    parts = file.with_suffix("").parts[2 if file.parts[0] == "src" else 0 :]
    homes = ("revela_hub", f"revela_hub.{parts[0]}", ".".join(["revela_hub", *parts]))
    home = next(home for home in homes if hasattr(importlib.import_module(home), name))
    found = getattr(importlib.import_module(home), name)
    kind = "function"
    if isinstance(found, type):
        kind = "exception" if issubclass(found, Exception) else "class"
    options = f"\n   :members: {members.replace('`', '')}" if members else ""
    # The pages with source code link to all names of a module as if they were imported from the same one.
    anchors = "".join(f'<span id="{other}.{name}"></span>' for other in homes if other != home)
    return f"\n```{{eval-rst}}\n.. raw:: html\n\n   {anchors}\n\n.. auto{kind}:: {home}.{name}{options}\n```\n"


def _docstring(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Make indented examples and equations code blocks, and list the options of training arguments."""
    if what == "class" and issubclass(found, TrainingArguments):
        own = [kind for kind in found.__mro__ if kind.__module__.startswith("revela_hub")]
        declared = {each for kind in own for each in vars(kind).get("__annotations__", ())}
        hints = get_type_hints(found)  # without the ranges of Annotated
        lines += ["", "Args:"]
        for each in dataclasses.fields(found):
            if each.name in declared:
                lines.append(f"    {each.name} ({stringify_annotation(hints[each.name], 'smart')}): {_described(each)}")
    if dataclasses.is_dataclass(found):  # its attributes are the arguments of the constructor
        lines[:] = ["Args:" if line == "Attributes:" else line for line in lines]
    text, section = "\n".join(lines), r"^(\S.*(?<!::))\n\n((?:(?:    .*)?\n)*    .*)$"
    lines[:] = re.sub(section, _code_block, text, flags=re.MULTILINE).split("\n")


def _described(field: dataclasses.Field[Any]) -> str:
    default = field.default_factory() if callable(field.default_factory) else field.default
    help = " ".join(field.metadata.get("help", "").split())
    help = re.sub(
        r"(`[^`]*`)|(?<!`)(--\w+)|([*_|\\])",
        lambda part: part[1] or (f"`{part[2]}`" if part[2] else f"\\{part[3]}"),
        help,
    )
    return help if "default:" in help or default is None else f"{help} Default: `{default!r}`."


def _code_block(found: re.Match[str]) -> str:
    try:
        language = "python" if ast.parse(dedent(found[2])) else "text"
    except SyntaxError:
        language = "text"
    return f"{found[1]}\n\n.. code-block:: {language}\n\n{found[2]}"


def _signature(
    app: Sphinx, what: str, name: str, found: Any, options: Any, signature: str, returned: str
) -> tuple[str, str] | None:
    """Leave the hundred options of training arguments to their list."""
    if what == "class" and issubclass(found, TrainingArguments):
        return "(output_dir=None, **options)", ""
    return None


def _overview() -> Iterator[str]:
    yield "# Command line\n"
    yield "`revela-hub COMMAND --help` prints the same text. Conventions that hold for every command:\n"
    yield "- Options can also be given in a YAML file (`--config FILE`); command-line values take precedence."
    yield "- Underscores and dashes are both accepted: `--output_dir` and `--output-dir` are the same option."
    yield "- Invalid input is reported in one line with file, line number and fix, with exit status 2;"
    yield "  add `--debug` for the full trace."
    yield "- `--quiet` prints results and errors only.\n"
    for title, names in cli.GROUPS.items():
        yield f"## {title.capitalize()}\n\n| command | description |\n|---|---|"
        yield from (
            f"| [{name}]({name.replace(' ', '-')}.md) | {_cell(cli.COMMANDS[name].summary)} |" for name in names
        )
        yield "\n```{toctree}\n:hidden:\n"
        yield from (name.replace(" ", "-") for name in names)
        yield "```\n"


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Write `llms.txt` (https://llmstxt.org): the title, a summary, and a link to the Markdown of every page."""
    if error is not None or app.builder.name != "markdown":
        return
    lines = [f"# {app.config.project}", "", f"> {_first_paragraph(app, app.config.root_doc)}", "", "## Pages", ""]
    for page in sorted(app.env.found_docs, key=lambda name: (name.count("/"), name)):
        title = app.env.titles[page].astext()
        lines.append(f"- [{title}]({page}.md): {_first_paragraph(app, page)}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _first_paragraph(app: Sphinx, page: str) -> str:
    paragraph = next(iter(app.env.get_doctree(page).findall(nodes.paragraph)), None)
    return " ".join(paragraph.astext().split()) if paragraph else ""


def _equation(translator: Any, node: nodes.Element) -> None:
    """Write an equation as MathML, which browsers render without a script from elsewhere."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def _plain_abbreviations(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Replace abbreviations (the `*` of a signature) by their text, as Markdown has none."""
    if app.builder.name == "markdown":
        for node in list(doctree.findall(nodes.abbreviation)):
            node.replace_self(nodes.Text(node.astext()))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the steps to the build."""
    app.add_html_math_renderer("mathml", (_equation, None), (_equation, None))
    app.connect("builder-inited", lambda app: write_reference(Path(app.srcdir)))
    app.connect("builder-inited", lambda app: write_copies(Path(app.srcdir)))
    app.connect("source-read", _adapt)
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", _signature)
    app.connect("doctree-resolved", _plain_abbreviations)
    app.connect("build-finished", write_llms_txt)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
