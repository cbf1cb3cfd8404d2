"""The registry of trace formats, and reading a trace by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ....common.api.errors import ConfigError
from ....common.registry import Registry
from ..request import SimRequest


class TraceFormat(Protocol):
    """Reads a published format."""

    def matches(self, head: str) -> bool:
        """True where a file that begins with ``head`` is probably in this format."""

    def read(self, path: Path, count: int | None) -> list[SimRequest]:
        """The first ``count`` requests, all without; times may begin at any. Raises ConfigError, or ValueError,
        KeyError or TypeError for a line that cannot be read."""


TRACE_FORMATS: Registry[TraceFormat] = Registry("trace format", "baton.simulate.workload.formats")
_HEAD_BYTES = 4096


def read_trace(path: str, name: str | None, count: int | None) -> list[SimRequest]:
    """Reads a trace in the order of its times, from 0 on. Raises ConfigError."""
    file = Path(path)
    with _read_errors(path):
        with file.open(encoding="utf-8-sig", errors="replace") as opened:
            head = opened.read(_HEAD_BYTES)
        name = name or _format_of(path, head)
        requests = TRACE_FORMATS.get(name).read(file, count)
    usable = sorted((each for each in requests if each.input_len > 0 and each.output_len > 0), key=lambda r: r.at)
    if not usable:
        raise ConfigError(f"{path} has no requests with input and output tokens.")
    first = usable[0].at
    return [SimRequest(each.at - first, each.input_len, each.output_len, each.blocks, each.block_size)
            for each in usable]


def _format_of(path: str, head: str) -> str:
    for name in TRACE_FORMATS.names:
        if TRACE_FORMATS.get(name).matches(head):
            return name
    raise ConfigError(f"{path} begins like no trace that is known: name its --trace-format.")


@contextmanager
def _read_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"Cannot read --trace {path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} is not in this trace format: {error!r}. Name its --trace-format.") from None


def columns_of(header: Sequence[str], *names: str) -> list[int]:
    """The indices of columns, by names in any case. Raises ValueError."""
    found = [each.strip().lower() for each in header]
    return [found.index(name.lower()) for name in names]
