"""A server's management endpoints, as a benchmark uses them: readiness, model facts, cache flush, profiler."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from ...api.errors import ConfigError

_SECONDS = 30.0
_PROFILE_SECONDS = 600.0  # a trace is written before the answer comes
_BUSY_SECONDS = 10.0


class Control:
    """One server's (or router's) management endpoints. Blocks: not for use while the load runs."""

    def __init__(self, base_url: str, headers: Mapping[str, str]):
        self._base_url = base_url
        self._headers = {**headers, "Content-Type": "application/json"}

    def wait_ready(self, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        """Return once the server lists its models and is healthy; raise ConfigError after ``seconds``. ``check()`` is
        called after each vain attempt; what it raises ends the wait."""
        deadline = time.monotonic() + seconds
        announced = False
        while True:
            try:
                self._ask("/v1/models")
                self._check_health()
                return
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}"
                if error.code in (401, 403):
                    raise ConfigError(f"{self._base_url} requires a key ({reason}): give --api-key.") from None
                if error.code == 404:  # a server without the model list
                    return
            except (OSError, ValueError) as error:
                reason = str(getattr(error, "reason", error))
            check()
            if time.monotonic() >= deadline:
                raise ConfigError(f"No server answers at {self._base_url} ({reason}); start it, or name another with "
                                  "--base-url.")
            if not announced:
                announced = True
                print(f"Waiting up to {seconds:g} s for {self._base_url} ({reason}).", file=sys.stderr, flush=True)
            time.sleep(0.5)

    def _check_health(self) -> None:
        """Raises HTTPError 503 while a server loads its weights: it lists its model before."""
        try:
            self._ask("/health")
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise

    def model(self) -> dict[str, Any]:
        """The first entry of ``/v1/models``, empty where there is none."""
        found = (self._get("/v1/models") or {}).get("data") or [{}]
        return dict(found[0])

    def model_info(self) -> dict[str, Any]:
        """``/get_model_info``'s, empty where the server has none."""
        return self._get("/get_model_info") or {}

    def flush_cache(self) -> None:
        """Drop the prefix caches. Raises ConfigError where the server does not."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._ask("/flush_cache", {})
                return
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    self._demand("/reset_prefix_cache", {}, "--flush-cache")  # vLLM's
                    return
                if error.code != 400 or time.monotonic() >= deadline:  # 400: the warm-up is still in the cache
                    raise ConfigError(f"--flush-cache: the server answers HTTP {error.code}: "
                                      f"{_error_message(error)}") from None
            time.sleep(0.1)

    def start_profile(self, options: Mapping[str, Any]) -> str:
        """Start the profiler; returns the server's message (a router sends none). Raises ConfigError."""
        given = {name: value for name, value in options.items() if value is not None}
        return self._demand("/start_profile", given, "--profile")

    def stop_profile(self) -> str:
        """As ``start_profile``."""
        return self._demand("/stop_profile", {}, "--profile", _PROFILE_SECONDS)

    def _demand(self, path: str, body: Mapping[str, Any], flag: str, timeout: float = _SECONDS) -> str:
        try:
            found = self._ask(path, body, timeout)
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{flag}: {path} answers HTTP {error.code}: {_error_message(error)}") from None
        except OSError as error:
            raise ConfigError(f"{flag}: {path} cannot be asked: {error}.") from None
        return str(found.get("message", "")) if isinstance(found, dict) else str(found or "")

    def _get(self, path: str) -> dict[str, Any] | None:
        try:
            found = self._ask(path)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = _SECONDS) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base_url + path, data, self._headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read().decode("utf-8", "replace")
        try:
            return json.loads(text)
        except ValueError:
            return text


def _error_message(error: urllib.error.HTTPError) -> str:
    return " ".join(error.read().decode("utf-8", "replace").split())[:300]
