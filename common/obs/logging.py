"""One log format for every process: text or JSON lines with UTC times, on stderr and in a file that is rotated."""

from __future__ import annotations

import fcntl
import json
import logging
import logging.handlers
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..api.errors import ConfigError
from ..config.logs import LogArgs

MAX_ROTATED_FILES = 3
"""The number of rotated files of a log file that --log-max-mb bounds."""
_NOISY = ("asyncio", "aiohttp.access", "filelock", "httpx", "httpcore", "huggingface_hub", "transformers", "urllib3")
_ROOT = "baton"
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_PLAIN = re.compile(r"[^\s\"=]+")


def setup_logging(args: LogArgs, component: str) -> None:
    """Sends this process's log to stderr, and to a file in --log-dir; ``component`` names the process (``router``,
    ``prefill.rank0``), and up to a dot the file. Raises ConfigError where the file cannot be written.

    The level applies to Baton's loggers (``baton.…``); libraries log from warning on. Calling it again replaces the
    former setup.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if args.log_dir is not None:
        name = f"{component.partition('.')[0]}.log"
        handlers.append(SharedFile(check_folder(args.log_dir) / name, args.max_bytes))
    formatter = JsonLine(component) if args.log_json else TextLine(component)
    for handler in handlers:
        handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the log has lines of its own for downloads
    logging.getLogger(_ROOT).setLevel("WARNING" if args.log_level == "warn" else args.log_level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def check_folder(name: str, flag: str = "--log-dir") -> Path:
    """Creates a missing folder of ``flag``; raises ConfigError where it cannot be written."""
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"Cannot write to {flag} {folder}: {error.strerror}.") from None


class SharedFile(logging.handlers.RotatingFileHandler):
    """A log file that several processes append to, and that any of them rotates once it is large enough.

    Lines are appended by one write each (O_APPEND), so that they do not mix. A process whose file another one has
    rotated sees that its size exceeds the bound, and opens the new one.
    """

    def __init__(self, path: Path, max_bytes: int):
        super().__init__(path, maxBytes=max_bytes, backupCount=MAX_ROTATED_FILES, encoding="utf-8")

    def shouldRollover(self, record: logging.LogRecord) -> int:
        if self.stream is None:  # closed at the interpreter's exit; it is opened again for later lines
            self.stream = self._open()
        return int(self.maxBytes > 0 and os.fstat(self.stream.fileno()).st_size >= self.maxBytes)

    def doRollover(self) -> None:
        assert self.stream is not None
        folder = os.open(os.path.dirname(self.baseFilename), os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if self._is_current(self.stream.fileno()):
                super().doRollover()
            else:
                self.stream.close()
                self.stream = self._open()
        finally:
            os.close(folder)

    def _is_current(self, number: int) -> bool:
        """True while the open file has the log file's name."""
        try:
            return os.path.samestat(os.stat(self.baseFilename), os.fstat(number))
        except FileNotFoundError:
            return False


def cut(path: Path, max_bytes: int) -> None:
    """Rotates a file that another process appends to and cannot reopen, once it is large enough: its content is copied
    and the file truncated. Lines written in between, within microseconds, are lost."""
    if not max_bytes or path.stat().st_size < max_bytes:
        return
    older = [path.with_name(f"{path.name}.{number}") for number in range(1, MAX_ROTATED_FILES + 1)]
    for newer, old in zip(reversed(older[:-1]), reversed(older[1:])):
        if newer.exists():
            newer.replace(old)
    with path.open("rb") as source, older[0].open("wb") as target:
        while chunk := source.read(1 << 20):
            target.write(chunk)
        os.truncate(path, 0)


class ManyLines(logging.LogRecord):
    """A record of several lines, formatted at once: for events that are too frequent for one record each.

    ``clock`` formats a time as the log does.
    """

    def as_text(self, component: str, clock: Callable[[float], str]) -> str:
        raise NotImplementedError

    def as_json(self, component: str, clock: Callable[[float], str]) -> str:
        raise NotImplementedError


class _Line(logging.Formatter):
    """A formatter that names the component and formats times by the log's clock."""

    def __init__(self, component: str):
        super().__init__()
        self._component = component
        self._clock = _Clock()


class TextLine(_Line):
    """``time level component: message name=value …``; a record has the values in ``extra={"fields": {...}}``.

    One line is one event: unprintable characters are escaped. Tracebacks follow below.
    """

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record, ManyLines):
            return record.as_text(self._component, self._clock.text)
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        parts = [self._clock.text(record.created), f"{record.levelname:<7}", f"{self._component}:",
                 _escaped(record.getMessage()), *(f"{name}={plain_value(value)}" for name, value in fields.items())]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLine(_Line):
    """``time``, ``level``, ``component``, ``message``, then the record's ``extra={"fields": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record, ManyLines):
            return record.as_json(self._component, self._clock.text)
        line = {"time": self._clock.text(record.created), "level": record.levelname.lower(),
                "component": self._component, "message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # a lone surrogate in a name or a message
            return json.dumps(line, default=str)


class _Clock:
    """UTC to the millisecond (RFC 3339), so that the lines of several hosts sort."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def text(self, created: float) -> str:
        second = int(created)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._text}.{int((created - second) * 1000):03d}Z"


def _escaped(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def plain_value(value: Any) -> str:
    """A plain word as it is, any other value as JSON."""
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return _escaped(value)
    return _escaped(json.dumps(value, ensure_ascii=False, default=str))
