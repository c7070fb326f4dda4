"""PDF, Word, PowerPoint, EPUB, HTML and Jupyter files as Markdown, converted once by MarkItDown (the extra `documents`).

The Markdown is kept in the cache of Hugging Face (`HF_HOME`), named after the file's content and MarkItDown's version. Only the
converters of these formats are used: MarkItDown's others would unpack archives and call web services.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import logging
import uuid
from functools import cache
from pathlib import Path
from typing import Any

from revela_hub.output import note

SUFFIXES = frozenset({".docx", ".epub", ".htm", ".html", ".ipynb", ".pdf", ".pptx"})
MISSING = "PDF, Word, PowerPoint, EPUB, HTML or Jupyter"
"""The reason in a report for files that are skipped without the extra."""
REMEDY = 'to read PDF, Word, PowerPoint, EPUB, HTML and Jupyter files: pip install "revela-hub[documents]"'


def converter_version() -> str:
    """Return MarkItDown's version, or "" if it is not installed."""
    return importlib.metadata.version("markitdown") if importlib.util.find_spec("markitdown") else ""


def as_markdown(content: bytes, path: Path) -> str:
    """Return a file as Markdown, from the cache if possible; its title comes first.

    Args:
        content: The file's content.
        path: The file; its suffix, one of `SUFFIXES`, determines the format.

    Raises:
        ValueError: The file is damaged, encrypted, or has another format than its suffix says.
    """
    from huggingface_hub import constants

    suffix = path.suffix.lower()
    digest = hashlib.sha256(f"{converter_version()}{suffix}".encode() + content).hexdigest()[:32]
    kept = Path(constants.HF_HOME) / "revela-hub" / "documents" / f"{digest}.md"
    with contextlib.suppress(OSError):
        return kept.read_text(encoding="utf-8")
    text = _convert(content, suffix)
    with contextlib.suppress(OSError):  # without a cache, the next command converts the file again
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f"{kept.name}.{uuid.uuid4().hex}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(kept)
    return text


def _convert(content: bytes, suffix: str) -> str:
    from markitdown import StreamInfo

    if suffix in (".htm", ".html"):
        content = _main_part(content)
    try:
        result = _converter().convert_stream(io.BytesIO(content), stream_info=StreamInfo(extension=suffix), strip=["a"])
    except Exception as error:  # of any of the libraries below MarkItDown
        raise ValueError(str(error)) from error
    text = result.markdown.encode(errors="replace").decode().strip()
    title = " ".join((result.title or "").split())
    return f"{title}\n\n{text}" if title and text and not text.startswith(("# ", "## ", title)) else text


def _main_part(content: bytes) -> bytes:
    """Return a page without its menus and footers: its `<main>`, if there is one."""
    from bs4 import BeautifulSoup

    page = BeautifulSoup(content, "html.parser")
    for tag in page(["nav", "footer", "aside", "form", "button"]):
        tag.decompose()
    if page.body is not None and (main := page.select_one("main, [role=main]")):
        page.body.clear()
        page.body.append(main)
    return page.encode()


@cache
def _converter() -> Any:
    import markitdown
    from markitdown import converters

    note("converting PDF, Word, PowerPoint, EPUB, HTML and Jupyter files to Markdown; each file is converted once")
    logging.getLogger("pdfminer").setLevel(logging.ERROR)  # a warning for each unusual font
    made = markitdown.MarkItDown(enable_builtins=False, enable_plugins=False)
    for kind in ("DocxConverter", "EpubConverter", "HtmlConverter", "IpynbConverter", "PdfConverter", "PptxConverter"):
        made.register_converter(getattr(converters, kind)())
    return made
