"""The same worker for the same session, whatever the load, with few moves when workers come and go.

Each worker owns many points of a ring of 64-bit numbers, a session belongs to the owner of the next
point (Karger et al., "Consistent Hashing and Random Trees", 1997). Points depend on the worker's URL
alone: two routers, and a router before and after its restart, agree.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import count

import msgspec

from ...common.api.unreadable import UNREADABLE
from ..net.body import Peek
from ..net.request import Request
from ..workers.registry import Worker
from .base import Decision, Replication
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
    """A worker's points on the ring, as unsigned 64-bit integers."""
    found: list[int] = []
    for index in range(POINTS // 8):
        found += struct.unpack("<8Q", blake2b(b"%d %b" % (index, url.encode())).digest())
    return found


def place_of(key: bytes) -> int:
    """Where a session stands on the ring."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


class Ring:
    """The points of all workers in order. ``follow`` costs what changed: 10 ms for one of 1,000 workers."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._owners: dict[int, str] = {}
        self._urls: frozenset[str] = frozenset()

    def follow(self, urls: frozenset[str]) -> None:
        """Become the ring of ``urls``."""
        gone, come = self._urls - urls, urls - self._urls
        for url in gone:
            for place in points_of(url):
                self._owners.pop(place, None)
        if gone:
            self._places = [place for place in self._places if place in self._owners]
        for url in come:
            points = points_of(url)
            self._owners.update(dict.fromkeys(points, url))
            self._places += points
        self._places.sort()  # Nearly in order: a merge, not a sort.
        self._urls = urls

    def owner(self, place: int, among: frozenset[str] | None = None) -> str:
        """The URL that owns a place; with ``among``, of those URLs (not empty, all on the ring)."""
        places, owners = self._places, self._owners
        index = bisect_right(places, place) % len(places)
        while among is not None and owners[places[index]] not in among:
            index = (index + 1) % len(places)
        return owners[places[index]]


class WorkerRing:
    """The ring of the workers that a policy chooses among.

    So that a worker which failed a request or is down for a moment does not reshuffle others' sessions, only its own
    move on, to the next owners around the ring.
    """

    def __init__(self) -> None:
        self._ring = Ring()
        self._workers: Sequence[Worker] = ()
        self._by_url: dict[str, Worker] = {}

    def owner(self, workers: Sequence[Worker], key: bytes) -> Worker:
        """Of ``workers`` (not empty), the one that a key belongs to."""
        place = place_of(key)
        if isinstance(workers, tuple):  # the registry's; a list lacks workers that failed this one request
            if workers is not self._workers:
                self._learn(workers)
            return self._by_url[self._ring.owner(place)]
        by_url = {worker.url: worker for worker in workers}
        if not by_url.keys() <= self._by_url.keys():
            self._learn(tuple(workers))
        return by_url[self._ring.owner(place, frozenset(by_url))]

    def _learn(self, workers: tuple[Worker, ...]) -> None:
        self._workers = workers
        self._by_url = {worker.url: worker for worker in workers}
        self._ring.follow(frozenset(self._by_url))


class ConsistentHash:
    """By the header ``hash_header``, else by the body's session_params.id, session_id, prompt_cache_key or user.

    A request that names no session goes to the least loaded worker.
    """

    def __init__(self, hash_header: str = "x-session-id"):
        self._header = hash_header.lower().encode()
        self._ring = WorkerRing()
        self._counter: Iterator[int] = count(1)
        self._loads = LoadView()

    def read(self, request: Request, found: Peek | None) -> bytes:
        """The session's key, b"" where there is none."""
        if named := request.header(self._header):
            return named
        if found is None:
            return b""
        try:
            key = _decode_session(request.body).key
        except UNREADABLE:  # e.g. a user that is a list: for the worker to refuse
            return b""
        return b"" if key is None else str(key).encode("utf-8", "surrogatepass")

    def replicate(self, replication: Replication) -> None:
        self._counter = replication.counter() or self._counter

    def choose(self, workers: Sequence[Worker], subject: bytes) -> Decision:
        if not subject:
            return Decision(self._loads.next_lightest(workers, next(self._counter)), "no_session")
        return Decision(self._ring.owner(workers, subject), "session")
