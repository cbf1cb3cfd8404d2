"""Updates of the weights of all workers as one: they serve the old ones, then all of them the new ones.

Weights that come with requests (``/update_weights_from_tensor``, ``_from_distributed``, ``_from_ipc``) are staged by
all workers beside their steps; where one cannot, all drop them. Then, and for ``/update_weights_from_disk`` at once:
new requests wait in the router; those that run end or are paused, as the caller chose; all workers change their
weights; what they report is compared; and they go on. A worker that failed, or ended with other
weights than most, is taken out: its requests are cut, and it gets none until it has the cluster's weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import msgspec

from ...common.api.errors import Conflict, InvalidRequest
from ...common.api.unreadable import UNREADABLE
from ..monitoring.cluster_view import ClusterView
from ..net.request import Request
from ..net.responses import Response, error_message
from ..workers.ask import WorkerResponse, ask, get
from ..workers.registry import Worker
from .cluster_pause import PAUSE_MODES, UPDATE_MODES, continue_workers, pause_workers, quiesce, requests_held
from .update_groups import init_group
from .worker_answers import Answers, ask_all, combined, command, servers

logger = logging.getLogger("baton.router")

_FOREVER = 24 * 3600.0
_INFO_SECONDS = 10.0
_RELEARN_SECONDS = 12.0
_BUSY_SECONDS, _BUSY_POLL_SECONDS = 10.0, 0.05
"""Longest wait for a worker whose requests have ended for the router and not yet for the worker."""
_BEGIN, _DISCARD, _END = "/begin_weight_update", "/discard_weight_update", "/end_weight_update"
_running: set[asyncio.Task[Response]] = set()


class UpdateFields(msgspec.Struct):
    """The fields of an update's body that the router reads."""

    pause_mode: str | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    flush_cache: bool | None = None

    @property
    def mode(self) -> str:
        """Raises InvalidRequest."""
        mode = self.pause_mode or ("abort" if self.abort_all_requests else "wait")
        if mode not in UPDATE_MODES:
            raise InvalidRequest(f"pause_mode must be {', '.join(UPDATE_MODES[:-1])} or {UPDATE_MODES[-1]}, not "
                                 f"{mode!r}.", param="pause_mode")
        return mode


class _Facts(NamedTuple):
    """What a server reports of its weights; None where it does not."""

    version: str | None
    fingerprint: str | None
    epoch: str | None
    paused: bool
    staging: bool
    """True where an update of several requests has begun."""

    @property
    def weights(self) -> tuple[str | None, str | None]:
        return self.version, self.fingerprint


def update_weights(router: ClusterView, request: Request) -> Coroutine[Any, Any, Response]:
    """Changes the weights of all workers by one request; the answer has each worker's status, ``weight_version`` and
    ``paused_seconds``, and under ``taken_out`` the workers that get no requests any more. 409 while another update
    runs."""
    return _undisturbed(router, request, _update)


def end_update(router: ClusterView, request: Request) -> Coroutine[Any, Any, Response]:
    """Applies on all workers what was sent since ``/begin_weight_update``; see ``update_weights``."""
    return _undisturbed(router, request, _end)


def rename(router: ClusterView, request: Request) -> Coroutine[Any, Any, Response]:
    """Names the weights of all workers anew."""
    return _undisturbed(router, request, _rename)


def pause(router: ClusterView, request: Request) -> Coroutine[Any, Any, Response]:
    """Pauses all workers; no request is paused at one worker of a pair alone."""
    return _undisturbed(router, request, _pause)


async def _undisturbed(router: ClusterView, request: Request, work: Any) -> Response:
    """Runs an update to its end, also where the client leaves. Raises Conflict while another one runs."""
    fields = _fields(request)
    if router.update_lock.locked():
        raise Conflict("Another update of weights, or a pause, is being done: wait for its end.")

    async def locked() -> Response:
        async with router.update_lock:
            response: Response = await work(router, request, fields)
            return response

    task = asyncio.create_task(locked())
    _running.add(task)
    task.add_done_callback(_running.discard)
    return await asyncio.shield(task)


def _fields(request: Request) -> UpdateFields:
    """Raises InvalidRequest."""
    if not request.body:
        return UpdateFields()
    try:
        return msgspec.json.decode(request.body, type=UpdateFields)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The request body is not valid: {error}.") from None
    except UNREADABLE:
        raise InvalidRequest("The request body must be a JSON object.") from None


