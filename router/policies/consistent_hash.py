"""The same worker for the same session, whatever the load, with few moves when workers join and leave.

Each worker owns many points of a ring of 64-bit numbers; a session belongs to the owner of the next
point (Karger et al., "Consistent Hashing and Random Trees", 1997). Points depend on the worker's URL
alone: two routers, and a router before and after its restart, agree.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import count
from random import Random

import msgspec

from ...common.api.unreadable import UNREADABLE
from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..net.body import RoutingFields
from ..net.request import Request
from ..workers.registry import Worker
from .base import Decision, Policy, Replication
from .load_view import LoadView

POINTS = 160
"""Points of a worker, a multiple of 8: shares of the sessions then vary by about 8 % (1 / sqrt(160))."""


class _SessionParams(msgspec.Struct, gc=False):
    id: str | int | None = None


class _Session(msgspec.Struct, gc=False):
    """Fields that name a session, the most specific first."""

    session_params: _SessionParams | None = None
    session_id: str | int | None = None
    prompt_cache_key: str | None = None
    user: str | int | None = None

    @property
    def key(self) -> str | int | None:
        nested = self.session_params.id if self.session_params is not None else None
        return nested or self.session_id or self.prompt_cache_key or self.user


_decode_session = msgspec.json.Decoder(_Session).decode


def points_of(url: str) -> list[int]:
    """Returns a worker's points on the ring, as unsigned 64-bit integers."""
    points: list[int] = []
    for index in range(POINTS // 8):
        points += struct.unpack("<8Q", blake2b(b"%d %b" % (index, url.encode())).digest())
    return points


def position_of(key: bytes) -> int:
    """Returns a session's position on the ring."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


class Ring:
    """The points of all workers in order. ``update`` costs what changed: 10 ms for one of 1,000 workers."""

    def __init__(self) -> None:
        self._points: list[int] = []
        self._owners: dict[int, str] = {}
        self._urls: frozenset[str] = frozenset()

    def update(self, urls: frozenset[str]) -> None:
        """Becomes the ring of ``urls``."""
        removed, added = self._urls - urls, urls - self._urls
        for url in removed:
            for point in points_of(url):
                self._owners.pop(point, None)
        if removed:
            self._points = [point for point in self._points if point in self._owners]
        for url in added:
            points = points_of(url)
            self._owners.update(dict.fromkeys(points, url))
            self._points += points
        self._points.sort()  # Nearly in order: a merge, not a sort.
        self._urls = urls

    def owner(self, position: int, among: frozenset[str] | None = None) -> str:
        """Returns the URL that owns a position; with ``among``, one of those (not empty, all on the ring)."""
        points, owners = self._points, self._owners
        index = bisect_right(points, position) % len(points)
        while among is not None and owners[points[index]] not in among:
            index = (index + 1) % len(points)
        return owners[points[index]]


class WorkerRing:
    """The ring of the workers that a policy chooses among.

    A worker that failed a request or is down for a moment does not reshuffle others' sessions: only its own
    move, to the next owners around the ring.
    """

    def __init__(self) -> None:
        self._ring = Ring()
        self._workers: Sequence[Worker] = ()
        self._by_url: dict[str, Worker] = {}

    def owner(self, workers: Sequence[Worker], key: bytes) -> Worker:
        """Returns the one of ``workers`` (not empty) that a key belongs to."""
        position = position_of(key)
        if isinstance(workers, tuple):  # The registry's; a list lacks workers that failed this request.
            if workers is not self._workers:
                self._learn(workers)
            return self._by_url[self._ring.owner(position)]
        by_url = {worker.url: worker for worker in workers}
        if not by_url.keys() <= self._by_url.keys():
            self._learn(tuple(workers))
        return by_url[self._ring.owner(position, frozenset(by_url))]

    def _learn(self, workers: tuple[Worker, ...]) -> None:
        self._workers = workers
        self._by_url = {worker.url: worker for worker in workers}
        self._ring.update(frozenset(self._by_url))


class ConsistentHash:
    """By the header ``hash_header``, else by the body's session_params.id, session_id, prompt_cache_key or user.

    A request that names no session goes to the least loaded worker.
    """

    def __init__(self, hash_header: str = "x-session-id"):
        self._header = hash_header.lower().encode()
        self._ring = WorkerRing()
        self._counter: Iterator[int] = count(1)
        self._loads = LoadView()

    def read(self, request: Request, fields: RoutingFields | None) -> bytes:
        """Returns the session's key, b"" where there is none."""
        if named := request.header(self._header):
            return named
        if fields is None:
            return b""
        try:
            key = _decode_session(request.body).key
        except UNREADABLE:  # E.g. a user that is a list: the worker refuses it.
            return b""
        return b"" if key is None else str(key).encode("utf-8", "surrogatepass")

    def replicate(self, replication: Replication) -> None:
        self._counter = replication.counter() or self._counter

    def choose(self, workers: Sequence[Worker], subject: bytes) -> Decision:
        if not subject:
            return Decision(self._loads.next_least_loaded(workers, next(self._counter)), "no_session")
        return Decision(self._ring.owner(workers, subject), "session")


@ROUTING_POLICIES.register("consistent_hash")
def make(args: PolicyArgs, rng: Random) -> Policy:
    return ConsistentHash(args.hash_header)
