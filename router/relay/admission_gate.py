"""Admission of relays: they start now or later, waiting clients may leave, and waits end in time."""

from __future__ import annotations

import asyncio

import msgspec

from ...common.api.errors import ServingError
from ...common.api.unreadable import UNREADABLE
from ..admission.admission import AdmissionControl, Permit, Waiting
from ..admission.limits import load_of
from ..net.request import Request
from .client_response import ClientResponse
from .pair import PairRelay
from .single import Relay

_BYTES_PER_TOKEN = 4
"""Bytes of a body that count as a token: the pace, learnt by the same count, makes up for the difference."""


class _Fields(msgspec.Struct):
    stream: bool | None = None
    priority: int | None = None
    slo_ttft_ms: float | None = None


_decode = msgspec.json.Decoder(_Fields).decode


def _decode_fields(body: bytes) -> _Fields:
    try:
        return _decode(body)
    except UNREADABLE:
        return _Fields()


def priority_of(request: Request) -> int:
    """The ``x-priority`` header, else the body's ``priority``, else 0."""
    if value := request.header(b"x-priority"):
        try:
            return int(value)
        except ValueError:
            return 0
    return _decode_fields(request.body).priority or 0


def _slo_of(request: Request, fields: _Fields) -> float:
    """The TTFT in seconds that a request wants, of its body or else of its header; 0 without one."""
    value = fields.slo_ttft_ms
    if value is None and (header := request.header(b"x-slo-ttft-ms")):
        try:
            value = float(header)
        except ValueError:
            return 0.0  # The workers say what is wrong with it.
    return max(0.0, value / 1e3) if value is not None and value < float("inf") else 0.0


class AdmissionGate:
    """Starts relays as the admission lets them in."""

    def __init__(self, admission: AdmissionControl, loop: asyncio.AbstractEventLoop):
        self.admission = admission
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def start(self, response: ClientResponse, relay: Relay | PairRelay) -> None:
        """Start a relay, or make it wait as its connection's handler; raises Overloaded."""
        request = response.request
        rules = self.admission.rules
        fields = _decode_fields(request.body) if rules.estimates_ttft else _Fields()
        slo = _slo_of(request, fields) if rules.slo_of_requests else 0.0
        pending = _PendingRelay(response, relay)
        admitted = self.admission.acquire(request.authorization, bool(fields.stream), lambda: priority_of(request),
                                          pending.start, pending.refuse, slo=slo,
                                          load=load_of(len(request.body) // _BYTES_PER_TOKEN))
        if isinstance(admitted, Permit):
            pending.start(admitted)
            return
        pending.waiting = admitted
        response.connection.handler = pending
        if self._timer is None:
            self._arm(admitted.since + self.admission.rules.queue_timeout)

    def close(self) -> None:
        self.admission.close()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, when: float | None) -> None:
        self._timer = self._loop.call_at(when + 0.002, self._sweep) if when is not None else None

    def _sweep(self) -> None:
        self._arm(self.admission.expire())


class _PendingRelay:
    """A relay that asks for admission; while it waits, the handler of its connection."""

    __slots__ = ("_response", "_relay", "waiting")

    def __init__(self, response: ClientResponse, relay: Relay | PairRelay):
        self._response = response
        self._relay = relay
        self.waiting: Waiting | None = None

    def start(self, permit: Permit) -> None:
        self._response.permit = permit
        self._response.connection.handler = self._relay
        self._relay.start()

    def refuse(self, error: ServingError) -> None:
        self._response.fail(error)

    def cancel(self) -> None:
        assert self.waiting is not None
        self.waiting.cancel()
        self._response.abandon()

    def expire(self, error: ServingError) -> None:
        assert self.waiting is not None
        self.waiting.cancel()
        self._response.fail(error)

    def pause(self) -> None:
        self._relay.pause()

    def resume(self) -> None:
        self._relay.resume()
