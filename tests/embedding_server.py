"""A server of vectors on this machine's loopback interface: OpenAI's `/v1/embeddings`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from loopback_server import Answer, LoopbackServer, Sent

Embed = Callable[[list[str]], Any]


class EmbeddingServer(LoopbackServer):
    """Answers with the vectors of `embed`, the last text first.

    Attributes:
        embed: Returns the vectors of a list of texts.
        answer: If set, replaces the regular answer; a function of the request's number.
        key: The key that it asks for.
        url: The address.
    """

    def __init__(self, embed: Embed) -> None:
        """Starts to listen."""
        self.embed, self.key = embed, ""
        self.answer: Callable[[int], Answer | None] = lambda number: None
        super().__init__()
        self.url = self.root

    def on_post(self, sent: Sent, number: int) -> Answer:
        """Return vectors."""
        if self.key and sent.headers.get("authorization") != f"Bearer {self.key}":
            return 401, {}, {"error": "invalid key"}
        if sent.path != "/v1/embeddings":
            return 404, {}, {"error": "not found"}
        rows = np.asarray(self.embed(sent.body["input"]), dtype=np.float64).tolist()
        data = [{"object": "embedding", "index": at, "embedding": row} for at, row in enumerate(rows)]
        whole = {"object": "list", "model": sent.body["model"], "data": data[::-1]}
        return self.answer(number) or (200, {}, whole)
