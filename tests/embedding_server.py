"""A server of vectors on this machine's loopback interface: TEI's `/embed` and OpenAI's `/v1/embeddings`, with faults to choose."""

from collections.abc import Callable
from typing import Any

import numpy as np
from loopback_server import Answer, LoopbackServer, Sent

Embed = Callable[[list[str]], Any]


class EmbeddingServer(LoopbackServer):
    """Answers with the vectors of `embed`.

    Attributes:
        embed: Returns the vectors of a list of texts.
        answer: If set, called with the path, the body and the number of the request; a result replaces the regular answer.
        url: The address.
    """

    def __init__(self, embed: Embed, kind: str = "tei") -> None:
        """Starts to listen."""
        self.embed, self.kind, self.key, self.gets = embed, kind, "", 0
        self.info: dict[str, Any] = {"model_id": "tiny", "version": "1.9.3", "model_dtype": "float32"}
        self.answer: Callable[[str, Any, int], Answer | None] = lambda path, body, number: None
        super().__init__()
        self.url = self.root

    def on_get(self, path: str) -> Answer:
        """Return what the server says about itself."""
        self.gets += 1
        return self.answer(path, None, self.gets) or self.report(path.partition("?")[0])

    def on_post(self, sent: Sent, number: int) -> Answer:
        """Return vectors."""
        if self.key and sent.headers.get("authorization") != f"Bearer {self.key}":
            return 401, {}, {"error": "invalid key"}
        path = sent.path.partition("?")[0]
        return self.answer(path, sent.body, number) or self.vectors(path, sent.body)

    def report(self, path: str) -> Answer:
        """Return what the server says about itself."""
        if self.kind == "tei" and path == "/info":
            return 200, {}, self.info
        if self.kind == "openai" and path == "/v1/models":
            return 200, {}, {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
        if self.kind == "infinity" and path == "/models":
            return 200, {}, {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
        return 404, {}, {"error": "not found"}

    def vectors(self, path: str, body: Any) -> Answer:
        """Return the regular answer to a POST."""
        if self.kind == "tei" and path == "/embed":
            return 200, {}, np.asarray(self.embed(body["inputs"]), dtype=np.float64).tolist()
        if path == {"openai": "/v1/embeddings", "infinity": "/embeddings"}.get(self.kind):
            rows = np.asarray(self.embed(body["input"]), dtype=np.float64).tolist()
            data = [{"object": "embedding", "index": at, "embedding": row} for at, row in enumerate(rows)]
            return 200, {}, {"object": "list", "model": body["model"], "data": data[::-1]}
        return 404, {}, {"error": "not found"}
