"""Vectors from a server: text-embeddings-inference (TEI), or OpenAI's embeddings API (vLLM, infinity, TEI, a provider).

Prompts, truncation and similarity are those of the model's folder and are applied here, because most servers know none of them.
Whether the server computes the folder's vectors is compared by `revela-hub check FOLDER --endpoint URL`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.http_client import Connection, in_thread, public_url, server_url
from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.retrieval.encoder import SERVED_PREFIX
from revela_hub.retrieval.model_settings import ModelSettings

ServerType = Literal["auto", "tei", "openai"]


class RejectedTexts(UserError):
    """The server does not accept these texts (HTTP 400, 413 or 422), for example because one is too long or empty."""


@dataclass
class EmbeddingServer:
    """A server that returns vectors. Several requests run concurrently, and temporary failures are repeated.

    Attributes:
        url: Its URL. If it has no path, the type of the server is detected.
        type: "tei" for `/embed`, "openai" for `/v1/embeddings`, or "auto".
        model: Name of the model on the server (default: the first that it lists).
        api_key: Sent as a bearer token and never printed.
        concurrency: Number of concurrent requests.
        timeout: Seconds without data from the server after which a request fails.
        retries: Number of retries of a failed request.
        normalize: Whether TEI returns unit vectors; other servers decide themselves.
        info: The server's report about itself.

    Raises:
        UserError: The URL or the key is invalid, the server cannot be reached, or it is another kind of server.
    """

    url: str = field(repr=False)
    type: ServerType = "auto"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 8
    timeout: float = 60.0
    retries: int = 5
    normalize: bool = True
    info: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Connects, and asks the server for its type and model."""
        parts = server_url(self.url)
        self.where = public_url(self.url).rstrip("/")
        path = parts.path.rstrip("/")
        for end, kind in (("/embed", "tei"), ("/embeddings", "openai")):
            if path.endswith(end):
                path, self.type = path.removesuffix(end), kind if self.type == "auto" else self.type  # type: ignore[assignment]
        self._server = Connection(parts, path, key=self.api_key, timeout=self.timeout, retries=self.retries)
        self._prefix = ""
        self._detect(path)

    def _detect(self, path: str) -> None:
        """Set `type`, `model` and `info` by what the server reports about itself."""
        if self.type != "openai":
            info = self._reported("/info")
            if isinstance(info, dict) and "model_id" in info:
                self.type, self.info, self.model = "tei", info, self.model or str(info["model_id"])
        prefixes = [""] if "/v1" in path else ["/v1", ""]
        for prefix in prefixes if self.type != "tei" else ():
            listed = self._reported(f"{prefix}/models")
            models = listed.get("data") if isinstance(listed, dict) else None
            if isinstance(models, list) and models and isinstance(models[0], dict) and "id" in models[0]:
                self.type, self.info, self._prefix = "openai", models[0], prefix
                self.model = self.model or str(models[0]["id"])
                return
        if self.type == "openai":
            self._prefix = prefixes[0]
        elif self.type == "auto":
            raise UserError(
                f"{self.where} answers neither like text-embeddings-inference (/info) nor like OpenAI's API (/v1/models):"
                " check the URL, or name the kind with --endpoint_type tei or openai"
            )

    def _reported(self, path: str) -> Any:
        """Return the answer to a GET request; None if the server does not know the path."""
        import openai

        try:
            return self._send(lambda client: client.get(path, cast_to=object))
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise self._failure(error) from error
            return None
        except (openai.OpenAIError, ValueError) as error:
            if isinstance(error, (openai.APIConnectionError, openai.APITimeoutError)):
                raise self._failure(error) from error
            return None

    @property
    def description(self) -> str:
        """The kind of server, its address, the model and its type of numbers, in one line."""
        name = {"tei": "text-embeddings-inference", "openai": "OpenAI's API"}[self.type]
        version, dtype = self.info.get("version", ""), self.info.get("model_dtype", "")
        return f"{' '.join(filter(None, (name, str(version))))} at {self.where}" + "".join(
            f", {text}" for text in (self.model, dtype) if text
        )

    @property
    def identity(self) -> str:
        """The suffix that separates its vectors from those of a local model; without its address, which may change."""
        dtype = self.info.get("model_dtype")
        return f"{SERVED_PREFIX}{self.type}:{self.model or ''}" + (f":{dtype}" if dtype else "")

    def embed(self, texts: list[str], *, batch_size: int = 32) -> NDArray[np.float32]:
        """Return the vectors (N, D) of N texts as the server computes them, with at most `concurrency` open requests.

        Raises:
            RejectedTexts: The server does not accept the texts.
            UserError: It fails repeatedly, or does not return one finite vector of the same dimension per text.
        """
        size = min(batch_size, int(self.info.get("max_client_batch_size") or batch_size))
        batches = [texts[start : start + size] for start in range(0, len(texts), size)]
        vectors = list(self._in_order(batches))
        if len(dimensions := sorted({part.shape[1] for part in vectors})) > 1:
            raise UserError(
                f"{self.where} returns vectors of different dimensions: {dimensions[0]} and {dimensions[-1]}"
            )
        return np.concatenate(vectors) if vectors else np.empty((0, 0), dtype=np.float32)

    def _in_order(self, batches: list[list[str]]) -> Iterator[NDArray[np.float32]]:
        window: deque[Future[NDArray[np.float32]]] = deque()
        for batch in batches:
            if len(window) == (self.concurrency if self._server.answered else 1):  # one first: it may fail for all
                yield window.popleft().result()
            window.append(in_thread(self._vectors, batch))
        while window:
            yield window.popleft().result()

    def _vectors(self, texts: list[str]) -> NDArray[np.float32]:
        import openai

        if self.type == "tei":
            path, body = "/embed", {"inputs": texts, "truncate": True, "normalize": self.normalize}
        else:
            path, body = f"{self._prefix}/embeddings", {"input": texts, "encoding_format": "float"}
            body |= {"model": self.model} if self.model else {}
        try:
            answer = self._send(lambda client: client.post(path, cast_to=object, body=body))
        except openai.OpenAIError as error:
            raise self._failure(error) from error
        except ValueError as error:  # not JSON
            raise UserError(
                f"{self.where}{path}: the answer is not valid JSON ({self._server.shown(error)})"
            ) from error
        return self._checked(answer, len(texts), f"{self.where}{path}")

    def _checked(self, answer: Any, count: int, where: str) -> NDArray[np.float32]:
        if isinstance(answer, str):
            kind = "an HTML page" if "<html" in answer[:1000].lower() else "text"
            raise UserError(f"{where}: the answer is {kind}, not vectors: check --endpoint and --endpoint_type")
        rows = answer
        if self.type == "openai":
            rows = answer.get("data") if isinstance(answer, dict) else None
            if isinstance(rows, list) and all(isinstance(row, dict) and "embedding" in row for row in rows):
                if sorted(row.get("index", at) for at, row in enumerate(rows)) != list(range(len(rows))):
                    raise UserError(f"{where}: the vectors are not numbered from 0 to {len(rows) - 1}")
                rows = [row["embedding"] for row in sorted(rows, key=lambda row: row.get("index", 0))]
            else:
                rows = None
        if not isinstance(rows, list):
            raise UserError(f"{where}: the answer has no list of vectors: check --endpoint and --endpoint_type")
        if len(rows) != count:
            raise UserError(f"{where}: the answer has {counted(len(rows), 'vector')} for {counted(count, 'text')}")
        try:
            vectors_ND = np.asarray(rows, dtype=np.float32)
        except (ValueError, TypeError) as error:
            raise UserError(f"{where}: the vectors are not lists of numbers of the same length") from error
        if vectors_ND.ndim != 2 or not vectors_ND.shape[1]:
            raise UserError(f"{where}: the vectors are not lists of numbers of the same length")
        if not np.isfinite(vectors_ND).all():  # null is how some servers write NaN
            raise UserError(f"{where}: a vector contains NaN or infinity: the server's precision may be too low")
        return vectors_ND

    def _send(self, request: Callable[[Any], Any]) -> Any:
        answer = self._server.send(request)
        self._server.answered = True
        return answer

    def _failure(self, error: Any) -> UserError:
        """Return the error of a request in one line."""
        import openai

        tries = f" ({self.retries + 1} tries)" if self.retries else ""
        if isinstance(error, openai.APITimeoutError):
            return UserError(f"{self.where} did not answer within {self.timeout:g} seconds (--request_timeout){tries}")
        if isinstance(error, openai.APIConnectionError):
            reason = self._server.shown(error.__cause__ or error)
            return UserError(f"cannot reach {self.where}: {reason}{tries if self._server.answered else ''}")
        if not isinstance(error, openai.APIStatusError):
            return UserError(f"{self.where} does not answer like a server of vectors: {self._server.shown(error)}")
        message = self._server.failure(error, self.where)
        if error.status_code in (400, 413, 422):
            return RejectedTexts(message)
        if error.status_code in (408, 409, 429) or error.status_code >= 500:
            return UserError(f"{message}{tries}: try again later, or lower --concurrency")
        return UserError(f"{message}: check --endpoint, --endpoint_type and --endpoint_model")


