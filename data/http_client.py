"""Access to servers with OpenAI's API through the `openai` client: URL, key, retries, concurrency and error messages.

The client retries temporary failures (408, 409, 429, 5xx, a timeout, a lost connection) after 0.5, 1, 2, ... 8 seconds, or
after the time in `Retry-After`.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit

from revela_hub.errors import UserError, require

if TYPE_CHECKING:
    from openai import APIStatusError

ResultT = TypeVar("ResultT")


def server_url(url: str) -> SplitResult:
    """Return the parts of the URL of a server."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        valid = False
    if not valid:
        raise UserError(f"{public_url(url)} is not the URL of a server, such as http://localhost:8000/v1")
    if parts.username or parts.password:
        raise UserError(f"{public_url(url)}: remove user and password from the URL; use --api_key_env instead")
    return parts


class Connection:
    """A client of a server; making one sends nothing.

    Args:
        parts: The URL (`server_url`).
        path: The path that replaces the URL's own.
        key: The API key; None sends `EMPTY`, as expected by servers without keys.
        timeout: Seconds without data after which a request fails.
        retries: Number of retries of a failed request.
        secrets: Texts that messages must not contain, besides the key and the values in the URL.

    Attributes:
        answered: Whether the server has given a valid answer; set by the user of the connection.

    Raises:
        UserError: The key is not a valid HTTP header, or the package `openai` is not installed.
    """

    def __init__(
        self,
        parts: SplitResult,
        path: str,
        *,
        key: str | None,
        timeout: float,
        retries: int,
        secrets: Iterable[object] = (),
    ) -> None:
        if key and not re.fullmatch(r"[!-~]+", key):
            raise UserError("the API key (--api_key_env) contains characters that are not allowed in an HTTP header")
        require("openai")
        from openai import Omit, OpenAI

        query = dict(parse_qsl(parts.query))
        if query:  # it may contain a key, and the HTTP library logs whole URLs
            for library in ("httpx", "httpx2"):
                logging.getLogger(library).addFilter(_reject)
        self._key, self._retries, self._secrets = key, retries, [key, *query.values(), *secrets]
        self.answered = False
        self._client = OpenAI(
            base_url=f"{parts.scheme}://{parts.netloc}{path}",
            # Always set: otherwise the client would send the environment's OpenAI key and ids to this server.
            api_key=key or "EMPTY",
            default_headers={"OpenAI-Organization": Omit(), "OpenAI-Project": Omit()},  # type: ignore[dict-item]
            default_query=query,
            timeout=timeout,
            max_retries=retries,
        )

    def send(self, request: Callable[[Any], ResultT]) -> ResultT:
        """Send a request; the first one is not repeated if the server cannot be reached, which is likely a typo."""
        from openai import APITimeoutError, InternalServerError, RateLimitError

        client = self._client
        if not self.answered and self._retries:
            try:
                return request(client.with_options(max_retries=0))
            except (APITimeoutError, InternalServerError, RateLimitError):
                client = client.with_options(max_retries=self._retries - 1)
        return request(client)

    def shown(self, error: object) -> str:
        """Return an error message in one line of at most 300 characters, without secrets and passwords in URLs."""
        text = " ".join(str(error).split())
        for secret in self._secrets:
            text = text.replace(secret, "***") if isinstance(secret, str) and len(secret) > 7 else text
        return re.sub(r"(\w+://)[^\s/@]+@", r"\1", text)[:300]

    def failure(self, error: "APIStatusError", where: str) -> str:
        """Return the message for an HTTP error."""
        said = self.shown(server_message(error))
        message = f"{where}: HTTP {error.status_code}{f' ({said})' if said else ''}"
        if error.status_code in (401, 403):
            remedy = "was rejected: check its value" if self._key else "is required: set an environment variable"
            raise UserError(f"{message}; the API key {remedy} (--api_key_env NAME)") from error
        return message


def in_thread(function: Callable[..., ResultT], *arguments: Any) -> "Future[ResultT]":
    """Call a function in a new daemon thread.

    Not a ThreadPoolExecutor: Python waits for its threads at exit, so Ctrl-C could take as long as the timeout.
    """
    future: Future[ResultT] = Future()

    def work() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # raised in the caller's thread
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def public_url(url: str) -> str:
    """Return the URL for messages: without user, password and query, which may contain a key.

    >>> public_url("https://me:secret@example.org:8000/v1?key=abc")
    'https://example.org:8000/v1'
    """
    return re.sub(r"(?<=://)[^/]*@|[?#].*", "", url)


def server_message(error: "APIStatusError") -> str:
    """Return the server's message, from variants of OpenAI's `{"error": {"message": ...}}`; "" for an HTML page."""
    said: Any = error.body
    while isinstance(said, dict):
        said = next((said[key] for key in ("message", "error", "detail") if said.get(key)), None)
    return str(said) if said and "<html" not in str(said).lower() else ""


def _reject(_: logging.LogRecord) -> bool:
    return False