# ---------------------------------------------------------------------- the endpoints


async def _update(router: ClusterView, request: Request, fields: UpdateFields) -> Response:
    mode = fields.mode
    workers = _addressed(router)
    sent = command(request.path.decode(), request.body)
    if not request.path.startswith(b"/update_weights_from_") or request.path.endswith(b"_disk"):
        return await _commit(router, workers, sent, mode)
    if any(facts.staging for facts in (await _facts(router, workers)).values()):
        return combined(await ask_all(router, workers, sent, _seconds(router)))  # of the caller's own update
    began = await ask_all(router, workers, command(_BEGIN), _INFO_SECONDS)
    if all(answer.status in (404, 405) for answer in began.values()):  # another engine, which has no staging
        return await _commit(router, workers, sent, mode)
    all_began = all(answer.ok for answer in began.values())
    staged = await ask_all(router, workers, sent, _seconds(router)) if all_began else began
    if not all(answer.ok for answer in staged.values()):
        await ask_all(router, [worker for worker, answer in began.items() if answer.ok], command(_DISCARD),
                      _INFO_SECONDS)
        return combined(staged, message="Nothing was changed: not all workers took the weights.")
    options = {name: value for name in ("weight_version", "flush_cache") if (
        value := getattr(fields, name)) is not None}
    done = None
    try:
        done = await _commit(router, workers, command(_END, options), mode)
    finally:
        if done is None or done.status != 200:
            await ask_all(router, _at(router, workers), command(_DISCARD), _INFO_SECONDS)
    return done


async def _end(router: ClusterView, request: Request, fields: UpdateFields) -> Response:
    return await _commit(router, _addressed(router), command(_END, request.body), fields.mode)


async def _rename(router: ClusterView, request: Request, fields: UpdateFields) -> Response:
    answers = await ask_all(router, servers(router), command(request.path.decode(), request.body), _INFO_SECONDS)
    await router.relearn(_RELEARN_SECONDS)
    if all(answer.ok for answer in answers.values()):
        router.settle_weights(_at(router, list(answers)))
    return combined(answers)


async def _pause(router: ClusterView, request: Request, fields: UpdateFields) -> Response:
    mode = _pause_mode(request)
    workers = servers(router)
    async with requests_held(router, mode):
        await quiesce(router, workers, mode, 0.0)
        return combined(await pause_workers(router, workers, mode, request.body))


def _pause_mode(request: Request) -> str:
    """Raises InvalidRequest."""
    mode = msgspec.json.decode(request.body).get("mode") if request.body else None
    if mode is not None and mode not in PAUSE_MODES:
        raise InvalidRequest(f"mode must be abort, retract or in_place, not {mode!r}.", param="mode")
    return mode or "abort"


# ---------------------------------------------------------------------- the change


async def _commit(router: ClusterView, workers: Sequence[Worker], request: Request, mode: str) -> Response:
    """Sends the request that changes the weights to all workers, with their requests paused by ``mode``, unless the
    caller has paused them."""
    before = await _facts(router, workers)
    seconds = _seconds(router)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        paused_before = any(facts.paused for facts in before.values())
        if not paused_before:
            await stack.enter_async_context(requests_held(router, mode))
            await quiesce(router, workers, mode, seconds)
            paused = await pause_workers(router, workers, mode)
            if refused := {worker: answer for worker, answer in paused.items() if not answer.ok}:
                await continue_workers(router, [worker for worker in paused if worker not in refused])
                return combined(refused, message="Nothing was changed: not all workers could be paused.")
        answers = await _send_when_idle(router, workers, request, seconds)
        after = await _facts(router, workers)
        failed = _failed(answers, before, after)
        taken_out = await _take_out(router, failed, after)
        if not paused_before and mode != "wait":
            await continue_workers(router, _at(router, workers))  # those that were taken out, too
        await router.relearn(_RELEARN_SECONDS)
        updated = [worker for worker, answer in answers.items() if answer.ok and worker not in failed]
        if updated:
            router.settle_weights(_at(router, updated))
    more: dict[str, Any] = {"weight_version": after[updated[0]].version} if updated else {}
    if not paused_before:
        more["paused_seconds"] = round(time.monotonic() - began, 3)
    if taken_out:
        more["taken_out"] = taken_out
    return combined(answers, succeeded=not taken_out, message=_summary(updated, workers, taken_out), **more)


