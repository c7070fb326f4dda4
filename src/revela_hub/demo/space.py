"""Publish the page as a Space: an `app.py` that runs `revela-hub demo` with the published model.

The Space has no path of this machine and no token. The text of the adaptation and its queries are not uploaded: the page searches the
built-in sample, or the text that is given for it.
"""

import json
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from revela_hub import __version__
from revela_hub.adaptation import REPORT
from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.queries import read_queries
from revela_hub.data.text.chunks import chunk_document
from revela_hub.demo.report import base_of, read_report
from revela_hub.demo.texts import MAX_PASSAGES
from revela_hub.errors import UserError
from revela_hub.hub_cards.repository import COMMIT_MESSAGE, Destination, Plan, Repository, file_names, hub_errors

GRADIO_VERSION = "6.31.0"
"""Version of gradio for the Space, if it is not installed here."""
REPORT_FIELDS = "verdict difference exported bm25_weight token_weight bm25 ndcg_at_10 systems cost".split()
"""The parts of the report that the page shows."""
MOST_QUERIES = 20
SAMPLE, QUERIES = "sample.jsonl", "queries.txt"
OPTIONAL_FILES = {REPORT, SAMPLE, QUERIES}
"""Files that not every page has."""


def space_files(
    repo_id: str,
    folder: Path,
    corpus: Sequence[str] = (),
    queries: str | None = None,
    package: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> dict[str, str]:
    """Return the files of the Space, with the report in an output folder of `adapt`.

    Without a corpus, it searches the built-in sample. `package` is the requirement that installs this package (default: this
    version).
    """
    files: dict[str, str] = {}
    options: dict[str, object] = {"model": repo_id}
    base = None
    if (file := folder / REPORT).is_file():
        base = None if read_report(file).is_base else _base_on_the_hub(folder)
        files[REPORT] = json.dumps(_published(file), indent=2) + "\n"
        options |= {"report": REPORT} | ({"base": base} if base else {})
    if corpus:
        files[SAMPLE] = _sample(corpus)
        options["corpus"] = [SAMPLE]
    if queries:
        examples = list(read_queries(queries).values())[:MOST_QUERIES]
        files[QUERIES] = "".join(f"{query}\n" for query in examples)
        options["example_queries"] = QUERIES
    if trust_remote_code:
        options["trust_remote_code"] = True
    models = [repo_id, *([base] if base else [])]
    package = package or f"revela-hub[demo]=={__version__}"
    index = "--extra-index-url https://download.pytorch.org/whl/cpu"
    return {"README.md": _readme(models), "app.py": _app(options), "requirements.txt": f"{index}\n{package}\n"} | files


def check_space(destination: Destination) -> None:
    """Check that the Space can be written to, before the model is published.

    Raises:
        UserError: it is public although it should be private, is not ours, or the Hub cannot be reached.
    """
    space = Repository(destination, "space")
    with hub_errors(space.target, "nothing was published: run the same command again"):
        if space.state() is None:
            return
        commits = space.api.list_repo_commits(space.repo_id, repo_type="space")
    # A single commit: an earlier run was stopped when it had created the Space.
    ours = len(commits) == 1 or any(commit.title.startswith(COMMIT_MESSAGE) for commit in commits)
    if not ours and not destination.update:
        raise UserError(
            f"{space.target} exists already, and was not made by revela-hub: add --update to replace its files"
        )


def publish_space(
    files: dict[str, str], destination: Destination, log: Callable[[str], None] = lambda line: None
) -> str:
    """Upload the files in one commit, delete those that an earlier page had in addition, and return the address of the Space."""
    space = Repository(destination, "space")
    content = {name: text.encode() for name, text in files.items()}
    with hub_errors(
        space.target, f"the model {space.repo_id} is published, its Space is not: run the same command again"
    ):
        before = space.prepare(space.state())
        stale = sorted(OPTIONAL_FILES & file_names(before) - files.keys())
        for name in stale:
            log(f"{space.target}: deleting {name} of the previous page; earlier commits of the Space still have it")
        space.commit(Plan(content, stale), before)
    return space.url()


def _base_on_the_hub(folder: Path) -> str | None:
    """Return the Hub id of the base model of an adaptation; None if it is a folder or unknown."""
    base = base_of(folder)
    if base is None or base.count("/") > 1 or base.startswith((".", "/", "~")) or "\\" in base or Path(base).exists():
        return None
    return base


def _published(file: Path) -> dict[str, Any]:
    values = json.loads(file.read_text(encoding="utf-8"))
    budget = values.get("settings", {}).get("budget")
    return {name: values[name] for name in REPORT_FIELDS if name in values} | (
        {"settings": {"budget": budget}} if budget else {}
    )


def _sample(corpus: Sequence[str]) -> str:
    """Return the passages of a text as JSON lines, with the names of their files."""
    lines = [
        json.dumps({"_id": Path(chunk.document).name, "text": chunk.text}, ensure_ascii=False)
        for document in read_documents(list(corpus))
        for chunk in chunk_document(document)
    ]
    if len(lines) > MAX_PASSAGES:
        raise UserError(f"--space_corpus has {len(lines):,} passages, more than {MAX_PASSAGES:,}: give a part of it")
    return "".join(f"{line}\n" for line in lines)


def _readme(models: list[str]) -> str:
    name = models[0].rpartition("/")[2]
    metadata = {
        "title": name,
        "emoji": "🔎",
        "colorFrom": "blue",
        "colorTo": "green",
        "sdk": "gradio",
        "sdk_version": _gradio_version(),
        "python_version": "3.11",
        "app_file": "app.py",
        "pinned": False,
        "models": models,
        "tags": ["revela-hub", "retrieval"],
        "short_description": "Compare a retriever with BM25 and their hybrid",
    }
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\nSearch with [{models[0]}](https://huggingface.co/{models[0]}). Made with revela-hub.\n"


def _app(options: dict[str, object]) -> str:
    shown = {name: repr(value) if isinstance(value, bool) else json.dumps(value) for name, value in options.items()}
    arguments = "".join(f"        {name}={value},\n" for name, value in shown.items())
    return f'''"""The page of `revela-hub demo`."""

from revela_hub.cli.commands.demo import Arguments, run

run(
    Arguments(
{arguments}        host="0.0.0.0",
        port=7860,
    )
)
'''


def _gradio_version() -> str:
    try:
        return version("gradio")
    except PackageNotFoundError:
        return GRADIO_VERSION
