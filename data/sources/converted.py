"""PDF, Word, PowerPoint, EPUB, HTML and Jupyter files as text, by MarkItDown and PDFium (the extra `documents`).

PDFium reads PDF, because MarkItDown's converter lost most spaces in one of two manuals and took wrapped lines for tables.
"""

import importlib.metadata
import importlib.util
import io
from functools import cache
from typing import Any

SUFFIXES = frozenset({".docx", ".epub", ".htm", ".html", ".ipynb", ".pdf", ".pptx"})
CONVERTED_FORMATS = "PDF, Word, PowerPoint, EPUB, HTML or Jupyter (pip install markitdown pypdfium2)"
"""The reason in a report for files that are skipped without the extra."""

# Addresses and escapes (DEBIAN\\_FRONTEND) are noise in passages and queries.
_MARKDOWN = {"strip": ["a", "img"], "escape_asterisks": False, "escape_underscores": False}


@cache
def converter_version() -> str:
    """Return the versions of MarkItDown and pypdfium2, or "" if one of them is not installed."""
    if not (importlib.util.find_spec("markitdown") and importlib.util.find_spec("pypdfium2")):
        return ""
    return " ".join([*(importlib.metadata.version(name) for name in ("markitdown", "pypdfium2")), "pages", *_MARKDOWN])


def as_text(content: bytes, suffix: str) -> str:
    """Return a file as text, in Markdown where it has a structure; a damaged or encrypted file is an exception of any type."""
    if suffix == ".pdf":
        import pypdfium2

        with pypdfium2.PdfDocument(content) as document:
            pages = [page.get_textpage().get_text_range() for page in document]
        text = "\n\n\f".join(pages).replace("\r\n", "\n").replace("\ufffe", "")  # U+FFFE: a hyphen at the end of a line
    else:
        from markitdown import StreamInfo

        charset = "utf-8" if suffix in (".htm", ".html", ".ipynb") else None  # else it is guessed from the beginning
        information = StreamInfo(extension=suffix, charset=charset)
        text = _converter().convert_stream(io.BytesIO(content), stream_info=information, **_MARKDOWN).markdown
    return text.encode(errors="replace").decode().strip()


@cache
def _converter() -> Any:
    """MarkItDown with these formats only: its other converters unpack archives and call web services."""
    import markitdown
    from markitdown import converters

    made = markitdown.MarkItDown(enable_builtins=False, enable_plugins=False)
    for kind in ("DocxConverter", "EpubConverter", "HtmlConverter", "IpynbConverter", "PptxConverter"):
        made.register_converter(getattr(converters, kind)())
    return made
