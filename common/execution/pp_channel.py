"""What the ranks of a pipeline's stages tell each other: rank 0 decides by what it learns, the others follow.

Every rank runs the same scheduler. What only one of them knows reaches rank 0 as a report: the last stage's tokens, and
how far each stage's transfers are. Rank 0 puts what it goes by into a stream of records, which all others read in the
order of their own calls. So the stages take the same decisions without waiting for each other: a later stage is as far
behind the first as its computing is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import zmq

from ..api.errors import ConfigError
from ..api.messages import Logprobs
from ..distributed.parallel import Parallel

_JOIN_SECONDS = 600.0


class PPStepResult(msgspec.Struct, array_like=True):
    """The token of a row that sampled, or with a ``code`` (of an error) none."""

    token_id: int
    logprobs: Logprobs | None = None
    code: str | None = None
    message: str = ""


class Computed(msgspec.Struct, tag="computed", array_like=True):
    """The results of step ``number``. ``prompts`` are log-probabilities of prompt tokens, by the chunk's place."""

    number: int
    gains: list[PPStepResult]
    prompts: list[tuple[int, Logprobs]] = []


class Standing(msgspec.Struct, tag="standing", array_like=True):
    """How a stage's ``topic`` stands: the least of its ranks' values, by key."""

    stage: int
    topic: str
    rows: dict[int, list[int]]


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The first message of each rank."""


Report = Computed | Standing | Hello

_encode = msgspec.msgpack.Encoder().encode
_reports = msgspec.msgpack.Decoder(Report)
_computed = msgspec.msgpack.Decoder(Computed)
_rows = msgspec.msgpack.Decoder(list[list[int]])


class Reporter:
    """A socket on which reports leave for rank 0. Used by one thread."""

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
    """One rank's end. ``ready`` is how many steps' results rank 0 had when it began the turn, equal on all ranks."""

    def __init__(self, parallel: Parallel, host: str = "127.0.0.1"):
        """A collective of all ranks; rank 0 listens on a free port of ``host``. Whoever reaches that can take part."""
        self._stage, self._tp = parallel.stages, parallel.attention
        self.ready = 0
        self.leads = parallel.everyone.rank == 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._results: dict[int, Computed] = {}
        self._num_results = 0
        self._standing: dict[tuple[str, int], dict[int, list[int]]] = {}
        self._names = [f"rank{rank}".encode() for rank in range(1, parallel.everyone.size)]
        if self.leads:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, 0)
            self._router.setsockopt(zmq.RCVHWM, 0)
            self._router.setsockopt(zmq.IPV6, 1)
            at = f"[{host}]" if ":" in host else host
            port = self._router.bind_to_random_port(f"tcp://{at}")
            parallel.everyone.broadcast_bytes(f"tcp://{at}:{port}".encode())
            self._await_all()
        else:
            self._endpoint = parallel.everyone.broadcast_bytes(None).decode()
            self._reporter = Reporter(self._context, self._endpoint, f"rank{parallel.everyone.rank}")
            self._reporter.send(Hello())

    def reporter(self, name: str) -> Reporter:
        """A further socket for reports, for a thread of its own."""
        return Reporter(self._context, self._endpoint, name)

    # -- the stream of records ----------------------------------------------------------------------------------------

    def tell(self, data: bytes | None) -> bytes:
        """Rank 0's ``data`` on every rank (the others pass None)."""
        if not self.leads:
            return self._reporter.socket.recv()
        assert data is not None
        for name in self._names:
            self._router.send_multipart([name, data])
        return data

    def wait(self, beside: zmq.Socket[bytes] | None, wait_ms: int) -> int:
        """On rank 0: take in reports, waiting up to ``wait_ms`` for one or for a message on ``beside``. Returns how
        many steps' results have come in all."""
        self._drain()
        if wait_ms:
            poller = zmq.Poller()
            for socket in filter(None, (self._router, beside)):
                poller.register(socket, zmq.POLLIN)
            poller.poll(wait_ms)
            self._drain()
        return self._num_results

    def result(self, number: int) -> Computed:
        """The results of a step, waited for. Every rank calls it at the same place between other records."""
        if not self.leads:
            return _computed.decode(self.tell(None))
        while number not in self._results:
            self._router.poll()
            self._drain()
        computed = self._results.pop(number)
        self.tell(_encode(computed))
        return computed

    def least(self, topic: str, keys: Sequence[int], values: np.ndarray, unknown: Sequence[int]) -> np.ndarray:
        """Agreeing's, as far as rank 0 knows: by what each stage has reported last."""
        own = self._tp.min_reduce(values)
        if not self.leads:
            if not self._stage.first and self._tp.rank == 0:
                self._stand(topic, dict(zip(keys, own.tolist())))
            return np.array(_rows.decode(self.tell(None)), np.int64).reshape(values.shape)
        self._drain()
        agreed = own.copy()
        for stage in range(1, self._stage.size):
            rows = self._standing.get((topic, stage), {})
            told = np.array([rows.get(key, unknown) for key in keys], np.int64).reshape(values.shape)
            agreed = np.minimum(agreed, told)
        self.tell(_encode(agreed.tolist()))
        return agreed

    def close(self) -> None:
        self._context.destroy(linger=200)

    # -- reports ------------------------------------------------------------------------------------------------------

    def report(self, report: Report) -> None:
        self._reporter.send(report)

    def _stand(self, topic: str, rows: dict[int, list[int]]) -> None:
        if self._standing.get((topic, self._stage.index)) != rows:
            self._standing[topic, self._stage.index] = rows
            self.report(Standing(self._stage.index, topic, rows))

    def _drain(self) -> None:
        while True:
            try:
                _, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            report = _reports.decode(frame)
            if isinstance(report, Computed):
                self._results[report.number] = report
                self._num_results += 1
            elif isinstance(report, Standing):
                self._standing[report.topic, report.stage] = report.rows

    def _await_all(self) -> None:
        """A ROUTER drops what it has no connection for."""
        waiting, end = set(self._names), time.monotonic() + _JOIN_SECONDS
        while waiting:
            if not self._router.poll(max(0, int(1000 * (end - time.monotonic())))):
                raise ConfigError(f"{len(waiting)} ranks of other stages do not reach rank 0 of the server.")
            waiting.discard(self._router.recv_multipart()[0])
