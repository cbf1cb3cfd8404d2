"""The phases of an attempt on a pair, as a table.

Theory of operation
-------------------
An attempt sends one body to a prefill and to a decode worker. Only one response reaches the client, and whatever the
two calls do, in whatever order, exactly one of these happens:

* Decode starts its response, and that is relayed (RELAYING). Prefill's own response is of no use then: it may end, or
  say anything, later. Even if prefill breaks now, decode has the KV cache, or reports itself that it lacks it.
* A call returns an error that no other worker would repair, and the error is relayed (REFUSING). The other call is
  cancelled: prefill's 400 must not wait for a decode worker that will never be sent a cache.
* A call fails in a way that another attempt may repair. Both calls are cancelled, and nothing runs (IDLE) until the
  next attempt starts, or the request fails because its retries are spent.

Before the client has a byte, an attempt is OPENING. Once it has one, only a stream can be continued: an attempt that
does so is RESUMING, and nothing but the rest of that stream may be relayed, no error response either.

The phase belongs to the attempt. Whether the request itself is over is known to its client response alone. Flow control
(``pause``, ``resume``) is independent of the phase.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Phase(str, Enum):
    IDLE = "no call runs: none was sent yet, a retry is due, or the request is over"
    OPENING = "both calls run; the client has nothing yet"
    RESUMING = "both calls run, to continue a stream of which the client has the beginning"
    RELAYING = "decode's response goes to the client"
    REFUSING = "the error of one call goes to the client; the other call is cancelled"


class Event(str, Enum):
    START = "an attempt is to be made"
    CANCEL = "the client left, or the router gives the request up"
    PREFILL_ACCEPTED = "prefill's response starts, with a status below 400"
    PREFILL_REFUSED = "prefill's response starts, with a status of 400 or above"
    PREFILL_ENDED = "prefill's response is complete"
    PREFILL_LOST = "prefill's response failed below HTTP"
    DECODE_ACCEPTED = "decode's response starts, with a status below 400"
    DECODE_REFUSED = "decode's response starts, with a status of 400 or above"
    DECODE_ENDED = "decode's response is complete"
    DECODE_LOST = "decode's response failed below HTTP"


class Action(str, Enum):
    SEND = "place and send both calls: to OPENING or RESUMING, or back to IDLE if that cannot be done now"
    STOP = "cancel both calls: to IDLE"
    IGNORE = "stay"
    RELAY = "relay the response: to RELAYING"
    RESUME_OR_RETRY = "continue the client's stream: to RELAYING; with what is no stream: to IDLE, and retry"
    RETRY_OR_REFUSE = "cancel both calls and retry: to IDLE; if that is no use, relay the error: to REFUSING"
    RETRY = "cancel both calls and retry: to IDLE"
    FINISH = "the client has it all: to IDLE"
    NOTE = "count the failure as the worker's, and stay"
    FAIL = "cancel the other call, and retry, continue elsewhere or end with an error: to IDLE"


class InvalidTransition(AssertionError):
    """An event in a phase where it cannot happen: a bug in the relay or in its upstream connections."""


class Table(dict[tuple[Phase, Event], Action]):
    """The action for an event in a phase; raises InvalidTransition for a pair that the table lacks."""

    def __missing__(self, key: tuple[Phase, Event]) -> Action:
        phase, event = key
        raise InvalidTransition(f"{event.name} in {phase.name}")


TABLE = Table({
    (Phase.IDLE, Event.START): Action.SEND,
    (Phase.IDLE, Event.CANCEL): Action.STOP,

    (Phase.OPENING, Event.CANCEL): Action.STOP,
    (Phase.OPENING, Event.PREFILL_ACCEPTED): Action.IGNORE,  # this says nothing yet
    (Phase.OPENING, Event.PREFILL_REFUSED): Action.RETRY_OR_REFUSE,
    (Phase.OPENING, Event.PREFILL_ENDED): Action.IGNORE,  # the KV cache is on its way
    (Phase.OPENING, Event.PREFILL_LOST): Action.FAIL,
    (Phase.OPENING, Event.DECODE_ACCEPTED): Action.RELAY,
    (Phase.OPENING, Event.DECODE_REFUSED): Action.RETRY_OR_REFUSE,
    (Phase.OPENING, Event.DECODE_LOST): Action.FAIL,

    (Phase.RESUMING, Event.CANCEL): Action.STOP,
    (Phase.RESUMING, Event.PREFILL_ACCEPTED): Action.IGNORE,
    (Phase.RESUMING, Event.PREFILL_REFUSED): Action.RETRY,  # the client cannot be sent an error response any more
    (Phase.RESUMING, Event.PREFILL_ENDED): Action.IGNORE,
    (Phase.RESUMING, Event.PREFILL_LOST): Action.FAIL,
    (Phase.RESUMING, Event.DECODE_ACCEPTED): Action.RESUME_OR_RETRY,
    (Phase.RESUMING, Event.DECODE_REFUSED): Action.RETRY,
    (Phase.RESUMING, Event.DECODE_LOST): Action.FAIL,

    (Phase.RELAYING, Event.CANCEL): Action.STOP,
    (Phase.RELAYING, Event.PREFILL_ACCEPTED): Action.IGNORE,
    (Phase.RELAYING, Event.PREFILL_REFUSED): Action.IGNORE,  # decode has what it needs, or reports what it lacks
    (Phase.RELAYING, Event.PREFILL_ENDED): Action.IGNORE,
    (Phase.RELAYING, Event.PREFILL_LOST): Action.NOTE,
    (Phase.RELAYING, Event.DECODE_ENDED): Action.FINISH,
    (Phase.RELAYING, Event.DECODE_LOST): Action.FAIL,

    (Phase.REFUSING, Event.CANCEL): Action.STOP,
    (Phase.REFUSING, Event.PREFILL_ENDED): Action.FINISH,
    (Phase.REFUSING, Event.PREFILL_LOST): Action.FAIL,
    (Phase.REFUSING, Event.DECODE_ENDED): Action.FINISH,
    (Phase.REFUSING, Event.DECODE_LOST): Action.FAIL,
})


class CallEvents(NamedTuple):
    """The events of one of the two calls."""

    accepted: Event
    refused: Event
    ended: Event
    lost: Event


PREFILL_EVENTS = CallEvents(Event.PREFILL_ACCEPTED, Event.PREFILL_REFUSED, Event.PREFILL_ENDED, Event.PREFILL_LOST)
DECODE_EVENTS = CallEvents(Event.DECODE_ACCEPTED, Event.DECODE_REFUSED, Event.DECODE_ENDED, Event.DECODE_LOST)
