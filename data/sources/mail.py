"""E-mail as text: the subject and the text of each message of an `.eml` or `.mbox` file, without headers and attachments."""

import mailbox
from collections.abc import Iterator
from contextlib import closing
from email import message_from_bytes, policy
from email.errors import InvalidBase64LengthDefect
from email.message import MIMEPart
from pathlib import Path
from typing import cast

from revela_hub.data.sources import converted
from revela_hub.data.sources.unicode import decoded


def is_mail(path: Path) -> bool:
    """Return whether a file holds e-mail, by its name; Apple Mail's files are called `mbox`."""
    return path.name.lower().rpartition(".")[2] in ("eml", "mbox")


def messages(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each message as it is in the file, and what its number adds to the file's name; a mailbox is streamed.

    Raises:
        ValueError: A mailbox without messages that is not empty.
    """
    if path.suffix.lower() == ".eml":
        yield "", path.read_bytes()
        return
    with closing(mailbox.mbox(path, create=False)) as box:
        number = 0
        for number, key in enumerate(box.iterkeys(), start=1):
            yield f":{number}", box.get_bytes(key)
    if not number and path.stat().st_size:
        raise ValueError("no line begins with 'From '")


def message_text(content: bytes) -> str | None:
    """Return a message's subject and text; None if the text is HTML and the extra that reads it is missing.

    Raises:
        ValueError: It has no headers, or its text is damaged.
    """
    try:
        message = message_from_bytes(content, policy=policy.default)
        if not message.keys():
            raise ValueError("no headers of an e-mail")
        subject, part = str(message["subject"] or ""), message.get_body(("plain", "html"))
        text = "" if part is None else _part_text(part)
        is_page = part is not None and part.get_content_subtype() == "html"
    except Exception as error:  # the parser fails in many ways
        raise ValueError(str(error)) from error
    if is_page and text.strip():
        if not converted.converter_version():
            return None
        # The mark of UTF-8 outweighs the character set that the page declares.
        text = converted.as_text(f"\ufeff{text}".encode(errors="replace"), Path("message.html"))
    title = " ".join(subject.encode(errors="replace").decode().split())
    return f"{title}\n\n{text}" if title and text.strip() else text


def _part_text(part: MIMEPart) -> str:
    content = cast(bytes, part.get_payload(decode=True))
    if any(isinstance(defect, InvalidBase64LengthDefect) for defect in part.defects):
        raise ValueError("damaged base64")
    charset = part.get_content_charset("us-ascii")
    try:
        # Much text in UTF-8 is declared as ASCII.
        text = decoded(content)[0] if charset == "us-ascii" else content.decode(charset, errors="replace")
    except (LookupError, ValueError):  # an unknown character set
        text = decoded(content)[0]
    return text.replace("\r\n", "\n").encode(errors="replace").decode()
