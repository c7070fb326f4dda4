"""The documentation site builds without a warning, and its links lead somewhere."""

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from revela_hub.trainers.methods import METHODS

pytest.importorskip("furo", reason="the site is built with the extra docs")


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and not re.match(r"[a-z]+:", value):
                self.links.add(value)
            if name == "id" and value:
                self.anchors.add(value)


def test_the_site(repository: Path, tmp_path: Path) -> None:
    recipe = re.search(r"^docs:.*\n((?:\t.*\n)+)", (repository / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    for line in recipe[1].splitlines():
        words = shlex.split(
            line.replace("$(BIN)/python", shlex.quote(sys.executable)).replace("build/docs", str(tmp_path))
        )
        subprocess.run(words, cwd=repository, check=True)
    pages = {file.resolve(): Page(file) for file in tmp_path.rglob("*.html") if "_static" not in file.parts}
    broken = [
        f"{file.relative_to(tmp_path)}: {link}"
        for file, page in pages.items()
        for link in page.links
        if not _exists(file, link, pages)
    ]
    assert broken == []
    # Each page is also there as Markdown, and llms.txt names it.
    listed = set(re.findall(r"^- \[.*?\]\((\S+)\): \S", (tmp_path / "llms.txt").read_text(), re.MULTILINE))
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.md") if "_downloads" not in file.parts}
    assert listed == written


def _exists(file: Path, link: str, pages: dict[Path, Page]) -> bool:
    address, anchor = urldefrag(link)
    target = (file.parent / unquote(address.partition("?")[0])).resolve() if address else file
    return target.exists() and (not anchor or target not in pages or unquote(anchor) in pages[target].anchors)


def test_the_links_of_the_pages_lead_to_files_of_the_repository(repository: Path) -> None:
    docs = repository / "docs"
    files = [file for folder in ("..", "", "api", "guides", "methods") for file in (docs / folder).glob("*.md")]
    links = {
        (file, link)
        for file in files
        for link in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", file.read_text(encoding="utf-8"))
    }
    assert sorted(f"{file.name}: {link}" for file, link in links if not (file.parent / link).exists()) == []
    assert not [
        file.name for file in files if re.search(r"^```\{|^:::", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def test_every_public_name_has_an_entry_in_the_python_api(repository: Path) -> None:
    pages = "".join(file.read_text(encoding="utf-8") for file in (repository / "docs" / "api").glob("*.md"))
    folders = ("data", "evaluation", "hub_cards", "modeling", "retrieval", "search", "trainers")
    packages = ["revela_hub", *(f"revela_hub.{folder}" for folder in folders)]
    names = {name for package in packages for name in importlib.import_module(package).__all__}
    assert names - set(re.findall(r"^- \[`(\w+)`\]", pages, re.MULTILINE)) == {"__version__"}


def test_the_pictures_are_those_of_the_script(repository: Path) -> None:
    figures = runpy.run_path(str(repository / "docs" / "figures.py"))
    drawn = figures["draw"]()
    assert {file.name: file.read_text(encoding="utf-8") for file in figures["FOLDER"].glob("*.svg")} == drawn


def test_citations_are_those_of_the_records(repository: Path) -> None:
    pages = "".join(file.read_text(encoding="utf-8") for file in (repository / "docs" / "methods").glob("*.md"))
    cited = set(re.findall(r"^```bibtex\n(.*?)\n```", pages, re.MULTILINE | re.DOTALL))
    assert cited == {method.paper.bibtex for method in METHODS.values()}