async def _send_when_idle(router: ClusterView, workers: Sequence[Worker], request: Request, seconds: float) -> Answers:
    """Asks all workers; those that are still busy again, for a while."""
    loop = router.dispatcher.loop
    deadline = loop.time() + _BUSY_SECONDS

    async def send(worker: Worker) -> WorkerResponse:
        while True:
            answer = await ask(router.dispatcher, worker, request, seconds)
            if answer.status != Conflict.status or loop.time() > deadline:
                return answer
            await asyncio.sleep(_BUSY_POLL_SECONDS)

    return dict(zip(workers, await asyncio.gather(*map(send, workers))))


async def _facts(router: ClusterView, workers: Sequence[Worker]) -> dict[Worker, _Facts]:
    answers = await ask_all(router, workers, get("/get_server_info"), _INFO_SECONDS)
    found = {}
    for worker, answer in answers.items():
        info = answer.json_object()
        version, fingerprint, epoch = (value if isinstance(value := info.get(name), str) else None
                                       for name in ("weight_version", "model_fingerprint", "epoch"))
        found[worker] = _Facts(version, fingerprint, epoch, info.get("paused") is True,
                              info.get("staging_weights") is True)
    return found


def _failed(answers: Answers, before: dict[Worker, _Facts], after: dict[Worker, _Facts]) -> dict[Worker, str]:
    """The workers that must not serve any more, with the reason: those that failed where others succeeded, that
    succeeded with other weights than most, or that failed and were changed nevertheless."""
    updated = [worker for worker, answer in answers.items() if answer.ok]
    failed = {}
    for worker, answer in answers.items():
        if not answer.ok and (updated or before[worker].weights != after[worker].weights):
            failed[worker] = f"the update of its weights failed: {answer.detail or error_message(answer.body)}"
    for sends_or_takes in (True, False):  # Servers of pairs must all have the same; whole servers, one name.
        group = [worker for worker in updated if worker.facts.transfers_kv is sends_or_takes]
        found = [after[worker].weights if sends_or_takes else after[worker].version for worker in group]
        most = Counter(found).most_common(1)
        for worker, weights in zip(group, found):
            if weights != most[0][0]:
                failed[worker] = "it has other weights than most workers after the update"
    return failed


async def _take_out(router: ClusterView, failed: dict[Worker, str], after: dict[Worker, _Facts]) -> dict[str, str]:
    """Cuts the requests of workers, and lets them take none; returns the reasons by URL."""
    for worker, reason in failed.items():
        url = worker.endpoint.url
        logger.error("Worker %s gets no requests: %s.", url, reason)
        router.take_out(url, reason, after[worker].epoch)
    if failed:
        await router.apply_changes()
    return {worker.endpoint.url: reason for worker, reason in failed.items()}


def _at(router: ClusterView, workers: Sequence[Worker]) -> list[Worker]:
    """The workers at the URLs of these."""
    urls = {worker.endpoint.url for worker in workers}
    return [worker for worker in router.registry if worker.endpoint.url in urls]


def _addressed(router: ClusterView) -> list[Worker]:
    """The servers that are updated: those that answer. Raises Conflict where none does."""
    workers = [worker for worker in servers(router) if worker.state == "healthy"]
    if not workers:
        raise Conflict("No worker takes requests: there is none to update.")
    return workers


def _seconds(router: ClusterView) -> float:
    return router.config.http.request_timeout_secs or _FOREVER


# ---------------------------------------------------------------------- the answer


def _summary(updated: Sequence[Worker], workers: Sequence[Worker], taken_out: dict[str, str]) -> str:
    if not updated:
        return "No worker took the weights." if taken_out else "Nothing was changed."
    rest = f"; {len(taken_out)} get no requests any more" if taken_out else ""
    return f"{len(updated)} of {len(workers)} workers have the weights{rest}."


HANDLERS = {
    **dict.fromkeys((b"/update_weights_from_disk", b"/update_weights", b"/update_weights_from_tensor",
                     b"/update_weights_from_distributed", b"/update_weights_from_ipc"), update_weights),
    b"/end_weight_update": end_update,
    b"/update_weight_version": rename,
    b"/pause_generation": pause,
    b"/init_weights_update_group": init_group,
}
"""Handlers of the broadcasts whose workers must end in the same state, by path."""
