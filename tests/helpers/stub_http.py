"""An HTTP server in this process that answers as a test says, and keeps what it was sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answers = Mapping[str, Callable[[Any], Any]]
"""By path: the JSON that answers a body, an iterator of server-sent events, or a pair of an error's status and JSON."""


@dataclass
class Stub:
    url: str
    requests: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def bodies(self, path: str) -> list[Any]:
        return [body for sent, body in self.requests if sent == path]


@contextmanager
def stub_server(answers: Answers) -> Iterator[Stub]:
    stub = Stub("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            stub.requests.append((self.path, body))
            stub.headers.append({name.lower(): value for name, value in self.headers.items()})
            if self.path not in answers:
                return self._send(404, b'{"error": {"message": "No such path."}}')
            found = answers[self.path](body)
            if isinstance(found, Iterator):
                events = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in found)
                return self._send(200, events + b"data: [DONE]\n\n", "text/event-stream")
            status, found = found if isinstance(found, tuple) else (200, found)
            return self._send(status, json.dumps(found).encode())

        def _send(self, status: int, data: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
