"""The request log: lines for each request, and a crash dump of the last requests when the engine dies."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...api.errors import ConfigError
from ...api.messages import Generate
from ...config.server import ObserveArgs
from ...obs.logging import SharedFile, check_folder

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
    of them, as words with ``text``. With ``dump_folder``, the running requests and those of the last five minutes are
    retained for ``dump``.
    """

    @classmethod
    def of(cls, args: ObserveArgs, max_bytes: int) -> RequestLog:
        """The log that the flags ask for, whose files have up to ``max_bytes``; raises ConfigError."""
        target = _logger_to(args.log_requests_target, max_bytes) if args.log_requests_target else log
        return cls(args.log_level_of_requests, args.dump_folder, text=args.log_requests_format == "text", target=target)

    def __init__(self, level: int | None, dump_folder: Path | None, *, text: bool = False,
                 target: logging.Logger = log):
        """Raises ConfigError where the folder cannot be written: when the engine is dead it is too late to say so."""
        if dump_folder is not None:
            _check_folder(dump_folder)
        self.level = level
        self.text = text
        self._log = target
        self.process = ""
        """Names this process in the names of its dumps, where a server has several that write some."""
        self._dump_folder = dump_folder
        self._entries: dict[str, _Entry] = {}
        self._ended: deque[tuple[float, _Entry]] = deque(maxlen=MAX_DUMPED_REQUESTS)

    def configure(self, level: int | None, dump_folder: str | None, text: bool | None = None) -> None:
        """Changes the level, and the folder and the form where one is given, for requests that begin or end from now
        on. Raises ConfigError, with nothing changed, where the folder cannot be written."""
        if dump_folder is not None:
            folder = Path(dump_folder).expanduser()
            _check_folder(folder)
            self._dump_folder = folder
        self.level = level
        self.text = self.text if text is None else text

    @property
    def dump_folder(self) -> Path | None:
        return self._dump_folder

    @property
    def active(self) -> bool:
        return self.level is not None or self._dump_folder is not None

    def start(self, requests: Sequence[Generate]) -> None:
        for request in requests:
            if self.level is not None:
                self._write("begin", request.rid, self._fields(request))
            if self._dump_folder is not None:
                self._entries[request.rid] = _Entry(time.time(), request)

    def end(self, rid: str, outcome: str, *, num_output_tokens: int, seconds: float, text: str) -> None:
        """``outcome``: a finish reason, an error's code, or ``disconnected``; ``seconds`` since the request arrived."""
        if self.level is not None:
            fields: dict[str, Any] = {"outcome": outcome, "output_tokens": num_output_tokens}
            fields["seconds"] = round(seconds, 4)
            if self.level >= 2:
                fields["text"] = text if self.level > 2 else text[:_MAX_LOGGED_CHARS]
            self._write("end", rid, fields)
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

    def _write(self, event: str, rid: str, fields: dict[str, Any]) -> None:
        """Prompts hold any characters, and a line must stay one: values are JSON in both forms."""
        if self.text:
            values = {name: msgspec.json.encode(value).decode() for name, value in {"rid": rid, **fields}.items()}
            self._log.info("%s", " ".join((event, *(f"{name}={value}" for name, value in values.items()))))
        else:
            self._log.info("%s", msgspec.json.encode({"event": event, "rid": rid, **fields}).decode())

    def _fields(self, request: Generate) -> dict[str, Any]:
        return {"prompt_tokens": len(request.input_ids), **shown_parameters(request, self.level or 0)}


def shown_parameters(request: Generate, level: int) -> dict[str, Any]:
    """The parameters of a request that --log-requests-level shows: 0 none, 1 those of sampling, 2 also the prompt's
    first tokens, 3 all of them."""
    fields: dict[str, Any] = {}
    if level >= 1:
        fields["sampling"] = request.sampling
    if level >= 2:
        fields["input_ids"] = request.input_ids if level > 2 else request.input_ids[:_MAX_LOGGED_CHARS]
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


def _logger_to(targets: Sequence[str], max_bytes: int) -> logging.Logger:
    """A logger whose lines go to these targets of --log-requests-target alone; raises ConfigError."""
    target = logging.getLogger("baton.request_lines")
    target.propagate = False
    target.setLevel(logging.INFO)
    target.handlers[:] = [
        logging.StreamHandler(sys.stdout) if name == "stdout" else
        SharedFile(check_folder(name, "--log-requests-target") / "requests.log", max_bytes) for name in targets]
    return target
