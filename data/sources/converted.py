"""PDF, Word, PowerPoint, EPUB, HTML and Jupyter files as text, converted once by PDFium and MarkItDown (the extra `documents`).

The text is kept in the cache of Hugging Face (`HF_HOME`), named after the file's content and the converter's version. Of MarkItDown,
only the converters of these formats are used: its others would unpack archives and call web services. Its converter of PDF lost most
spaces in one of two manuals and took wrapped lines for tables, so PDFium reads these.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import re
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from revela_hub.data.text.words import LETTER
from revela_hub.errors import UserError, install_hint
from revela_hub.output import note
from revela_hub.whole_files import write_text

SUFFIXES = frozenset({".docx", ".epub", ".htm", ".html", ".ipynb", ".pdf", ".pptx"})
CONVERTED_FORMATS = "PDF, Word, PowerPoint, EPUB, HTML or Jupyter"
"""The reason in a report for files that are skipped without the extra."""
MAX_UNPACKED = 2**30
"""Maximum size in bytes of the files in a Word, PowerPoint or EPUB file, which are unpacked in memory."""


def install_remedy() -> str:
    """Return what to install to read these formats."""
    return f"to read PDF, Word, PowerPoint, EPUB, HTML and Jupyter files: {install_hint('markitdown')}"


@cache
def converter_version() -> str:
    """Return the versions of MarkItDown and pypdfium2, or "" if one of them is not installed."""
    if not (importlib.util.find_spec("markitdown") and importlib.util.find_spec("pypdfium2")):
        return ""
    return " ".join(importlib.metadata.version(name) for name in ("markitdown", "pypdfium2"))


def as_text(content: bytes, path: Path) -> str:
    """Return a file as text (Markdown, where it has a structure), from the cache if possible; its title comes first.

    Raises:
        ValueError: The file is damaged, encrypted, has another format than its suffix says, or unpacks to more than 1 GiB.
    """
    from huggingface_hub import constants

    suffix = path.suffix.lower()
    digest = hashlib.sha256(f"3 {converter_version()}{suffix}".encode() + content).hexdigest()[:32]
    kept = Path(constants.HF_HOME) / "revela-hub" / "documents" / f"{digest}.txt"
    if kept.parts[:1] == ("~",):  # there is no home folder, and so no cache
        return _convert(content, suffix)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if text := kept.read_text(encoding="utf-8"):  # empty after a crash of the machine
            return text
    text = _convert(content, suffix)
    with contextlib.suppress(OSError, UserError):  # without a cache, the next command converts the file again
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, text)
    return text


def _convert(content: bytes, suffix: str) -> str:
    _note_once()
    try:
        if suffix == ".pdf":
            return _pdf_text(content)
        from markitdown import StreamInfo

        if suffix in (".htm", ".html"):
            content = _main_part(content)
        elif (
            suffix != ".ipynb"
            and sum(each.file_size for each in zipfile.ZipFile(io.BytesIO(content)).filelist) > MAX_UNPACKED
        ):
            raise ValueError(f"it unpacks to more than {MAX_UNPACKED:,} bytes")
        utf_8 = suffix in (".htm", ".html", ".ipynb")  # else it is guessed from the beginning
        info = StreamInfo(extension=suffix, charset="utf-8" if utf_8 else None)
        options = {"strip": ["a"], "escape_underscores": False, "escape_asterisks": False}  # of markdownify
        result = _converter().convert_stream(io.BytesIO(content), stream_info=info, **options)
    except Exception as error:  # of any of the libraries
        raise ValueError(str(error)) from error
    text = result.markdown.encode(errors="replace").decode().strip()
    title = " ".join((result.title or "").split())
    has_title = re.match(f"##? |{re.escape(title)}(?!{LETTER})", text)
    return f"{title}\n\n{text}" if title and text and not has_title else text


@cache
def _note_once() -> None:
    note("converting PDF, Word, PowerPoint, EPUB, HTML and Jupyter files to text; each file is converted once")


def _pdf_text(content: bytes) -> str:
    import pypdfium2

    with pypdfium2.PdfDocument(content) as document:
        pages = [page.get_textpage().get_text_range() for page in document]
    # PDFium marks hyphens at the end of a line with U+FFFE.
    text = "\n\n".join(pages).replace("\r\n", "\n").replace("\ufffe", "")
    return text.encode(errors="replace").decode().strip()


_TITLES = ["h1", "h2", "h3", "h4", "h5", "h6", "dt", "summary"]
_PERMALINKS = ("#", "§", "¶", "🔗")


def _main_part(content: bytes) -> bytes:
    """Return a page without its menus, footers and links to its own headings: its `<main>`, if there is one."""
    from bs4 import BeautifulSoup

    page = BeautifulSoup(content, "html.parser")
    for tag in page(["nav", "footer", "aside", "input", "select", "textarea", "button"]):
        is_title = tag.name == "button" and tag.find_parent(_TITLES)  # as the questions of an FAQ often are
        if not is_title:
            tag.decompose()
    for link in page("a"):
        if link.get_text().strip() in _PERMALINKS:
            link.decompose()
    if page.body is not None and (main := page.select_one("main, [role=main]")):
        page.body.clear()
        page.body.append(main)
    return page.encode()


@cache
def _converter() -> Any:
    import markitdown
    from markitdown import converters

    made = markitdown.MarkItDown(enable_builtins=False, enable_plugins=False)
    for kind in ("DocxConverter", "EpubConverter", "HtmlConverter", "IpynbConverter", "PptxConverter"):
        made.register_converter(getattr(converters, kind)())
    return made
