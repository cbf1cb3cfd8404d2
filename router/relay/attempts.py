"""What relays of all kinds do when an attempt fails: try again, go on elsewhere, or tell the client."""

from __future__ import annotations

from typing import Protocol

from ...common.api.errors import DeadlineExceeded, ServingError, WorkerUnavailable
from ..net.upstream_answer import Failure, engine_died
from ..workers.registry import Role, Worker
from .client_response import ClientResponse
from .dispatcher import RETRY_AFTER_SECONDS, Dispatcher
from .retry import FAILURES, Outcome, Retries

_MESSAGES = {
    "failed": "The worker failed in the middle of the answer.",
    "dead": "The worker's engine died.",
    "hung": "The worker stopped answering.",
    "connect": "The worker could not be reached.",
    "lost": "The worker closed its connection before the end of the answer.",
    "stale": "The worker closed its connection before the answer.",
    "malformed": "The worker's answer was not valid HTTP.",
    "removed": "The worker was taken out of service.",
    "silent": "The worker was silent for too long.",
}
"""By ``Failure.reason``. Which worker it was stands in the log: a client has no business with its address."""


def error_of(failure: Failure) -> ServingError:
    """What a client is told of an attempt that failed below HTTP."""
    message = _MESSAGES[failure.reason]
    if failure.reason == "silent":
        return DeadlineExceeded(message)
    return WorkerUnavailable(message, retry_after=RETRY_AFTER_SECONDS)


class Attempting(Protocol):
    """A request that is attempted, perhaps several times. ``retries`` is None until an attempt failed."""

    @property
    def dispatcher(self) -> Dispatcher: ...
    @property
    def exchange(self) -> ClientResponse: ...
    retries: Retries | None

    def start(self) -> None:
        """Make an attempt."""


def tried(relay: Attempting) -> Retries:
    """The retries of a request of which an attempt failed."""
    if relay.retries is None:
        relay.retries = relay.dispatcher.new_retries()
    return relay.retries


def tried_on(relay: Attempting, worker: Worker, outcome: Outcome, *, answered: bool = False) -> Retries:
    """Note that an attempt failed on a worker; returns the request's retries. ``answered``: it said so itself."""
    retries = tried(relay)
    if answered and outcome.counts:
        retries.accused.append(worker)
    if outcome.excludes:
        retries.excluded.add(worker)
    return retries


def again(relay: Attempting, reason: str, error: ServingError, *, at_once: bool = False) -> None:
    """Schedule another attempt; answer with ``error`` when retries are spent, or no attempt failed but none can be
    made. ``at_once``: the worker was only busy, and another one has not been asked."""
    exchange, retries = relay.exchange, relay.retries
    if at_once and retries is not None and retries.may_move:
        retries.move(relay.start)
        scheduled = True
    else:
        scheduled = retries is not None and retries.schedule(relay.start)
    if scheduled:
        exchange.retries += 1
        relay.dispatcher.metrics.retries[reason] += 1
    elif exchange.began:
        exchange.break_off(error, Failure(reason, f"the stream could not go on ({reason})"))
    else:
        exchange.fail(error)


def expired(relay: Attempting, error: ServingError, at_boundary: bool) -> None:
    """The router gives a request up, whose attempt is cut: its answer ends with ``error``.

    ``at_boundary``: what the worker sent so far ends where one more event may follow.
    """
    exchange = relay.exchange
    if not exchange.began:
        exchange.fail(error)
    elif exchange.log is not None and (missing := exchange.log.missing_end) is not None:
        exchange.end_broken(missing)
    else:
        exchange.break_off(error, Failure("expired", error.message.rstrip("."), at_boundary=at_boundary))


def lost(relay: Attempting, worker: Worker, role: Role, failure: Failure, reason: str) -> None:
    """An attempt failed below HTTP or in the middle of its stream. ``reason``: what metrics call it."""
    relay.dispatcher.on_failure(worker, failure)
    outcome = FAILURES[failure.reason]
    tried_on(relay, worker, outcome)
    if outcome.died:
        certain = failure.refused or failure.reason == "hung"
        relay.dispatcher.poison.died(relay.exchange, worker, role, certain=certain, at_boundary=failure.at_boundary,
                                     go_on=lambda: _go_on(relay, outcome, failure, reason))
    else:
        _go_on(relay, outcome, failure, reason)


def ended(relay: Attempting, worker: Worker, role: Role, *, reusable: bool) -> None:
    """A worker's answer is complete, which may be an error in the middle of a stream."""
    exchange = relay.exchange
    if (log := exchange.log) is not None and log.failed:
        lost(relay, worker, role, log.failure(worker.url), "failed")
        return
    if exchange.ends_with_death:
        relay.dispatcher.on_failure(worker, engine_died(worker.url))
        relay.dispatcher.poison.ended_with(exchange, worker, role)
    exchange.end(reusable=reusable)


def _go_on(relay: Attempting, outcome: Outcome, failure: Failure, reason: str) -> None:
    if relay.exchange.began:
        _broken(relay, failure)
    elif outcome.retried:
        again(relay, reason, error_of(failure))
    else:
        relay.exchange.fail(error_of(failure))


def _broken(relay: Attempting, failure: Failure) -> None:
    """The answer's stream broke: it goes on elsewhere, or ends with an error."""
    exchange = relay.exchange
    if exchange.log is None:
        exchange.break_off(error_of(failure), failure)
    elif (missing := exchange.log.missing_end) is not None:
        exchange.end_broken(missing)
    else:
        relay.dispatcher.metrics.continued_streams += 1
        again(relay, "continuation", error_of(failure))
