"""An OpenAI-compatible endpoint (vLLM, llama.cpp, Ollama, text-generation-inference, a provider) as a backend."""

import hashlib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from revela_hub.data.http_client import Connection, in_thread, public_url, server_message, server_url
from revela_hub.data.sources.report import counted
from revela_hub.data.synthesis.backends import CUT_OFF, Reply, Request, RequestT, Sampling, take
from revela_hub.errors import UserError
from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from openai import APIStatusError


@dataclass
class Endpoint:
    """A server with OpenAI's chat-completions API, accessed with the `openai` client.

    Several requests run concurrently. The client retries temporary failures (408, 409, 429, 5xx, a timeout, a lost
    connection) after 0.5, 1, 2, ... 8 seconds, or after the time in `Retry-After`. The JSON schema of a request is sent as
    `response_format` unless the server rejects it.

    Attributes:
        url: The URL of the server, with or without `/v1`.
        model: The name of the model on the server.
        api_key: Sent as a bearer token and never printed. None: `EMPTY`, as expected by servers without keys.
        sampling: Sampling settings.
        concurrency: Number of concurrent requests.
        timeout: Seconds without data from the server after which a request fails.
        retries: Number of retries of a failed request.
        extra_body: More fields of the request, or replacements of ours; None removes a field.

    Raises:
        ValueError: A number is out of range.
        UserError: The URL is invalid or contains a password; the key is invalid; the package `openai` is not installed.
    """

    url: str = field(repr=False)
    model: str
    api_key: str | None = field(default=None, repr=False)
    sampling: Sampling = field(default_factory=Sampling)
    concurrency: PositiveInt = 8
    timeout: PositiveFloat = 120.0
    retries: NonNegativeInt = 5
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._follows_schema = self._refused_schema = False
        parts = server_url(self.url)
        path = parts.path.rstrip("/")
        if not path.endswith("/chat/completions") and not re.search(r"/v\d", path):
            path += "/v1"
        path = path.removesuffix("/chat/completions")
        secrets = self.extra_body.values()
        self._server = Connection(
            parts, path, key=self.api_key, timeout=self.timeout, retries=self.retries, secrets=secrets
        )

    @property
    def recorded(self) -> dict[str, Any]:
        """The settings that replies depend on. --extra_body may contain a secret, so only its hash is recorded."""
        extra = json.dumps(dict(self.extra_body), sort_keys=True).encode()
        body = hashlib.sha256(extra).hexdigest() if self.extra_body else None
        return self.sampling.recorded() | {"weights": None, "extra_body": body}

    def replies(self, requests: Iterable[RequestT | None]) -> Iterator[tuple[RequestT, Reply]]:
        """Yield each request with its reply, in order, with up to `concurrency` concurrent requests.

        After Ctrl-C or a failure, replies that have arrived are yielded before the exception is raised.

        Raises:
            UserError: The endpoint cannot be reached, rejects the key, or fails repeatedly.
        """
        window: deque[tuple[RequestT, Future[Reply]]] = deque()
        source = iter(requests)
        more = True
        try:
            while more or window:
                if more:
                    taken, more = take(source, self.concurrency - len(window))
                    window += [(request, in_thread(self._ask, request)) for request in taken]
                if window:
                    request, future = window[0]
                    reply = future.result()
                    window.popleft()
                    yield request, reply
        except (KeyboardInterrupt, UserError):
            # These replies have been paid for: yield them, then stop.
            for request, future in window:
                if future.done() and future.exception() is None:
                    yield request, future.result()
            raise

    def _ask(self, request: Request) -> Reply:
        import openai

        where = public_url(self.url)
        tries = f"({counted(self.retries + 1, 'time')}); run again without --overwrite to resume"
        schema = None if self._refused_schema else request.schema
        try:
            completion = self._complete(request, schema)
            choices = getattr(completion, "choices", None)
            if not choices:  # gateways such as OpenRouter report errors with status 200
                said = getattr(completion, "error", None)
                raise TypeError(f"it answers {said}" if said else "it has no choices")
            choice = choices[0]
            text = choice.message.content or ""
            if not isinstance(text, str):
                raise TypeError(f"the message's content is a {type(text).__name__}")
        except openai.APITimeoutError as error:
            raise UserError(f"{where} did not answer within {self.timeout:g} seconds (--timeout) {tries}") from error
        except openai.APIConnectionError as error:
            tries = f" {tries}" if self._server.answered else ""
            raise UserError(f"cannot reach {where}: {self._server.shown(error.__cause__ or error)}{tries}") from error
        except openai.APIStatusError as error:
            if schema is not None and not self._follows_schema and error.status_code in (400, 422, 501):
                self._refused_schema = True
                return self._ask(request)
            return self._refusal(error, where, tries)
        except (openai.OpenAIError, ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
            # Such as an HTML page of a proxy while the server restarts: the request is repeated.
            if self._server.answered:
                return Reply("", "not a chat completion")
            message = f"{where} does not answer like OpenAI's chat completions API ({self._server.shown(error)})"
            raise UserError(f"{message}; check --endpoint") from error
        self._server.answered = True
        self._follows_schema |= schema is not None
        refused = "refused by the endpoint" if getattr(choice.message, "refusal", None) and not text else None
        return Reply(text, CUT_OFF if choice.finish_reason == "length" else refused)

    def _complete(self, request: Request, schema: Mapping[str, Any] | None) -> Any:
        json_schema = {"name": "example", "strict": True, "schema": schema}
        body = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_new_tokens,
            "seed": request.seed,
            "response_format": {"type": "json_schema", "json_schema": json_schema} if schema else None,
            **self.extra_body,
        }
        fields: Any = {
            "model": self.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "extra_body": {name: value for name, value in body.items() if value is not None},
        }
        return self._server.send(lambda client: client.chat.completions.create(**fields))

    def _refusal(self, error: "APIStatusError", where: str, tries: str) -> Reply:
        """Return the reply for an HTTP error of one request, or raise UserError for one that concerns the whole run."""
        status = error.status_code
        if status in (400, 413, 422) and self._server.answered:  # only this prompt: too long, or against the policy
            return Reply(self._server.shown(server_message(error)), "refused by the endpoint")
        message = self._server.failure(error, where)
        wait = error.response.headers.get("Retry-After")
        if wait and status in (429, 503):  # longer than the client waits, or repeatedly
            raise UserError(f"{message}; the server asks to wait (Retry-After: {wait}): run again later") from error
        if status in (408, 409, 429) or status >= 500:
            raise UserError(f"{message} {tries}") from error
        raise UserError(
            f"{message}; check --endpoint and --model {self.model}, or leave fields out with --extra_body"
        ) from error