class EndpointEncoder:
    """Encodes texts on a server, with the prompts and the maximum length of the model's folder (an `Encoder`)."""

    def __init__(self, server: EmbeddingServer, settings: ModelSettings, device: str | None = None) -> None:
        self.server, self.settings = server, settings
        server.normalize = settings.normalizes
        self.similarity_fn_name = settings.similarity
        self.device = device or "cpu"

    def encode_query(self, inputs: list[str], /, **options: Any) -> NDArray[np.float32]:
        """Return the vectors (N, D) of N queries; `prompt` replaces the folder's own."""
        return self._encode(inputs, "query", **options)

    def encode_document(self, inputs: list[str], /, **options: Any) -> NDArray[np.float32]:
        """Return the vectors (N, D) of N documents; `prompt` replaces the folder's own."""
        return self._encode(inputs, "document", **options)

    def _encode(
        self, texts: list[str], kind: str, *, batch_size: int = 32, prompt: str | None = None, **_: Any
    ) -> NDArray[np.float32]:
        sent = self.settings.inputs(texts, kind, prompt)
        vectors_ND = self.server.embed(sent, batch_size=batch_size)
        expected = self.settings.dimension
        if len(sent) and expected and vectors_ND.shape[1] != expected:
            raise UserError(
                f"{self.server.where} returns vectors of dimension {vectors_ND.shape[1]}, but {self.settings.name} has"
                f" {expected}: it serves another model, or not all of its modules (see revela-hub check --endpoint)"
            )
        return vectors_ND[:, : self.settings.truncate_dim]
