"""The host channel between the ranks of pipeline stages: rank 0 collects reports, and replicates its inputs to the
others.

Every rank runs the same scheduler. Rank 0 gets reports of what only one rank knows: the last stage's tokens, and the
progress of each stage's transfers. Rank 0 sends the values that it uses as a stream of records, which all others read
in the order of their own calls. So the stages take the same decisions without waiting for each other: a later stage
lags behind the first only as its computation does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import zmq

from ..api.errors import ConfigError
from ..distributed.agreement import Sample
from ..distributed.parallel import Parallel
from ..request.step_output import StepOutput

_JOIN_SECONDS = 600.0


class PPStepResult(msgspec.Struct, tag="step_result", array_like=True):
    """The output of step ``number``."""

    number: int
    output: StepOutput


class StageMinimum(msgspec.Struct, tag="stage_minimum", array_like=True):
    """The minimum of a ``topic``'s values over the ranks of a stage, by key."""

    stage: int
    topic: str
    rows: dict[int, list[int]]


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The first message of each rank."""


Report = PPStepResult | StageMinimum | Hello

_encode = msgspec.msgpack.Encoder().encode
_report_decoder = msgspec.msgpack.Decoder(Report)
_result_decoder = msgspec.msgpack.Decoder(PPStepResult)
_rows_decoder = msgspec.msgpack.Decoder(list[list[int]])


class Reporter:
    """A socket that sends reports to rank 0. Used by one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str):
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.connect(endpoint)

    def send(self, report: Report) -> None:
        self.socket.send(_encode(report))


class PPChannel:
    """One rank's end of the channel. ``num_ready`` is the number of steps whose results rank 0 had at the beginning of
    the loop iteration, equal on all ranks."""

    def __init__(self, parallel: Parallel, host: str = "127.0.0.1"):
        """A collective of all ranks; rank 0 listens on a free port of ``host``, without authentication."""
        self._pp, self._tp = parallel.pp, parallel.attn_tp
        self.num_ready = 0
        self.is_leader = parallel.world.rank == 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._results: dict[int, PPStepResult] = {}
        self._num_results = 0
        self._stage_minima: dict[tuple[str, int], dict[int, list[int]]] = {}
        self._names = [f"rank{rank}".encode() for rank in range(1, parallel.world.size)]
        if self.is_leader:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, 0)
            self._router.setsockopt(zmq.RCVHWM, 0)
            self._router.setsockopt(zmq.IPV6, 1)
            address = f"[{host}]" if ":" in host else host
            port = self._router.bind_to_random_port(f"tcp://{address}")
            parallel.world.broadcast_bytes(f"tcp://{address}:{port}".encode())
            self._await_ranks()
        else:
            self._endpoint = parallel.world.broadcast_bytes(None).decode()
            self._reporter = Reporter(self._context, self._endpoint, f"rank{parallel.world.rank}")
            self._reporter.send(Hello())

    def reporter(self, name: str) -> Reporter:
        """Opens another socket for reports, for a thread of its own."""
        return Reporter(self._context, self._endpoint, name)

    # -- the stream of records ----------------------------------------------------------------------------------------

    def replicate(self, data: bytes | None) -> bytes:
        """Returns rank 0's ``data`` on every rank (the others pass None)."""
        if not self.is_leader:
            return self._reporter.socket.recv()
        assert data is not None
        for name in self._names:
            self._router.send_multipart([name, data])
        return data

    def wait(self, inbox: zmq.Socket[bytes] | None, wait_ms: int) -> int:
        """Receives reports on rank 0, waiting up to ``wait_ms`` for one or for a message in ``inbox``. Returns the
        number of steps whose results have been received."""
        self._drain()
        if wait_ms:
            poller = zmq.Poller()
            for socket in filter(None, (self._router, inbox)):
                poller.register(socket, zmq.POLLIN)
            poller.poll(wait_ms)
            self._drain()
        return self._num_results

    def result(self, number: int) -> PPStepResult:
        """Waits for the results of a step. Every rank calls it at the same position between other records."""
        if not self.is_leader:
            return _result_decoder.decode(self.replicate(None))
        while number not in self._results:
            self._router.poll()
            self._drain()
        result = self._results.pop(number)
        self.replicate(_encode(result))
        return result

    def min_by_key(self, topic: str, keys: Sequence[int], sample: Sample, unknown: Sequence[int]) -> np.ndarray:
        """Implements RankAgreement, by the last report of each stage that rank 0 has."""
        own = self._tp.min_by_key(topic, keys, sample, unknown)
        if not self.is_leader:
            if not self._pp.is_first and self._tp.rank == 0:
                self._report_minimum(topic, dict(zip(keys, own.tolist())))
            return np.array(_rows_decoder.decode(self.replicate(None)), np.int64).reshape(own.shape)
        self._drain()
        minimum = own.copy()
        for stage in range(1, self._pp.size):
            rows = self._stage_minima.get((topic, stage), {})
            reported = np.array([rows.get(key, unknown) for key in keys], np.int64).reshape(own.shape)
            minimum = np.minimum(minimum, reported)
        self.replicate(_encode(minimum.tolist()))
        return minimum

    def close(self) -> None:
        self._context.destroy(linger=200)

    # -- reports ------------------------------------------------------------------------------------------------------

    def report(self, report: Report) -> None:
        self._reporter.send(report)

    def _report_minimum(self, topic: str, rows: dict[int, list[int]]) -> None:
        """Reports the stage's values where they have changed."""
        if self._stage_minima.get((topic, self._pp.rank)) != rows:
            self._stage_minima[topic, self._pp.rank] = rows
            self.report(StageMinimum(self._pp.rank, topic, rows))

    def _drain(self) -> None:
        while True:
            try:
                _, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            report = _report_decoder.decode(frame)
            if isinstance(report, PPStepResult):
                self._results[report.number] = report
                self._num_results += 1
            elif isinstance(report, StageMinimum):
                self._stage_minima[report.topic, report.stage] = report.rows

    def _await_ranks(self) -> None:
        """Waits until all ranks are connected: a ROUTER drops messages for others."""
        waiting, end = set(self._names), time.monotonic() + _JOIN_SECONDS
        while waiting:
            if not self._router.poll(max(0, int(1000 * (end - time.monotonic())))):
                raise ConfigError(f"{len(waiting)} ranks of other stages do not reach rank 0 of the server.")
            waiting.discard(self._router.recv_multipart()[0])
