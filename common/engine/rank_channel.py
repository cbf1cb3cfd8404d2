"""A rank's end of the channel to the API server, and the ticks that keep ranks in step.

Rank 0 receives the API server's messages and broadcasts each batch of them, with its clock's reading, to the other
ranks of its tensor-parallel group: all see the same inputs in the same order and so take the same decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import zmq

from ..api.messages import FromEngine, ToEngine, decode_to_engine, encode
from ..distributed.tick_agreement import Rows, TickAgreement
from ..distributed.tp import TPGroup
from ..execution.pp_channel import PPChannel


class Tick(msgspec.Struct, array_like=True):
    """Inputs of one iteration of the loop: new messages, and rank 0's monotonic clock in seconds."""

    now: float
    messages: list[ToEngine]
    ready: int = 0  # pipeline-parallel steps whose results have arrived
    agreed: list[Rows] = []  # minima over ranks, of TickAgreement


_tick_decoder = msgspec.msgpack.Decoder(Tick)


class RankChannel:
    """Sockets of one rank. Only rank 0 receives messages; every rank may report start-up progress and failure."""

    def __init__(self, rank: int, to_engine: str, from_engine: str):
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(from_engine)
        self._inbox: zmq.Socket[bytes] | None = None
        if rank == 0:
            self._inbox = self._context.socket(zmq.PULL)
            self._inbox.connect(to_engine)

    def send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))

    @property
    def inbox(self) -> zmq.Socket[bytes] | None:
        return self._inbox

    def receive(self, wait_ms: int, reports: zmq.Socket[bytes] | None = None) -> list[ToEngine]:
        """All messages that have arrived; waits up to ``wait_ms`` for a first one, or for one of ``reports``."""
        inbox = self._inbox
        assert inbox is not None, "only rank 0 receives from the API server"
        messages: list[ToEngine] = []
        if wait_ms and reports is not None:
            poller = zmq.Poller()
            poller.register(inbox, zmq.POLLIN)
            poller.register(reports, zmq.POLLIN)
            poller.poll(wait_ms)
            wait_ms = 0
        if inbox.poll(wait_ms):
            while True:
                try:
                    messages.append(decode_to_engine(inbox.recv(zmq.NOBLOCK)))
                except zmq.Again:
                    break
        return messages

    def close(self) -> None:
        """Send queued messages, for a second at most, and close the sockets."""
        self._context.destroy(linger=1000)


class Ticker:
    """Yields the same ticks on all ranks of a group, which carry the minima of ``agreement``."""

    def __init__(self, channel: RankChannel, tp: TPGroup, clock: Callable[[], float] = time.monotonic,
                 agreement: TickAgreement | None = None):
        self._channel = channel
        self._tp = tp
        self._clock = clock
        self._agreement = agreement

    def next(self, wait_ms: int) -> Tick:
        agreement = self._agreement
        if self._tp.size == 1:
            return Tick(messages=self._channel.receive(wait_ms), now=self._clock())
        data = None
        if self._tp.rank == 0:
            messages = self._channel.receive(wait_ms, None if agreement is None else agreement.socket)
            data = encode(Tick(self._clock(), messages, agreed=[] if agreement is None else agreement.minima()))
        elif agreement is not None:
            agreement.report()
        tick = _tick_decoder.decode(self._tp.broadcast_bytes(data))
        if agreement is not None:
            agreement.apply(tick.agreed)
        return tick


class PPTicker:
    """Ticker over pipeline stages; an iteration also begins when results arrive."""

    def __init__(self, channel: RankChannel, pp_channel: PPChannel, clock: Callable[[], float] = time.monotonic):
        self._channel = channel
        self._pp_channel = pp_channel
        self._clock = clock

    def next(self, wait_ms: int) -> Tick:
        data = None
        if self._pp_channel.is_leader:
            ready = self._pp_channel.wait(self._channel.inbox, wait_ms)
            data = encode(Tick(self._clock(), self._channel.receive(0), ready))
        tick = _tick_decoder.decode(self._pp_channel.replicate(data))
        self._pp_channel.num_ready = tick.ready
        return tick
