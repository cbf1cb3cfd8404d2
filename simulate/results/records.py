"""Records of a run: an outcome of each request, the gaps between tokens, the use of each server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..workload.request import SimRequest

_POINTS = 8
"""Values that describe gaps that grow evenly."""

if TYPE_CHECKING:
    from ...common.request.req import Req
    from ..world.engine import Engine


@dataclass(slots=True)
class Outcome:
    """A request as its client saw it; times in seconds. ``emitted``: when its engine sent its last token."""

    number: int
    request: SimRequest
    sent: float
    first: float = 0.0
    last: float = 0.0
    emitted: float = 0.0
    num_tokens: int = 0
    cached: int = 0
    retractions: int = 0
    error: str = ""
    servers: list[str] = field(default_factory=list)
    reqs: list[Req] = field(default_factory=list)
    on_end: Callable[[Outcome], None] | None = None

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def e2e(self) -> float:
        return self.last - self.sent

    @property
    def tpot(self) -> float | None:
        """None of an answer of one token."""
        return (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class Gaps:
    """Seconds between the tokens of all requests, with their number."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._counts: list[int] = []
        self._steps: list[tuple[float, float, int]] = []  # the first and last of gaps that grow evenly

    def add(self, seconds: float, count: int = 1) -> None:
        self._values.append(seconds)
        self._counts.append(count)

    def add_steps(self, end_of: Callable[[int], float], steps: int, rows: int) -> None:
        """Add the gaps between steps 0 to ``steps - 1``, for each of ``rows`` requests. They grow evenly."""
        if steps < 2:
            return
        first, last = end_of(1) - end_of(0), end_of(steps - 1) - end_of(steps - 2)
        self._steps.append((first, last, rows * (steps - 1)))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the gaps and how often each occurred (float)."""
        first, last, counts = (np.array(column, float) for column in (zip(*self._steps) if self._steps else ((),) * 3))
        between = np.linspace(first, last, _POINTS)  # [points, runs of steps]
        return (np.concatenate((np.array(self._values, float), between.ravel())),
                np.concatenate((np.array(self._counts, float), np.tile(counts / _POINTS, _POINTS))))


@dataclass(frozen=True)
class ServerUsage:
    """Seconds that a server's device was busy, by kind of step, and what it computed."""

    name: str
    prefill_seconds: float
    decode_seconds: float
    api_seconds: float
    num_prefill_steps: int
    num_decode_steps: int
    prompt_tokens: int
    decode_rows: int
    retracted: int

    @classmethod
    def of(cls, name: str, engine: Engine, api_seconds: float) -> ServerUsage:
        used = engine.device.usage
        return cls(name, used.prefill, used.decode, api_seconds, used.num_prefill, used.num_decode, used.prompt_tokens,
                   used.rows, engine.batcher.retraction.num_retracted)

    @property
    def mean_batch(self) -> float:
        return self.decode_rows / self.num_decode_steps if self.num_decode_steps else 0.0


@dataclass
class Run:
    """A simulated run of ``seconds``, which took ``cpu_seconds`` to compute."""

    cluster: str
    gpus: int
    outcomes: list[Outcome]
    gaps: Gaps
    servers: list[ServerUsage]
    seconds: float
    cpu_seconds: float
    num_events: int
    bytes_sent: dict[tuple[str, str], int] = field(default_factory=dict)
    link_seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Simulated seconds a second of CPU time."""
        return self.seconds / self.cpu_seconds if self.cpu_seconds > 0 else float("inf")
