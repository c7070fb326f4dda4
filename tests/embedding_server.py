"""A server of vectors on this machine's loopback interface: TEI's `/embed` and OpenAI's `/v1/embeddings`, with faults to choose."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

Answer = tuple[int, dict[str, str], Any]
Embed = Callable[[list[str]], Any]


class EmbeddingServer:
    """Answers with the vectors of `embed`.

    Attributes:
        embed: Returns the vectors of a list of texts.
        answer: If set, called with the path, the body and the number of the request; a result replaces the regular answer.
        requests: The path and body of each request that was a POST.
    """

    def __init__(self, embed: Embed, kind: str = "tei") -> None:
        """Starts to listen."""
        self.embed, self.kind, self.key = embed, kind, ""
        self.info: dict[str, Any] = {"model_id": "tiny", "version": "1.9.3", "model_dtype": "float32"}
        self.answer: Callable[[str, Any, int], Answer | None] = lambda path, body, number: None
        self.requests: list[tuple[str, Any]] = []
        self.open = self.most_open = self.gets = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.gets += 1
                path = self.path.partition("?")[0]
                self.send(outer.answer(path, None, outer.gets) or outer.report(path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path = self.path.partition("?")[0]
                with outer.lock:
                    outer.requests.append((path, body))
                    number = len(outer.requests)
                    outer.open += 1
                    outer.most_open = max(outer.most_open, outer.open)
                refused = outer.key and self.headers.get("Authorization") != f"Bearer {outer.key}"
                found = (401, {}, {"error": "invalid key"}) if refused else outer.answer(path, body, number)
                found = found or outer.vectors(path, body)
                with outer.lock:
                    outer.open -= 1
                self.send(found)

            def send(self, found: Answer) -> None:
                status, headers, answer = found
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                kind = {} if "Content-Type" in headers else {"Content-Type": "application/json"}
                try:
                    self.send_response(status)
                    for name, value in (kind | headers | {"Content-Length": str(len(content))}).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # who asked has gone

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

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

    def close(self) -> None:
        """Stops listening."""
        self.http.shutdown()
        self.http.server_close()


def late(seconds: float) -> Callable[[str, Any, int], Answer | None]:
    """Answer only after some seconds."""

    def wait(path: str, body: Any, number: int) -> None:
        if body is not None:
            time.sleep(seconds)

    return wait
