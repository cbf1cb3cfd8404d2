"""Following the KV events of workers: one subscription each, which recovers after every gap.

A worker's batches are numbered. A subscriber that comes late, or missed a number, asks the worker's replay port for
the rest and gets it, or everything (see ``common/engine/kv_event_publisher.py``). A worker that cannot be asked
(vLLM or SGLang without a replay endpoint) counts as empty from a gap on, until it publishes new pages:
a page that is wrongly taken for absent costs one prompt's affinity, one wrongly taken for present costs many.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from ...common.api.kv_events import END_OF_REPLAY, Event, decode
from ..workers.ask import WorkerClient, ask, get
from ..workers.dp_ranks import report_of
from ..workers.memory_report import MemoryReport
from ..workers.registry import Worker

logger = logging.getLogger("baton.router")

TIMEOUT_SECONDS = 5.0
SILENCE_SECONDS = 8.0
"""Four heartbeats of our servers: a server that was silent for this long is asked for what is new."""
_PAUSE_SECONDS = 0.5
_QUEUED_BATCHES = 100_000


class Source(NamedTuple):
    """The endpoints that a worker publishes on. ``native``: it is one of our servers, with their hashes, heartbeats and
    replays."""

    events: str
    replay: str | None
    topic: str
    native: bool


def source_of(worker: Worker, info: dict[str, Any]) -> Source | None:
    """Returns the endpoints that a ``/get_server_info`` answer names, of our servers or SGLang's; None: none."""
    host = worker.endpoint.host
    port = info.get("kv_events_port")
    if isinstance(port, int) and port:
        address = f"[{host}]" if ":" in host else host
        return Source(f"tcp://{address}:{port}", f"tcp://{address}:{port + 1}", "kv-events", True)
    try:
        config = json.loads(info.get("kv_events_config") or "null")
        if config["publisher"] != "zmq":
            return None
        replay = config.get("replay_endpoint")
        rank = worker.rank or 0  # Each rank publishes on a port of its own, from the configured one on.
        return Source(_at(host, config.get("endpoint") or "tcp://*:5557", rank),
                      _at(host, replay, rank) if replay else None, config.get("topic") or "", False)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _at(host: str, endpoint: str, rank: int) -> str:
    """Returns the address to connect to for an endpoint as its server binds it for a rank; raises ValueError without a
    port."""
    port = urlsplit(endpoint).port
    if port is None:
        raise ValueError(endpoint)
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port + rank}"


class Gap(Exception):
    """Batches were missed and cannot be had."""


class Follower:
    """Follows one worker's events, from a subscription to its end, through ``apply`` and ``clear``."""

    def __init__(self, context: zmq.asyncio.Context, source: Source, apply: Callable[[list[Event]], None],
                 clear: Callable[[], None], on_resync: Callable[[], None]):
        self._source = source
        self._apply = apply
        self._clear = clear
        self._context = context
        self._on_resync = on_resync
        self._next = 0
        self._newest = -1

    async def run(self, followed: Callable[[], None]) -> None:
        """Follows until cancelled; calls ``followed`` once it is up to date. Raises Gap, OSError or zmq.ZMQError."""
        with self._context.socket(zmq.SUB) as events:
            events.rcvhwm = _QUEUED_BATCHES
            events.subscribe(self._source.topic.encode())
            events.connect(self._source.events)
            await self._catch_up()
            followed()
            while True:
                if self._source.native and not await events.poll(SILENCE_SECONDS * 1000):
                    await self._catch_up()
                    continue
                _, number, payload = await events.recv_multipart()
                await self._take(int.from_bytes(number, "big"), payload)

    async def _take(self, number: int, payload: bytes) -> None:
        if number <= self._newest:  # The server has restarted: the pages of the old one are gone.
            self._restart(number)
        elif number > self._next:
            await self._catch_up()
        self._newest = number
        if number >= self._next:
            self._next = number + 1
            self._apply(decode(payload))

    def _restart(self, number: int) -> None:
        self._on_resync()
        self._clear()
        self._next = number

    async def _catch_up(self) -> None:
        """Applies all batches from ``_next`` on, or starts from nothing where the worker cannot replay them."""
        self._on_resync()
        if self._source.replay is None:
            self._clear()
            self._next = 0
            return
        with self._context.socket(zmq.DEALER) as replays:
            replays.linger = 0
            replays.connect(self._source.replay)
            await replays.send_multipart((b"", self._next.to_bytes(8, "big")))
            first = True
            while True:
                if not await replays.poll(TIMEOUT_SECONDS * 1000):
                    raise Gap(f"{self._source.replay} does not answer")
                _, number, payload = await replays.recv_multipart()
                if number == END_OF_REPLAY:
                    return
                replayed = int.from_bytes(number, "big")
                if first and replayed > self._next and not self._source.native:
                    self._clear()  # Its replay does not reach back to ours: what we have may be outdated.
                first = False
                self._next = replayed + 1
                self._apply(decode(payload))


