"""What is told of requests beside their answers: log lines, and a dump of the last ones when the engine dies."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...api.errors import ConfigError
from ...api.messages import Generate

log = logging.getLogger("baton.requests")

KEPT_SECONDS = 300.0
KEPT_REQUESTS = 1000
_SHOWN = 2048  # characters of a text, and token ids of a prompt, that level 2 shows


@dataclass
class _Entry:
    """A request as it came, and how it ended; None while it runs."""

    arrived: float
    request: Generate
    outcome: str | None = None
    num_output_tokens: int = 0


class RequestLog:
    """One server's. ``level`` None logs nothing; 0 counts, 1 also sampling parameters, 2 also the beginnings of prompt
    and answer, 3 all of them. With ``dump_folder``, the requests that run, and those of the last five minutes, are
    kept for ``dump``.
    """

    def __init__(self, level: int | None, dump_folder: Path | None):
        """Raises ConfigError where the folder cannot be written: when the engine is dead it is too late to say so."""
        if dump_folder is not None:
            _check_folder(dump_folder)
        self._level = level
        self._dump_folder = dump_folder
        self._entries: dict[str, _Entry] = {}
        self._ended: deque[tuple[float, _Entry]] = deque(maxlen=KEPT_REQUESTS)

    @property
    def active(self) -> bool:
        return self._level is not None or self._dump_folder is not None

    def began(self, requests: Sequence[Generate]) -> None:
        for request in requests:
            if self._level is not None:
                log.info("%s", _line("begin", request.rid, self._of_request(request)))
            if self._dump_folder is not None:
                self._entries[request.rid] = _Entry(time.time(), request)

    def ended(self, rid: str, outcome: str, *, num_output_tokens: int, seconds: float, text: str) -> None:
        """``outcome``: a finish reason, an error's code, or ``disconnected``; ``seconds`` since the request came."""
        if self._level is not None:
            told: dict[str, Any] = {"outcome": outcome, "output_tokens": num_output_tokens}
            told["seconds"] = round(seconds, 4)
            if self._level >= 2:
                told["text"] = text if self._level > 2 else text[:_SHOWN]
            log.info("%s", _line("end", rid, told))
        entry = self._entries.pop(rid, None)
        if entry is not None:
            entry.outcome, entry.num_output_tokens = outcome, num_output_tokens
            self._ended.append((time.time(), entry))

    def dump(self, reason: str) -> Path | None:
        """Write what is kept as JSON lines, why first; returns the file, None where nothing is kept."""
        if self._dump_folder is None:
            return None
        target = self._dump_folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        oldest = time.time() - KEPT_SECONDS
        entries = [entry for when, entry in self._ended if when >= oldest] + list(self._entries.values())
        try:
            self._dump_folder.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.write(msgspec.json.encode({"reason": reason, "time": time.time()}) + b"\n")
                for entry in entries:
                    file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            log.error("the crash dump %s was not written: %s", target, error.strerror)
            return None
        log.error("the last %d requests are in %s", len(entries), target)
        return target

    def _of_request(self, request: Generate) -> dict[str, Any]:
        told: dict[str, Any] = {"prompt_tokens": len(request.input_ids)}
        if self._level and self._level >= 1:
            told["sampling"] = request.sampling
        if self._level and self._level >= 2:
            told["input_ids"] = request.input_ids if self._level > 2 else request.input_ids[:_SHOWN]
        return told


def _check_folder(folder: Path) -> None:
    """Make it where it is missing; raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot keep crash dumps in {folder}: {error.strerror}; give another "
                          "--crash-dump-folder.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"Cannot write to {folder}; give another --crash-dump-folder.")


def _line(event: str, rid: str, told: dict[str, Any]) -> str:
    """One JSON object: prompts hold what they like, and a log line must stay one line."""
    return msgspec.json.encode({"event": event, "rid": rid, **told}).decode()
