"""E-mail is read as its subject and text; attachments and encodings are no text."""

import mailbox
import re
from email.message import EmailMessage
from pathlib import Path

import pytest

from revela_hub.data import ReadReport, read_documents
from revela_hub.data.sources import converted


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))


def letter(subject: str, text: str, page: str = "") -> EmailMessage:
    message = EmailMessage()
    message["Subject"], message["From"] = subject, "a@example.org"
    message.set_content(text, cte="quoted-printable")
    if page:
        message.add_alternative(page, subtype="html")
    message.add_attachment(bytes(range(256)) * 100, maintype="application", subtype="pdf", filename="a.pdf")
    return message


def test_subject_and_text_of_a_message(tmp_path: Path) -> None:
    (tmp_path / "a.eml").write_bytes(bytes(letter("Größe der Kantine", "Sie öffnet um zwölf.\n", "<p>As HTML.</p>")))
    [document] = read_documents(tmp_path)
    assert (document.text, document.kind) == ("Größe der Kantine\n\nSie öffnet um zwölf.\n", "text")
    for charset in ("x-unknown", "us-ascii"):
        head = f"Subject: Café\nContent-Type: text/plain; charset={charset}\n\n"
        (tmp_path / "a.eml").write_text(f"{head}Crème", encoding="utf-8")
        assert next(read_documents(tmp_path)).text == "Café\n\nCrème"
    [raw] = read_documents(tmp_path, kind="code")
    assert raw.text.startswith("Subject: ")


def test_each_message_of_a_mailbox_is_a_document(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut = b"Subject: c\nContent-Transfer-Encoding: base64\n\nU2Fsd\n"
    (tmp_path / "mail").mkdir()
    box = mailbox.mbox(tmp_path / "mail" / "old.mbox")
    for message in (letter("a", "First.\n"), cut, letter("b", " "), letter("c", "Third.\n")):
        box.add(message)
    box.close()
    (tmp_path / "mail" / "mbox").write_text("no mailbox")
    (tmp_path / "mail" / "new.mbox").write_text("")
    (tmp_path / "mail" / "no.eml").write_text("\nno headers")
    report = ReadReport()
    documents = list(read_documents(tmp_path / "mail", report=report))
    name = tmp_path / "mail" / "old.mbox"
    assert [(each.id, each.text) for each in documents] == [
        (f"{name}:1", "a\n\nFirst.\n"),
        (f"{name}:4", "c\n\nThird.\n"),
    ]
    assert report.skipped == {"unreadable": 3, "empty": 1}
    for problem in (
        "old.mbox:2 is skipped: .*damaged base64",
        "mbox is skipped: .*no line begins",
        "no.eml is .*no headers",
    ):
        assert re.search(problem, caplog.text)


def test_a_message_in_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = '<html><head><meta charset="latin-1"></head><body><h1>März</h1><p>Long &amp; cold.</p></body></html>'
    message = EmailMessage()
    message["Subject"] = "Spring"
    message.set_content(page, subtype="html")
    (tmp_path / "a.eml").write_bytes(bytes(message))
    if converted.converter_version():
        [document] = read_documents(tmp_path / "a.eml")
        assert document.text == "Spring\n\n# März\n\nLong & cold."
    monkeypatch.setattr(converted, "converter_version", lambda: "")
    report = ReadReport()
    (tmp_path / "b.txt").write_text("plain")
    assert [each.text for each in read_documents(f"{tmp_path}/*.*", report=report)] == ["plain"]
    assert report.skipped == {converted.CONVERTED_FORMATS: 1}
