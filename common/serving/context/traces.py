"""Spans of the requests that a server answers, with the stages that its engine reports.

A router sends its span's ``traceparent`` to both servers of a pair, so that router, prefill, transfer and decode
are one trace. A stage's times are of the engine's monotonic clock, which is this process's too: both are on one host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from ...api.messages import Generate, LatencySpan
from ...obs.tracing import Tracing

TRACEPARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""Holds the ``traceparent`` header of the HTTP request that is being handled."""


class Traces:
    """The spans of one server: ``<component>.request`` for each generation, with a child for each of its stages."""

    def __init__(self, tracing: Tracing, component: str):
        self._tracing = tracing
        self._name = f"{component}.request"
        self._spans: dict[str, Any] = {}

    def start(self, requests: Sequence[Generate], arrived: float) -> None:
        """``arrived`` on the monotonic clock, in seconds; asks the engine for the requests' stages."""
        context = self._tracing.context_of(TRACEPARENT.get())
        for request in requests:
            request.traced = True
            attributes: dict[str, Any] = {"baton.rid": request.rid, "gen_ai.usage.input_tokens": len(request.input_ids)}
            if request.bootstrap is not None:
                attributes["baton.bootstrap_room"] = request.bootstrap.room
            self._spans[request.rid] = self._tracing.tracer.start_span(
                self._name, context, self._tracing.server_kind, attributes, start_time=_epoch_ns(arrived))

    def end(self, rid: str, outcome: str, *, arrived: float, num_output_tokens: int,
            stages: Sequence[LatencySpan]) -> None:
        """``outcome``: a finish reason, an error's code, or ``disconnected``."""
        span = self._spans.pop(rid, None)
        if span is None:
            return
        begin = arrived
        for stage in stages:
            child = self._tracing.tracer.start_span(stage.name, self._tracing.within(span), start_time=_epoch_ns(begin))
            child.end(_epoch_ns(stage.end))
            begin = stage.end
        span.set_attributes({"baton.outcome": outcome, "gen_ai.usage.output_tokens": num_output_tokens})
        if outcome not in ("stop", "length", "abort", "disconnected"):
            span.set_status(self._tracing.failed)
        span.end()

    def close(self) -> None:
        self._tracing.close()


def _epoch_ns(monotonic: float) -> int:
    """Nanoseconds since 1970 of a reading of the monotonic clock in seconds."""
    return time.time_ns() - round((time.monotonic() - monotonic) * 1e9)
