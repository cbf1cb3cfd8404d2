"""Parts of the simulated world: connections, writes in flight, memory, and each side's requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from baton.kvtransfer.sender import sender_state

NUM_FLAGS = 4


@dataclass
class Wire:
    """One connection, with the messages in flight in each direction."""

    sender: int
    receiver: int
    to_sender: deque = field(default_factory=deque)
    to_receiver: deque = field(default_factory=deque)
    past: list = field(default_factory=list)  # all that was ever said, with its direction


@dataclass(eq=False)
class Flight:
    """A posted write for the request ``serial``. ``lost``: it cannot land."""

    write: sender_state.Write
    serial: int
    sender: int
    receiver: int
    lost: bool = False

    @property
    def session(self) -> bytes:
        return self.write.session.id


@dataclass
class PendingFlag:
    """A completion flag of a decode rank, to be set to ``value`` after the flights ``after``."""

    receiver: int
    value: int
    after: list[Flight]


@dataclass
class Request:
    """Decode's side of a request. ``answered``: its one terminal event was sent."""

    serial: int
    room: int
    page_ids: list[int]
    answered: bool = False


@dataclass
class Job:
    """Prefill's side of a request."""

    room: int
    num_tokens: int
    pushed: int = 0
    finished: bool = False
    answered: bool = False


class Group:
    """The ranks of one server: what its scheduler calls reaches each of them a little earlier or later."""

    def __init__(self, cores: list) -> None:
        self.cores = cores
        self.todo: list[deque[Callable]] = [deque() for _ in cores]
        self.stopped: dict[int, float] = {}  # rank -> since when

    def call(self, name: str, *arguments: object) -> None:
        for queue in self.todo:
            queue.append(lambda core: attrgetter(name)(core)(*arguments))

    def run(self, rank: int) -> None:
        if rank not in self.stopped and self.todo[rank]:
            self.todo[rank].popleft()(self.cores[rank])

    def run_all(self) -> bool:
        """Runs the calls that wait, before ranks compare their states; a stopped rank delays all."""
        for rank, queue in enumerate(self.todo):
            while queue and rank not in self.stopped:
                self.run(rank)
        return not self.stopped


class Memory:
    """Decode's, of all ranks. Every page belongs to one request or is free."""

    def __init__(self, num_pages: int, ranks: int) -> None:
        self.ranks = ranks
        self.owner: dict[int, int | None] = dict.fromkeys(range(num_pages))  # page -> serial
        self.written: dict[tuple[int, int], set[int]] = {}  # rank and page -> senders that wrote it for its owner
        self.completion_flags = [np.zeros(NUM_FLAGS, np.int64) for _ in range(ranks)]
        self.pending_flags: list[PendingFlag] = []

    @property
    def free(self) -> list[int]:
        return [page for page, owner in self.owner.items() if owner is None]

    def give(self, request: Request) -> None:
        for page in request.page_ids:
            self.owner[page] = request.serial
            for rank in range(self.ranks):
                self.written[rank, page] = set()

    def take_back(self, request: Request) -> None:
        for page in request.page_ids:
            self.owner[page] = None

    def touch(self, flight: Flight) -> None:
        """Completes a write, and sets the flags that wait for it."""
        for page in flight.write.dst_ids.tolist():
            assert self.owner[page] == flight.serial, (
                f"a late write for request {flight.serial} arrived in page {page} of {self.owner[page]}")
            self.written[flight.receiver, page].add(flight.sender)
        for flag in self.pending_flags:
            if flight in flag.after:
                flag.after.remove(flight)
                if not flag.after:
                    self.completion_flags[flag.receiver][flag.value % NUM_FLAGS] = flag.value
        self.pending_flags = [flag for flag in self.pending_flags if flag.after]
