"""What a policy is: a pure, synchronous choice among workers that may take a request."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from ..net.body import Peek
from ..net.request import Request
from ..workers.registry import Worker

by_load = attrgetter("known_load")

ROUTING_KEY = b"x-smg-routing-key"
"""sglang-router's header that names a session."""

Subject = Any
"""What a policy's ``read`` took from a request for its own ``choose``; None where it needs nothing."""


class Decision(msgspec.Struct, gc=False, frozen=True):
    """The chosen worker and, for the metrics, why: a word from a small fixed set."""

    worker: Worker
    reason: str


class Policy(Protocol):
    """Chooses a worker. No I/O; the caller reserves the load before it decides again."""

    def read(self, request: Request, found: Peek | None) -> Subject:
        """What the choice depends on; ``found`` is None where the body is no JSON object."""
        ...

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Decision:
        """``workers`` is not empty; ``subject`` is what ``read`` returned for the request. Raises WorkerUnavailable
        where the request asks for none of them."""
        ...


def nothing(request: Request, found: Peek | None) -> None:
    """``read`` of policies that look at workers only."""


def prompt_text(request: Request, found: Peek | None) -> bytes:
    """``read`` of policies that compare beginnings of prompts; b"" when there is none."""
    return found.routing_text if found is not None else b""
