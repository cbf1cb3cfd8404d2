"""The life of a transfer, as a table.

Theory of operation
-------------------
A *room* joins the two halves of one attempt. The receiver (decode) owns the destination pages, the sender
(prefill) the source pages, and each half keeps its own phase of the room. Nothing is shared but messages,
so the tables below must be safe whatever is late, lost, repeated or cut off.

* The receiver starts in RESERVING: its pages are allocated, and nobody else knows of them. To **publish** is to
  send their ids to the sender; from then on (RESERVED) the sender may write into them at any moment. The
  receiver does not observe the writing itself: the next thing it hears is the result (DONE) or a failure. Where its
  memory has bells, the result comes ahead of the last pages, as a Landing; the room is DONE when the bell that it names
  shows its value, and what the sender says of this reservation afterwards counts no more.
* The sender starts in RESERVING: it knows the prompt and waits for the destination. When the destination has
  come and agrees with the prompt, the halves have **joined** (RESERVED). The first write makes it WRITING. When every
  write is complete at the target and the result is on its way, the room is DONE.
* To fail is not to end. A half that fails after publication or joining goes to ABORTING, where its error is
  already known (a client can be answered) but its pages are not reusable: a write may be in flight, and a
  late write into a page that belongs to another request is silent corruption. Only when the half knows that it is
  **quiet** does the room become FAILED. The sender is quiet when it has no posted write left. The receiver is
  quiet when the sender has said so, or when the connection is gone and the sender must have given up.
* Before publication or joining there is nothing to wait for: RESERVING fails at once.

Pages may be reused in DONE and FAILED, and in no other phase. Both are final.

The numbers are ordered so that the minimum over tensor-parallel ranks reads "somebody failed, else the
least advanced".
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum


class Phase(IntEnum):
    FAILED = 0
    ABORTING = 1
    RESERVING = 2
    RESERVED = 3
    WRITING = 4
    DONE = 5

    @property
    def terminal(self) -> bool:
        """Whether the room has ended and its pages may be reused."""
        return self in (Phase.DONE, Phase.FAILED)


class Event(Enum):
    PUBLISH = "the destination was sent to the writer"
    JOIN = "both halves are there and agree"
    WRITE = "pages were handed over for writing"
    COMPLETE = "every write is complete, and the result sent or verified"
    FAIL = "a half was aborted, refused, too late, or died"
    QUIET = "no write is in flight and none can follow"


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
    (Phase.ABORTING, Event.WRITE): Phase.ABORTING,  # the scheduler has not looked yet; the write is dropped
    (Phase.ABORTING, Event.FAIL): Phase.ABORTING,
    (Phase.ABORTING, Event.QUIET): Phase.FAILED,
    (Phase.FAILED, Event.WRITE): Phase.FAILED,
    (Phase.FAILED, Event.FAIL): Phase.FAILED,
    (Phase.DONE, Event.FAIL): Phase.DONE,  # too late: the result is out
}

RECEIVER: Table = {
    (Phase.RESERVING, Event.PUBLISH): Phase.RESERVED,
    (Phase.RESERVING, Event.FAIL): Phase.FAILED,
    (Phase.RESERVED, Event.COMPLETE): Phase.DONE,
    (Phase.RESERVED, Event.FAIL): Phase.ABORTING,
    (Phase.ABORTING, Event.FAIL): Phase.ABORTING,
    (Phase.ABORTING, Event.COMPLETE): Phase.FAILED,  # the result crossed our abort, and proves the writer quiet
    (Phase.ABORTING, Event.QUIET): Phase.FAILED,
    (Phase.DONE, Event.FAIL): Phase.DONE,
    (Phase.FAILED, Event.FAIL): Phase.FAILED,
}

TRANSITIONS: Mapping[str, Table] = {"sender": SENDER, "receiver": RECEIVER}


class InvalidTransition(AssertionError):
    """An event in a phase where it cannot happen: a bug in the caller or in the protocol."""


def step(table: Table, phase: Phase, event: Event) -> Phase:
    """The next phase; raises InvalidTransition for a pair that the table lacks."""
    try:
        return table[phase, event]
    except KeyError:
        raise InvalidTransition(f"{event.name} in {phase.name}") from None
