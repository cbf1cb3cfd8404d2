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

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
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
    IMPOSSIBLE = "raise InvalidTransition: the event cannot happen in this phase"


SEND, STOP, IGNORE, RELAY, RESUME_OR_RETRY = (
    Action.SEND, Action.STOP, Action.IGNORE, Action.RELAY, Action.RESUME_OR_RETRY)
RETRY_OR_REFUSE, RETRY, FINISH, NOTE, FAIL, IMPOSSIBLE = (
    Action.RETRY_OR_REFUSE, Action.RETRY, Action.FINISH, Action.NOTE, Action.FAIL, Action.IMPOSSIBLE)


class InvalidTransition(AssertionError):
    """An event in a phase where it cannot happen: a bug in the relay or in its upstream connections."""


@dataclass(slots=True, eq=False)
class CallActions:
    """The actions for the events of one of the two calls."""

    accepted: Action = IMPOSSIBLE
    """Its response starts, with a status below 400."""
    refused: Action = IMPOSSIBLE
    """Its response starts, with a status of 400 or above."""
    ended: Action = IMPOSSIBLE
    """Its response is complete."""
    lost: Action = IMPOSSIBLE
    """Its response failed below HTTP."""


@dataclass(slots=True, eq=False)
class Phase:
    """A row of the table: the action for each event. An attribute of a slot is read in 5 ns, a dict's item in 40 ns."""

    name: str
    start: Action = IMPOSSIBLE
    """An attempt is to be made."""
    cancel: Action = STOP
    """The client left, or the router gives the request up."""
    prefill: CallActions = CallActions()
    decode: CallActions = CallActions()


IDLE = Phase("IDLE", start=SEND)
"""No call runs: none was sent yet, a retry is due, or the request is over."""

OPENING = Phase(
    "OPENING",
    prefill=CallActions(
        accepted=IGNORE,  # this says nothing yet
        refused=RETRY_OR_REFUSE,
        ended=IGNORE,  # the KV cache is on its way
        lost=FAIL),
    decode=CallActions(accepted=RELAY, refused=RETRY_OR_REFUSE, lost=FAIL))
"""Both calls run; the client has nothing yet."""

RESUMING = Phase(
    "RESUMING",
    prefill=CallActions(
        accepted=IGNORE,
        refused=RETRY,  # the client cannot be sent an error response any more
        ended=IGNORE,
        lost=FAIL),
    decode=CallActions(accepted=RESUME_OR_RETRY, refused=RETRY, lost=FAIL))
"""Both calls run, to continue a stream of which the client has the beginning."""

RELAYING = Phase(
    "RELAYING",
    prefill=CallActions(
        accepted=IGNORE,
        refused=IGNORE,  # decode has what it needs, or reports what it lacks
        ended=IGNORE,
        lost=NOTE),
    decode=CallActions(ended=FINISH, lost=FAIL))
"""Decode's response goes to the client."""

REFUSING = Phase(
    "REFUSING",
    prefill=CallActions(ended=FINISH, lost=FAIL),
    decode=CallActions(ended=FINISH, lost=FAIL))
"""The error of one call goes to the client; the other call is cancelled."""

PHASES = (IDLE, OPENING, RESUMING, RELAYING, REFUSING)
