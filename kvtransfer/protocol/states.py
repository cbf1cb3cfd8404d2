"""Phases of a transfer at its sender and at its receiver, as tables of transitions.

Theory of operation
-------------------
A *bootstrap room* names one attempt at a request on both servers. The receiver (decode) owns the destination pages, the
sender (prefill) the source pages, and each keeps its own phase of the transfer. They share nothing but messages, so the
tables below must be safe whatever is late, lost, repeated or cut off.

* The receiver starts in RESERVING: its pages are allocated, and no other process knows their ids. To **publish** is to
  send the ids to the sender; from then on (RESERVED) the sender may write into the pages at any moment. The receiver
  does not observe the writing itself: the next message is the result (DONE) or a failure. Where its memory has
  completion flags, the result comes ahead of the last pages, as an EarlyResult; the transfer is DONE when the named
  flag has its value, and later messages of the sender on this reservation no longer count.
* The sender starts in RESERVING: it knows the prompt and waits for the destination. When the destination has come and
  agrees with the prompt, the two sides have **joined** (RESERVED). The first write makes it WRITING. When every write
  is complete at the target and the result is sent, the transfer is DONE.
* A failure is not yet the end. A side that fails after publication or joining goes to ABORTING, where its error is
  known (a client can be answered) but its pages are not reusable: a write may be in flight, and a late write into a
  page that belongs to another request is silent corruption. Only when the side knows that all writes have **drained**
  does the transfer become FAILED. The sender has drained when it has no posted write left. The receiver has drained
  when the sender has said so, or when the connection is gone and the sender must have given up.
* Before publication or joining there is nothing to wait for: RESERVING fails at once.

Pages may be reused in DONE and FAILED, and in no other phase. Both are final.

The numbers are ordered so that the minimum over tensor-parallel ranks reads "somebody failed, else the
least advanced".
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum


class Phase(IntEnum):
    """Protocol state of one side of a transfer. For the scheduler's view of the request see requests.TransferStatus."""

    FAILED = 0
    ABORTING = 1
    RESERVING = 2
    RESERVED = 3
    WRITING = 4
    DONE = 5

    @property
    def terminal(self) -> bool:
        """True where the transfer has ended and its pages may be reused."""
        return self in (Phase.DONE, Phase.FAILED)


class Event(Enum):
    PUBLISH = "the destination was sent to the writer"
    JOIN = "both sides are there and agree"
    WRITE = "pages were handed over for writing"
    COMPLETE = "every write is complete, and the result sent or verified"
    FAIL = "a side was aborted, refused, too late, or died"
    DRAINED = "no write is in flight and none can follow"


Table = Mapping[tuple[Phase, Event], Phase]

SENDER: Table = {
    (Phase.RESERVING, Event.JOIN): Phase.RESERVED,
    (Phase.RESERVING, Event.FAIL): Phase.FAILED,
    (Phase.RESERVED, Event.WRITE): Phase.WRITING,
    (Phase.RESERVED, Event.COMPLETE): Phase.DONE,  # decode had every page: only the result travels
    (Phase.RESERVED, Event.FAIL): Phase.ABORTING,
    (Phase.WRITING, Event.WRITE): Phase.WRITING,
    (Phase.WRITING, Event.COMPLETE): Phase.DONE,
    (Phase.WRITING, Event.FAIL): Phase.ABORTING,
    (Phase.ABORTING, Event.WRITE): Phase.ABORTING,  # the scheduler does not know yet; the write is dropped
    (Phase.ABORTING, Event.FAIL): Phase.ABORTING,
    (Phase.ABORTING, Event.DRAINED): Phase.FAILED,
    (Phase.FAILED, Event.WRITE): Phase.FAILED,
    (Phase.FAILED, Event.FAIL): Phase.FAILED,
    (Phase.DONE, Event.FAIL): Phase.DONE,  # too late: the result was sent
}

RECEIVER: Table = {
    (Phase.RESERVING, Event.PUBLISH): Phase.RESERVED,
    (Phase.RESERVING, Event.FAIL): Phase.FAILED,
    (Phase.RESERVED, Event.COMPLETE): Phase.DONE,
    (Phase.RESERVED, Event.FAIL): Phase.ABORTING,
    (Phase.ABORTING, Event.FAIL): Phase.ABORTING,
    (Phase.ABORTING, Event.COMPLETE): Phase.FAILED,  # the result crossed our abort, and proves that writes have drained
    (Phase.ABORTING, Event.DRAINED): Phase.FAILED,
    (Phase.DONE, Event.FAIL): Phase.DONE,
    (Phase.FAILED, Event.FAIL): Phase.FAILED,
}

TRANSITIONS: Mapping[str, Table] = {"sender": SENDER, "receiver": RECEIVER}


class InvalidTransition(AssertionError):
    """Raised for an event that cannot happen in a phase: a bug in the caller or in the protocol."""


def step(table: Table, phase: Phase, event: Event) -> Phase:
    """Returns the next phase; raises InvalidTransition for a pair that the table lacks."""
    try:
        return table[phase, event]
    except KeyError:
        raise InvalidTransition(f"{event.name} in {phase.name}") from None
