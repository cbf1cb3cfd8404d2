"""The interface of a policy: a pure, synchronous choice among workers that may take a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple, Protocol

import msgspec

from ..config.policy import PolicyArgs
from ..net.body import RoutingFields
from ..net.request import Request
from ..net.upstream_response import ResponseHead
from ..workers.registry import Worker

by_load = attrgetter("known_load")

ROUTING_KEY = b"x-smg-routing-key"
"""sglang-router's header that names a session."""

Subject = Any
"""The result of a policy's ``read``, for its own ``choose``; None where it needs nothing of a request."""


class Amendment(NamedTuple):
    """Changes to a request that a policy needs in order to learn from its answer. A subject that has one carries it as
    its ``amendment``; the dispatcher applies it, once a request."""

    headers: bytes
    """Header lines that the worker gets with the request, each ending in CRLF."""
    on_head: Callable[[ResponseHead], ResponseHead]
    """Reads the answer's head; returns the head that the client gets."""


class Decision(msgspec.Struct, gc=False, frozen=True):
    """The chosen worker and, for the metrics, the reason: a word from a small fixed set."""

    worker: Worker
    reason: str


class Policy(Protocol):
    """Chooses a worker. No I/O; the caller reserves the load before it decides again.

    A policy may have three further methods: ``sweep(now)``, called every second or so with a time in seconds;
    ``replicate(replication)``, called once where the router has several processes; and
    ``cached_share(workers, subject)``, the share of a prompt (0 to 1) that the worker it would choose has cached.
    """

    def read(self, request: Request, fields: RoutingFields | None) -> Subject:
        """Returns what the choice depends on, and changes nothing: neither the request (see ``Amendment``) nor the
        policy. ``fields`` is None where the body is no JSON object."""
        ...

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Decision:
        """Chooses one of ``workers`` (not empty); ``subject`` is what ``read`` returned for the request. Raises
        WorkerUnavailable where the request asks for none of them."""
        ...


PolicyFactory = Callable[[PolicyArgs, Random], Policy]
"""A registered policy: makes it from its flags, with the router's random numbers."""

Apply = Callable[[list[int], int, int], None]
"""``apply(words, subject, number)`` takes in a record of another process."""
Publish = Callable[[int, int, Sequence[int]], None]
"""``publish(subject, number, words)`` sends a record to all other processes. All are int64; of very many words the last
are lost."""


class Replication(Protocol):
    """Joins what a policy remembers with the memories of the same policy in the router's other processes.

    All processes open the same channels in the same order. Records may be lost: what they say is a hint.
    """

    def channel(self, apply: Apply) -> Publish:
        """Opens the next channel: what one process publishes there, all others apply."""
        ...

    def counter(self) -> Iterator[int] | None:
        """Numbers that count up over all processes; None where each process counts for itself."""
        ...


def nothing(request: Request, fields: RoutingFields | None) -> None:
    """``read`` of policies that look at workers only."""


def prompt_text(request: Request, fields: RoutingFields | None) -> bytes:
    """``read`` of policies that compare beginnings of prompts; b"" when there is none."""
    return fields.routing_text if fields is not None else b""