class KVListener(Protocol):
    """Learns from workers' KV events and memory reports; the policy ``cache_exact`` is one."""

    def on_followed(self, worker: Worker) -> None:
        """A worker's events are complete from now on."""
    def on_events(self, worker: Worker, events: list[Event], *, native: bool) -> None:
        """A worker's pages changed; ``native``: hashes are ``page_hashes``."""
    def on_cleared(self, worker: Worker) -> None:
        """A worker has no pages, or its pages are unknown."""
    def on_storage(self, worker: Worker, present: bool) -> None:
        """A worker has a storage of pages behind its host memory, or none."""
    def on_lost(self, worker: Worker) -> None:
        """A worker's events are not followed any more."""
    def on_memory(self, worker: Worker, report: MemoryReport) -> None:
        """A worker reported its KV memory."""
    def on_no_memory(self, worker: Worker) -> None:
        """A worker does not report its KV memory."""
    def on_removed(self, worker: Worker) -> None:
        """A worker left."""
    def cached_tokens(self, worker: Worker) -> int:
        """Tokens in a followed worker's prefix cache."""
        ...


class KVWatch:
    """Follows the KV events of all workers for a listener, and asks them how full their memory is."""

    def __init__(self, client: WorkerClient, listener: KVListener, on_resync: Callable[[], None]):
        self._client = client
        self._listener = listener
        self._on_resync = on_resync
        self._context = zmq.asyncio.Context()
        self._tasks: dict[Worker, list[asyncio.Task[None]]] = {}

    def join(self, worker: Worker) -> None:
        loop = self._client.loop
        self._tasks[worker] = [loop.create_task(self._watch(worker)), loop.create_task(self._poll_memory(worker))]

    def leave(self, worker: Worker) -> None:
        for task in self._tasks.pop(worker, ()):
            task.cancel()
        self._listener.on_removed(worker)

    def close(self) -> None:
        for worker in list(self._tasks):
            self.leave(worker)
        self._context.destroy(linger=0)

    async def _watch(self, worker: Worker) -> None:
        silent = False
        while True:
            if worker.state == "healthy":
                info = (await ask(self._client, worker, get("/get_server_info"), TIMEOUT_SECONDS)).json_object()
                source = source_of(worker, info)
                if source is not None:
                    self._listener.on_storage(worker, bool(info.get("hicache_storage_backend")))
                    await self._follow(worker, source)
                elif info and not silent:
                    silent = True
                    logger.warning("Worker %s publishes no KV events: its cache is estimated (start it with "
                                   "--kv-events-port).", worker.url)
            await asyncio.sleep(_PAUSE_SECONDS if not silent else 20 * _PAUSE_SECONDS)

    async def _follow(self, worker: Worker, source: Source) -> None:
        listener = self._listener

        def apply(events: list[Event]) -> None:
            listener.on_events(worker, events, native=source.native)
            worker.cached_tokens = listener.cached_tokens(worker)

        follower = Follower(self._context, source, apply, lambda: listener.on_cleared(worker), self._on_resync)
        try:
            await follower.run(lambda: listener.on_followed(worker))
        except (Gap, OSError, zmq.ZMQError, ValueError, struct.error) as error:
            logger.warning("The KV events of %s are lost for the moment: %s.", worker.url, error)
        finally:
            listener.on_lost(worker)
            if worker not in self._tasks:
                listener.on_removed(worker)
            worker.cached_tokens = None

    async def _poll_memory(self, worker: Worker) -> None:
        """Asks for the worker's memory every second; one that reports none is asked again after a minute."""
        while True:
            pause = 1.0
            if worker.state == "healthy":
                answer = await ask(self._client, worker, get("/get_load"), TIMEOUT_SECONDS)
                memory = _memory(report_of(worker, answer.json()))
                if memory is not None:
                    self._listener.on_memory(worker, memory)
                elif answer.status:
                    self._listener.on_no_memory(worker)
                    pause = 60.0
            await asyncio.sleep(pause)


def _memory(load: Any) -> MemoryReport | None:
    """Returns what a ``/get_load`` answer says, summed over its ranks; None where it has no tokens."""
    try:
        return MemoryReport(sum(rank["num_tokens"] for rank in load),
                            sum(rank["max_total_num_tokens"] for rank in load),
                            sum(rank.get("num_reqs", 0) for rank in load),
                            *(max((float(rank[name]) for rank in load if name in rank), default=None)
                              for name in ("host_page_cost", "storage_page_cost")))
    except (TypeError, KeyError, ValueError):
        return None
