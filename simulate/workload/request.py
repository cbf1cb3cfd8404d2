"""A request of a workload: when it is due, how long it is, and what its prompt shares with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

BLOCK = 512
"""Tokens of one id of ``blocks``, as in Mooncake's traces."""


@dataclass(frozen=True)
class SimRequest:
    """``at``: seconds after the workload's beginning. Prompts with equal ``blocks`` after equal blocks share these
    tokens, ``block_size`` for each; what is beyond them is the request's own."""

    at: float
    input_len: int
    output_len: int
    blocks: Sequence[int] = ()
    block_size: int = BLOCK


def span(requests: Sequence[SimRequest]) -> float:
    """Seconds from the first arrival to the last."""
    return requests[-1].at - requests[0].at if requests else 0.0


def rate_of(requests: Sequence[SimRequest]) -> float:
    """Requests a second."""
    seconds = span(requests)
    return (len(requests) - 1) / seconds if seconds > 0 else float("inf")


def rescaled(requests: Sequence[SimRequest], factor: float) -> list[SimRequest]:
    """The same requests, ``factor`` times as far apart."""
    return [replace(request, at=request.at * factor) for request in requests]


def at_rate(requests: Sequence[SimRequest], rate: float) -> list[SimRequest]:
    """The same requests at ``rate`` a second on average, their arrivals' pattern kept."""
    return rescaled(requests, rate_of(requests) / rate)
