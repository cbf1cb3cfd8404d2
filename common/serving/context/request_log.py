"""The request log: lines for each request, and a crash dump of the last requests when the engine dies."""

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

DUMPED_SECONDS = 300.0
MAX_DUMPED_REQUESTS = 1000
_MAX_LOGGED_CHARS = 2048  # of a text, and as many token ids of a prompt, at level 2


@dataclass
class _Entry:
    """A request as it arrived, and its outcome; None while it runs."""

    arrived: float
    request: Generate
    outcome: str | None = None
    num_output_tokens: int = 0


class RequestLog:
    """The request log of one server.

    ``level`` None logs nothing; 0 counts, 1 also sampling parameters, 2 also the beginnings of prompt and answer, 3 all
    of them. With ``dump_folder``, the running requests and those of the last five minutes are retained for ``dump``.
    """

    def __init__(self, level: int | None, dump_folder: Path | None):
        """Raises ConfigError where the folder cannot be written: when the engine is dead it is too late to say so."""
        if dump_folder is not None:
            _check_folder(dump_folder)
        self.level = level
        self.process = ""
        """Names this process in the names of its dumps, where a server has several that write some."""
        self._dump_folder = dump_folder
        self._entries: dict[str, _Entry] = {}
        self._ended: deque[tuple[float, _Entry]] = deque(maxlen=MAX_DUMPED_REQUESTS)

    def configure(self, level: int | None, dump_folder: str | None) -> None:
        """Changes the level, and the folder where one is given, for requests that begin or end from now on. Raises
        ConfigError, with nothing changed, where the folder cannot be written."""
        if dump_folder is not None:
            folder = Path(dump_folder).expanduser()
            _check_folder(folder)
            self._dump_folder = folder
        self.level = level

    @property
    def dump_folder(self) -> Path | None:
        return self._dump_folder

    @property
    def active(self) -> bool:
        return self.level is not None or self._dump_folder is not None

    def start(self, requests: Sequence[Generate]) -> None:
        for request in requests:
            if self.level is not None:
                log.info("%s", _line("begin", request.rid, self._fields(request)))
            if self._dump_folder is not None:
                self._entries[request.rid] = _Entry(time.time(), request)

    def end(self, rid: str, outcome: str, *, num_output_tokens: int, seconds: float, text: str) -> None:
        """``outcome``: a finish reason, an error's code, or ``disconnected``; ``seconds`` since the request arrived."""
        if self.level is not None:
            fields: dict[str, Any] = {"outcome": outcome, "output_tokens": num_output_tokens}
            fields["seconds"] = round(seconds, 4)
            if self.level >= 2:
                fields["text"] = text if self.level > 2 else text[:_MAX_LOGGED_CHARS]
            log.info("%s", _line("end", rid, fields))
        entry = self._entries.pop(rid, None)
        if entry is not None:
            entry.outcome, entry.num_output_tokens = outcome, num_output_tokens
            self._ended.append((time.time(), entry))

    def dump(self, reason: str) -> Path | None:
        """Writes the retained requests as JSON lines, ``reason`` first; returns the file, None without a folder."""
        if self._dump_folder is None:
            return None
        target = self._dump_folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}{self.process}.jsonl"
        oldest = time.time() - DUMPED_SECONDS
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

    def _fields(self, request: Generate) -> dict[str, Any]:
        fields: dict[str, Any] = {"prompt_tokens": len(request.input_ids)}
        if self.level and self.level >= 1:
            fields["sampling"] = request.sampling
        if self.level and self.level >= 2:
            fields["input_ids"] = request.input_ids if self.level > 2 else request.input_ids[:_MAX_LOGGED_CHARS]
        return fields


def _check_folder(folder: Path) -> None:
    """Creates a missing folder; raises ConfigError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write crash dumps to {folder}: {error.strerror}; give another "
                          "--crash-dump-folder.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"Cannot write to {folder}; give another --crash-dump-folder.")


def _line(event: str, rid: str, fields: dict[str, Any]) -> str:
    """One JSON object: prompts hold any characters, and a log line must stay one line."""
    return msgspec.json.encode({"event": event, "rid": rid, **fields}).decode()
