"""Service level objectives of requests: times to the first token and between tokens that they want."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Annotated, NamedTuple

from msgspec import Meta

from ...api.errors import InvalidRequest

MAX_MS = 86_400_000.0
Milliseconds = Annotated[float, Meta(gt=0, le=MAX_MS)]
TTFT, TPOT = "slo_ttft_ms", "slo_tpot_ms"


class Slo(NamedTuple):
    """Objectives in seconds; None without one."""

    ttft: float | None = None
    tpot: float | None = None


NO_SLO = Slo()
HEADER_SLO: ContextVar[Slo] = ContextVar("objectives in headers", default=NO_SLO)


def slo_of_headers(headers: Mapping[str, str]) -> Slo:
    """Returns the objectives of ``x-slo-ttft-ms`` and ``x-slo-tpot-ms``; raises InvalidRequest."""
    return Slo(*(None if (text := headers.get(name)) is None else _seconds(name, text)
                 for name in ("x-slo-ttft-ms", "x-slo-tpot-ms")))


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_MS:
        raise InvalidRequest(f"{name} must be milliseconds above 0 and up to {MAX_MS:.0f}, not {text!r}.", param=name)
    return value / 1e3


def slo_of(ttft_ms: float | None, tpot_ms: float | None) -> Slo:
    """Returns the objectives of a body's fields, or else of the request's headers."""
    header = HEADER_SLO.get()
    return Slo(header.ttft if ttft_ms is None else ttft_ms / 1e3, header.tpot if tpot_ms is None else tpot_ms / 1e3)
