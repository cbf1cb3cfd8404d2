"""HTTP with JSON bodies over the standard library."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any

from .errors import BackendError

_TIMEOUT_SECONDS = 3 * 3600.0


@dataclass(frozen=True)
class JSONClient:
    """Calls one server. ``verify`` is a file of certificates to trust instead of the system's."""

    base_url: str
    headers: dict[str, str] = field(default_factory=dict)
    verify: str | None = None

    def get(self, path: str) -> Any:
        """The answer's JSON, or its text; raises BackendError."""
        return self._call(path, None)

    def post(self, path: str, body: Any) -> Any:
        """The answer's JSON, or its text; raises BackendError."""
        return self._call(path, body)

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """The JSON of each server-sent event up to ``[DONE]``; raises BackendError, for an error within too."""
        with self._open(path, body) as answer:
            for line in _lines(answer):
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event, dict) and event.get("error"):
                    raise BackendError(_message(data.decode()))
                yield event

    def _call(self, path: str, body: Any) -> Any:
        with self._open(path, body) as answer:
            text = b"".join(_lines(answer)).decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _open(self, path: str, body: Any) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(self.base_url.rstrip("/") + path, data, headers)
        context = ssl.create_default_context(cafile=self.verify) if self.verify else None
        try:
            answer: HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS, context=context)
            return answer
        except urllib.error.HTTPError as error:
            with error:
                raise BackendError(_message(error.read().decode(errors="replace")), error.code) from None
        except (OSError, HTTPException) as error:
            raise BackendError(f"Cannot reach {self.base_url}: {getattr(error, 'reason', error)}.") from None


def bearer(api_key: str | None) -> dict[str, str]:
    """The header of a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _lines(answer: HTTPResponse) -> Iterator[bytes]:
    try:
        yield from answer
    except (OSError, HTTPException) as error:
        raise BackendError(f"The answer broke off: {error}.") from None


def _message(text: str) -> str:
    """An error answer's message, in OpenAI's shape or another."""
    try:
        body = json.loads(text)
    except ValueError:
        return text
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
