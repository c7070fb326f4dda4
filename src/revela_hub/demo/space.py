"""Publish the page as a Space: an `app.py` that runs `revela-hub demo` with the published model.

The Space has no path of this machine and no token, and only the text that is given for it.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from revela_hub import __version__
from revela_hub.adaptation import REPORT
from revela_hub.data.sources.beir import read_queries
from revela_hub.data.sources.documents import read_documents
from revela_hub.data.text.chunks import chunk_document
from revela_hub.errors import UserError
from revela_hub.hub_cards.repository import Destination, Repository

GRADIO_VERSION = "6.31.0"
"""Version of gradio for the Space."""
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
MOST_QUERIES, MOST_PASSAGES = 20, 2000
SAMPLE, QUERIES = "sample.jsonl", "queries.txt"
APP = '''"""The page of `revela-hub demo`."""

from revela_hub.cli.commands.demo import Arguments, run

run(
    Arguments(
{options}        host="0.0.0.0",
        port=7860,
    )
)
'''


def space_files(
    repo_id: str,
    corpus: Sequence[str],
    queries: str | None = None,
    package: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> dict[str, str]:
    """Return the files of the Space of a published model, with the text that it searches.

    `queries` is a file with example queries, `package` the requirement that installs this package (default: this version).
    """
    files = {SAMPLE: _sample(corpus)}
    options: dict[str, object] = {"model": repo_id, "corpus": [SAMPLE]}
    if queries:
        examples = list(read_queries(queries).values())[:MOST_QUERIES]
        files[QUERIES] = "".join(f"{query}\n" for query in examples)
        options["example_queries"] = QUERIES
    if trust_remote_code:
        options["trust_remote_code"] = True
    requirements = f"--extra-index-url {CPU_WHEELS}\n{package or f'revela-hub[demo]=={__version__}'}\n"
    app = APP.format(options="".join(f"        {name}={value!r},\n" for name, value in options.items()))
    return {"README.md": _readme(repo_id), "app.py": app, "requirements.txt": requirements} | files


def open_space(files: dict[str, str], repo_id: str, *, private: bool, update: bool) -> Callable[[], str]:
    """Check that the Space can be written; return the function that uploads it in one commit and returns its address.

    Files of an earlier page that this one lacks are deleted.
    """
    space = Repository(Destination(repo_id, private=private, update=update), "space")
    content = {name: text.encode() for name, text in files.items()}
    space.read(content)

    def upload() -> str:
        space.commit(content, sorted((space.names & {SAMPLE, QUERIES, REPORT}) - files.keys()))
        return space.url()

    return upload


def _sample(corpus: Sequence[str]) -> str:
    """Return the passages of a text as JSON lines, with the names of their files."""
    lines = [
        json.dumps({"_id": Path(chunk.document).name, "text": chunk.text}, ensure_ascii=False)
        for document in read_documents(list(corpus))
        for chunk in chunk_document(document)
    ]
    if not 0 < len(lines) <= MOST_PASSAGES:
        raise UserError(f"--space_corpus has {len(lines):,} passages: give text with 1 to {MOST_PASSAGES:,}")
    return "".join(f"{line}\n" for line in lines)


def _readme(model: str) -> str:
    metadata = {
        "title": model.rpartition("/")[2],
        "emoji": "🔎",
        "colorFrom": "blue",
        "colorTo": "green",
        "sdk": "gradio",
        "sdk_version": GRADIO_VERSION,
        "python_version": "3.11",
        "app_file": "app.py",
        "models": [model],
        "tags": ["revela-hub", "retrieval"],
        "short_description": "Compare a retriever with BM25 and their hybrid",
    }
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\nSearch with [{model}](https://huggingface.co/{model}). Made with revela-hub.\n"
