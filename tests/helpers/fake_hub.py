"""A Hugging Face hub of one repository, whose largest file arrives slowly."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """``allowed`` of the slow file's bytes are sent; ``let(share)`` allows more."""

    def __init__(self, name: str, folder: Path, slow: str):
        self.name = name
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.slow = slow
        self.revisions: set[str] = set()
        self._share = 0.0
        self._changed = threading.Condition()

    def let(self, share: float) -> None:
        with self._changed:
            self._share = share
            self._changed.notify_all()

    def pieces(self, name: str, start: int) -> Iterator[bytes]:
        """A file's bytes from ``start`` on, as they are allowed."""
        content = self.files[name]
        while start < len(content):
            with self._changed:
                stop = len(content) if name != self.slow else int(self._share * len(content))
                if stop <= start:
                    self._changed.wait(30)
                    continue
            yield content[start:stop]
            start = stop

    def entries(self) -> list[dict]:
        return [{"type": "file", "path": name, "rfilename": name, "size": len(content), "oid": oid(content),
                 "blobId": oid(content)} for name, content in self.files.items()]


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def hub(name: str, folder: Path, slow: str) -> Iterator[tuple[Hub, str]]:
    """The hub and its address."""
    repository = Hub(name, folder, slow)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": repository}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield repository, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = urlparse(self.path).path
        if path.startswith(f"/api/models/{self.hub.name}/tree/"):
            return self._json(self.hub.entries())
        if path.startswith(f"/api/models/{self.hub.name}"):
            self.hub.revisions.add(path.rpartition("/revision/")[2])
            return self._json({"id": self.hub.name, "sha": COMMIT, "siblings": self.hub.entries(), "tags": []})
        name = path.rpartition("/")[2]
        if not path.startswith(f"/{self.hub.name}/resolve/") or name not in self.hub.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self._file(name, body)
        return None

    def _file(self, name: str, body: bool) -> None:
        content = self.hub.files[name]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{oid(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        for piece in self.hub.pieces(name, start) if body else ():
            self.wfile.write(piece)

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass
