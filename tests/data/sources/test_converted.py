import io
import json
import zipfile
from pathlib import Path

import pytest

from revela_hub.data import ReadReport, read_documents
from revela_hub.data.row_cache import rows_fingerprint
from revela_hub.data.sources import converted
from revela_hub.data.sources.source import Document, parse_sources
from revela_hub.data.text.chunks import chunk_document
from revela_hub.errors import UserError
from revela_hub.retrieval.passages import Hit

PAGE = """<html><head><title>Contracts - Wiki</title><script>run()</script></head><body>
<nav><a href="/">Home</a></nav><main><h1>Contracts</h1><p>They are <a href="/renew">renewed</a> in M\u00e4rz: NEW_FORM.</p></main>
<footer>Imprint</footer></body></html>"""
WORD = (
    '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>'
    "<w:p><w:r><w:t>The canteen opens at noon.</w:t></w:r></w:p></w:body></w:document>"
)
WORD_TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Override PartName="/word/document.xml" '
    'ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
WORD_LINKS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="rId1" Target='
    '"word/document.xml" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"/>'
    "</Relationships>"
)


def word_file() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("[Content_Types].xml", WORD_TYPES)
        archive.writestr("_rels/.rels", WORD_LINKS)
        archive.writestr("word/document.xml", WORD)
    return content.getvalue()


def pdf_file(text: str) -> bytes:
    stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    body, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(body))
        body += b"%d 0 obj%s endobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return body + b"xref\n0 6\n0000000000 65535 f \n%strailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        table,
        len(body),
    )


def test_pages_and_office_files_are_read_as_markdown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("markitdown", reason="the extra documents is not installed")
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.HTML").write_text(PAGE, encoding="utf-8")
    (folder / "b.docx").write_bytes(word_file())
    (folder / "c.pdf").write_bytes(pdf_file("Parking is free."))
    (folder / "d.pdf").write_bytes(b"%PDF-1.4 cut off")
    cells = [{"cell_type": "markdown", "source": ["# Caf\u00e9\n" * 9000]}, {"cell_type": "code", "source": ["x = 1"]}]
    notebook = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}, ensure_ascii=False)
    (folder / "e.ipynb").write_text(notebook, encoding="utf-8")
    report = ReadReport()

    documents = list(read_documents(folder, report=report))

    assert documents.pop().text == "# Caf\u00e9\n" * 9000 + "\n```python\nx = 1\n```"  # UTF-8 to its end
    assert [document.text for document in documents] == [
        "Home\n\n# Contracts\n\nThey are renewed in M\u00e4rz: NEW_FORM.\n\nImprint",
        "The canteen opens at noon.",
        "Parking is free.",
    ]
    assert {(document.kind, document.path) for document in documents} == {("text", None)}
    assert str(report) == "4 documents; skipped: 1 unreadable"
    assert "d.pdf is skipped: it cannot be read" in caplog.text
    # As code, a page keeps its tags.
    (page,) = read_documents(folder / "a.HTML", kind="code")
    assert page.text.startswith("<html>")


def test_hits_in_a_pdf_have_its_pages() -> None:
    pages = [f"Page {name} has a text. It is short." for name in ("one", "two", "three")]
    chunks = chunk_document(Document("manual.PDF", "\n\n\f".join(pages), None, "text"), 8)
    assert [(chunk.start_line, chunk.end_line) for chunk in chunks] == [(1, 1), (2, 2), (3, 3)]
    assert Hit(1.0, "", "manual.PDF", None, 2, 2).location == "manual.PDF:page 2"
    assert Hit(1.0, "", "manual.PDF", None, 2, 3).location == "manual.PDF:pages 2-3"


def test_without_the_extra_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    before = rows_fingerprint({}, parse_sources(tmp_path / "page.html"))
    monkeypatch.setattr(converted, "converter_version", lambda: "")
    with pytest.raises(UserError, match=r"skipped 1 PDF, Word, .*pip install"):
        list(read_documents(tmp_path / "page.html"))
    monkeypatch.setattr("revela_hub.data.row_cache.converter_version", lambda: "another")
    assert rows_fingerprint({}, parse_sources(tmp_path / "page.html")) != before  # cached rows are made again
