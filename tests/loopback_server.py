"""A server of JSON on this machine's loopback interface, which keeps what it was sent and counts concurrent requests."""

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], Any]
"""Status (0: the connection is closed), headers, and bytes or an object to send as JSON."""


@dataclass
class Sent:
    """A POST request; the path has its query."""

    path: str
    body: Any
    headers: dict[str, str]
    time: float = field(default_factory=time.monotonic)


class LoopbackServer:
    """Listens from the start; a subclass answers.

    Attributes:
        posts: The POST requests, in order.
        most_open: The largest number of POST requests at the same time.
        closing: Set when the server stops listening.
        root: The address, without a path.
    """

    def __init__(self) -> None:
        """Starts to listen."""
        self.posts: list[Sent] = []
        self.open = self.most_open = 0
        self.lock, self.closing = threading.Condition(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True  # or a body waits up to 40 ms for the acknowledgement of the headers

            def do_GET(self) -> None:
                self.reply(outer.on_get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                sent = Sent(self.path, body, headers)
                with outer.lock:
                    outer.posts.append(sent)
                    number = len(outer.posts)
                    outer.open += 1
                    outer.most_open = max(outer.most_open, outer.open)
                    outer.lock.notify_all()
                answer = outer.on_post(sent, number)
                with outer.lock:
                    outer.open -= 1
                self.reply(answer)

            def reply(self, answer: Answer) -> None:
                status, headers, content = answer
                if not status:  # the server dies
                    self.connection.close()
                    return
                content = content if isinstance(content, bytes) else json.dumps(content).encode()
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
        self.root = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def on_get(self, path: str) -> Answer:
        """Return the answer to a GET request."""
        return 404, {}, {"error": "not found"}

    def on_post(self, sent: Sent, number: int) -> Answer:
        """Return the answer to a POST request, the number-th."""
        raise NotImplementedError

    def wait_for_open(self, count: int) -> None:
        """Delays an answer until that many POST requests have been open at the same time, or a minute has passed."""
        with self.lock:
            self.lock.wait_for(lambda: self.most_open >= count, timeout=60)

    def close(self) -> None:
        """Stops listening."""
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()
