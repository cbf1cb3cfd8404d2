"""The end of an attempt, for relays of all kinds: retry, continue the stream elsewhere, or report the error."""

from __future__ import annotations

from typing import Protocol

from ...common.api.errors import DeadlineExceeded, ServingError, WorkerUnavailable
from ..net.upstream_response import Failure, engine_died
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
"""Sentences by ``Failure.reason``. The worker's address is in the log only: it is no business of a client."""


def error_of(failure: Failure) -> ServingError:
    """The error that a client gets for an attempt that failed below HTTP."""
    message = _MESSAGES[failure.reason]
    if failure.reason == "silent":
        return DeadlineExceeded(message)
    return WorkerUnavailable(message, retry_after=RETRY_AFTER_SECONDS)


class Attempting(Protocol):
    """A request that is attempted, perhaps several times. ``retries`` is None until an attempt failed."""

    @property
    def dispatcher(self) -> Dispatcher: ...
    @property
    def response(self) -> ClientResponse: ...
    retries: Retries | None

    def start(self) -> None:
        """Make an attempt."""


def retries_of(relay: Attempting) -> Retries:
    """The retries of a request of which an attempt failed."""
    if relay.retries is None:
        relay.retries = relay.dispatcher.new_retries()
    return relay.retries


def note_failed_attempt(relay: Attempting, worker: Worker, outcome: Outcome, *, answered: bool = False) -> Retries:
    """Note that an attempt failed on a worker; returns the request's retries. ``answered``: it said so itself."""
    retries = retries_of(relay)
    if answered and outcome.counts:
        retries.accused.append(worker)
    if outcome.excludes:
        retries.excluded.add(worker)
    return retries


def retry_or_fail(relay: Attempting, reason: str, error: ServingError, *, at_once: bool = False) -> None:
    """Schedule another attempt. Answer with ``error`` if retries are spent, or if none can be made although no attempt
    failed. ``at_once``: the worker was only busy, and another one has not been asked."""
    response, retries = relay.response, relay.retries
    if at_once and retries is not None and retries.may_move:
        retries.move(relay.start)
        scheduled = True
    else:
        scheduled = retries is not None and retries.schedule(relay.start)
    if scheduled:
        response.retries += 1
        relay.dispatcher.metrics.retries[reason] += 1
    elif response.began:
        response.break_off(error, Failure(reason, f"the stream could not be continued ({reason})"))
    else:
        response.fail(error)


def on_expired(relay: Attempting, error: ServingError, at_boundary: bool) -> None:
    """End a request that the router gives up, after its attempt was cancelled, with ``error``.

    ``at_boundary``: what the worker sent so far ends where one more event may follow.
    """
    response = relay.response
    if not response.began:
        response.fail(error)
    elif response.log is not None and (missing := response.log.missing_end) is not None:
        response.end_broken(missing)
    else:
        response.break_off(error, Failure("expired", error.message.rstrip("."), at_boundary=at_boundary))


def on_attempt_lost(relay: Attempting, worker: Worker, role: Role, failure: Failure, reason: str) -> None:
    """Handle an attempt that failed below HTTP, or in the middle of its stream. ``reason`` is its metrics label."""
    relay.dispatcher.on_failure(worker, failure)
    outcome = FAILURES[failure.reason]
    note_failed_attempt(relay, worker, outcome)
    if outcome.died:
        certain = failure.refused or failure.reason == "hung"
        relay.dispatcher.poison.on_death(relay.response, worker, role, certain=certain, at_boundary=failure.at_boundary,
                                         proceed=lambda: _retry_or_continue(relay, outcome, failure, reason))
    else:
        _retry_or_continue(relay, outcome, failure, reason)


def on_attempt_complete(relay: Attempting, worker: Worker, role: Role, *, reusable: bool) -> None:
    """Handle a response that is complete; a stream may have ended with an error."""
    response = relay.response
    if (log := response.log) is not None and log.failed:
        on_attempt_lost(relay, worker, role, log.failure(worker.url), "failed")
        return
    if response.ends_with_death:
        relay.dispatcher.on_failure(worker, engine_died(worker.url))
        relay.dispatcher.poison.on_last_words(response, worker, role)
    response.end(reusable=reusable)


def _retry_or_continue(relay: Attempting, outcome: Outcome, failure: Failure, reason: str) -> None:
    if relay.response.began:
        _on_stream_broken(relay, failure)
    elif outcome.retried:
        retry_or_fail(relay, reason, error_of(failure))
    else:
        relay.response.fail(error_of(failure))


def _on_stream_broken(relay: Attempting, failure: Failure) -> None:
    """Continue a broken stream on another worker, or end it with an error."""
    response = relay.response
    if response.log is None:
        response.break_off(error_of(failure), failure)
    elif (missing := response.log.missing_end) is not None:
        response.end_broken(missing)
    else:
        relay.dispatcher.metrics.continued_streams += 1
        retry_or_fail(relay, "continuation", error_of(failure))
