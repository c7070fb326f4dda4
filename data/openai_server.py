"""A client of servers with OpenAI's API (vLLM, text-embeddings-inference, llama.cpp, Ollama, a provider)."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from revela_hub.errors import UserError, require

Item = TypeVar("Item")
Result = TypeVar("Result")


def openai_client(url: str, key: str | None = None, *, retries: int = 5) -> Any:
    """Return a client of the `openai` package; `/v1` is added to a URL without a path.

    The key is never the environment's `OPENAI_API_KEY`, which belongs to another server: pass it, or none.
    """
    require("openai")
    from openai import Omit, OpenAI

    if urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{server_name(url)} is not the URL of a server, such as http://localhost:8000/v1")
    return OpenAI(
        base_url=url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1",
        api_key=key or "EMPTY",
        default_headers={"OpenAI-Organization": Omit(), "OpenAI-Project": Omit()},  # type: ignore[dict-item]
        max_retries=retries,
    )


def api_key(variable: str | None) -> str | None:
    """Return the key in an environment variable.

    The error does not repeat the name, because a user may have passed the key itself, which must not end up in a log.
    """
    key = os.environ.get(variable, "").strip() if variable is not None else None
    if key == "":
        raise UserError("api_key_env: there is no environment variable of that name, or it is empty")
    return key


def concurrently(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with its result, in order; after the first one, up to `workers` calls run at the same time.

    They run in daemon threads, not in a ThreadPoolExecutor, for whose threads Python waits at exit: Ctrl-C would take as long as a
    server that does not answer.
    """
    window: deque[tuple[Item, Future[Result]]] = deque()
    most = 1
    for item in items:
        window.append((item, _in_thread(function, item)))
        if len(window) >= most:
            first, future = window.popleft()
            yield first, future.result()
            most = workers
    for first, future in window:
        yield first, future.result()


def _in_thread(function: Callable[[Item], Result], item: Item) -> "Future[Result]":
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(function(item))
        except BaseException as error:  # raised in the caller's thread
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


@contextmanager
def server_errors(url: str, key: str | None = None) -> Iterator[None]:
    """Name the server in the errors of `openai`, without the key, which a server may repeat."""
    import openai

    try:
        yield
    except openai.OpenAIError as error:
        cause = f" ({error.__cause__})" if isinstance(error, openai.APIConnectionError) and error.__cause__ else ""
        message = f"{server_name(url)}: {error}{cause}"
        raise UserError(message.replace(key, "***") if key else message) from error


def server_name(url: str) -> str:
    """Return a URL without user, password and query.

    >>> server_name("https://me:secret@example.org:8000/v1?key=abc")
    'https://example.org:8000/v1'
    """
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
