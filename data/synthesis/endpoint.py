"""An OpenAI-compatible endpoint (vLLM, llama.cpp, Ollama, text-generation-inference, a provider) as a backend."""

import itertools
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from revela_hub.data.synthesis.backends import Reply, Request, RequestT, Sampling, take
from revela_hub.errors import UserError

# Statuses that say: this request again, a little later.
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_LONGEST_WAIT = 600.0  # seconds; an endpoint that asks for more has no quota left today

# A request and where its reply goes; None: no more.
_Work: TypeAlias = "queue.SimpleQueue[tuple[Request, Future[Reply]] | None]"


def public_url(url: str) -> str:
    """The URL for messages: without user, password and query, which may hold a key.

    >>> public_url("https://me:secret@example.org:8000/v1?key=abc")
    'https://example.org:8000/v1'
    """
    return re.sub(r"(?<=://)[^/]*@|[?#].*", "", url)


@dataclass
class Endpoint:
    """Any server that speaks OpenAI's chat completions, through `huggingface_hub.InferenceClient`.

    Several requests are under way at once. One that fails for a while (429, 5xx, a time-out, a lost connection) is made
    again after 1, 2, 4, ... seconds, or after what `Retry-After` says, which then holds for all the others too.

    Attributes:
        url: Of the server, with or without `/v1`.
        model: Its name there.
        api_key: Sent as a bearer token, and never shown. None: `EMPTY`, as servers without keys expect it.
        sampling: Of the replies.
        concurrency: Requests at once.
        timeout: Seconds without a byte from the server after which a request has failed.
        retries: How often a failed request is made again.
        extra_body: Further fields of the request, or other values of ours; None leaves a field out.
        backoff: Seconds before the first retry.

    Raises:
        UserError: The URL is not one, or holds a password, or an option is out of range.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    sampling: Sampling = field(default_factory=Sampling)
    concurrency: int = 8
    timeout: float = 120.0
    retries: int = 5
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    backoff: float = 1.0

    def __post_init__(self) -> None:
        """Checks the options; nothing is sent."""
        from huggingface_hub import InferenceClient

        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # no number where the port is
            valid = False
        if not valid:
            raise UserError(f"{public_url(self.url)} is not the URL of a server, such as http://localhost:8000/v1")
        if parts.username or parts.password:
            raise UserError(f"{public_url(self.url)}: no user or password in the URL; name --api-key-env instead")
        for name, least in (("concurrency", 1), ("retries", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} must be at least {least}, not {getattr(self, name)}")
        if self.timeout <= 0:
            raise UserError(f"--timeout must be above 0 seconds, not {self.timeout}")
        # Always a key of our own: without one the client sends the user's Hugging Face token, to whatever server it is.
        self._client = InferenceClient(base_url=self.url, api_key=self.api_key or "EMPTY", timeout=self.timeout)
        self._lock = threading.Lock()
        self._not_before = 0.0
        self._answered = False
        self.retried = 0

    def replies(self, requests: Iterable[RequestT | None]) -> Iterator[tuple[RequestT, Reply]]:
        """Each request with its reply, in order, with up to `concurrency` requests under way.

        After Ctrl-C or a failure come the replies that are there already, then the exception.

        Raises:
            UserError: The endpoint cannot be reached, refuses the key, or fails again and again.
        """
        work: _Work = queue.SimpleQueue()
        stop = threading.Event()
        # Not a ThreadPoolExecutor: Python waits for its threads at exit, so that Ctrl-C would take up to a time-out.
        for _ in range(self.concurrency):
            threading.Thread(target=self._serve, args=(work, stop), daemon=True).start()
        window: deque[tuple[RequestT, Future[Reply]]] = deque()
        source = iter(requests)
        more = True
        try:
            while more or window:
                if more:
                    taken, more = take(source, self.concurrency - len(window))
                    for request in taken:
                        window.append((request, Future()))
                        work.put(window[-1])
                if window:
                    request, future = window[0]
                    reply = future.result()
                    window.popleft()
                    yield request, reply
        except (KeyboardInterrupt, UserError):
            # What has been answered is paid for: hand it over, then stop.
            for request, future in window:
                if future.done() and future.exception() is None:
                    yield request, future.result()
            raise
        finally:
            stop.set()
            for _ in range(self.concurrency):
                work.put(None)

    def _serve(self, work: _Work, stop: threading.Event) -> None:
        while (item := work.get()) is not None and not stop.is_set():
            request, future = item
            try:
                future.set_result(self._ask(request, stop))
            except BaseException as error:  # for the caller's thread
                future.set_exception(error)

    def _ask(self, request: Request, stop: threading.Event) -> Reply:
        """One reply, after as many tries as are allowed."""
        for attempt in itertools.count():
            with self._lock:
                pause = self._not_before - time.monotonic()
            if pause > 0:
                stop.wait(pause)
            outcome = self._try(request)
            if isinstance(outcome, Reply):
                self._answered = True
                return outcome
            if outcome.fatal or (outcome.unreachable and not self._answered):
                raise UserError(outcome.message)
            if outcome.wait is not None and outcome.wait > _LONGEST_WAIT:
                raise UserError(f"{outcome.message}; it asks to wait for {outcome.wait:.0f} seconds: run again then")
            if attempt == self.retries or stop.is_set():
                raise UserError(f"{outcome.message} ({attempt + 1} times); run again to go on from here")
            with self._lock:
                self.retried += 1
                if outcome.wait is not None:
                    self._not_before = max(self._not_before, time.monotonic() + outcome.wait)
            if outcome.wait is None:
                stop.wait(min(self.backoff * 2**attempt, 60.0))
        raise AssertionError("the loop above ends by itself")

    def _try(self, request: Request) -> "Reply | _Failure":
        # InferenceClient raises the HTTP library's errors, which is httpx or httpx2 by its version; both have the one
        # base class that its own module has imported.
        from huggingface_hub.errors import HfHubHTTPError, HTTPError, InferenceTimeoutError, OfflineModeIsEnabled

        where = public_url(self.url)
        try:
            completion = self._client.chat_completion(
                [{"role": "user", "content": request.prompt}],
                model=self.model,
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                max_tokens=self.sampling.max_new_tokens,
                seed=request.seed,
                extra_body=dict(self.extra_body),
            )
            choice = completion.choices[0]
            problem = "cut off" if choice.finish_reason == "length" else None
            return Reply(choice.message.content or "", problem)
        except OfflineModeIsEnabled:
            return _Failure(
                f"{where}: HF_HUB_OFFLINE=1 forbids every request of huggingface_hub; set it to 0 for this", fatal=True
            )
        except HfHubHTTPError as error:
            return self._refusal(error, where)
        except HTTPError as error:
            kind = type(error).__name__
            # Releases before 2.0 let the HTTP library's own time-outs through.
            if isinstance(error, InferenceTimeoutError) or kind in ("ReadTimeout", "WriteTimeout", "PoolTimeout"):
                return _Failure(f"{where} did not answer within {self.timeout:g} seconds (see --timeout)")
            return _Failure(f"cannot reach {where}: {self._shown(error) or kind}", unreachable=True)
        except (ValueError, AttributeError, IndexError, KeyError, TypeError) as error:
            # Not fatal: a proxy in front of a server that restarts answers with a page of HTML.
            return _Failure(f"{where} does not answer as OpenAI's chat completions do ({self._shown(error)})")

    def _refusal(self, error: Any, where: str) -> "Reply | _Failure":
        """What an HTTP status means for this request and for the run."""
        status = error.response.status_code
        said = self._shown(error.server_message or "")
        message = f"{where}: HTTP {status}{f' ({said})' if said else ''}"
        if status in (401, 403):
            remedy = (
                "was refused: check its value" if self.api_key else "is needed: put it into an environment variable"
            )
            return _Failure(f"{message}; the API key {remedy} (--api-key-env NAME)", fatal=True)
        if status in _TRANSIENT:
            return _Failure(message, wait=_retry_after(error.response.headers))
        if status in (400, 413, 422) and self._answered:  # of this prompt: too long, or against the server's policy
            return Reply(said, "refused by the endpoint")
        return _Failure(
            f"{message}; check --endpoint and --model {self.model}, or leave fields out with --extra-body", fatal=True
        )

    def _shown(self, error: object) -> str:
        """A message of the server or of the library in one line, without our key should it be in there."""
        text = " ".join(str(error).split())
        if self.api_key:
            text = text.replace(self.api_key, "***")
        return re.sub(r"(\w+://)[^\s/@]+@", r"\1", text)[:300]


@dataclass(frozen=True)
class _Failure:
    """Why there is no reply.

    Attributes:
        fatal: Trying again cannot help.
        unreachable: No connection: a typing error if it is the first request, else perhaps a restart.
        wait: Seconds that the server asks to wait.
    """

    message: str
    fatal: bool = False
    unreachable: bool = False
    wait: float | None = None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that `Retry-After` asks for, which may also be a date."""
    value = (headers.get("Retry-After") or "").strip()
    if value.isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())
