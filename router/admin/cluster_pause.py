"""Pauses of a cluster: its requests wait in the router, and its workers are paused between two of a request's calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ...common.api.errors import Conflict
from ..monitoring.cluster_view import ClusterView
from ..relay.request_hold import TAKES_BACK
from ..workers.registry import Worker
from .worker_answers import Answers, ask_all, command

PAUSE_MODES = ("abort", "retract", "in_place")
UPDATE_MODES = ("wait", *PAUSE_MODES)
"""``wait``: requests that run end first."""
_POLL_SECONDS = 0.01
_PAUSE_SECONDS = 30.0
_SETTLE_SECONDS = 10.0
"""Longest wait for requests that were aborted or taken back to leave the workers."""


@asynccontextmanager
async def requests_held(router: ClusterView, mode: str) -> AsyncIterator[None]:
    """Lets new requests wait in the router, in all of its processes, until the block's end."""
    held = list(router.registry)
    await _hold(router, held, mode)
    try:
        yield
    finally:
        await _hold(router, held, "")


async def _hold(router: ClusterView, workers: Sequence[Worker], mode: str) -> None:
    for worker in workers:
        worker.hold = mode
    router.registry.update_available()
    await router.apply_changes()


async def quiesce(router: ClusterView, workers: Sequence[Worker], mode: str, seconds: float) -> None:
    """Ends what a pause or an update of this mode does not allow to go on, while requests are held: for ``wait`` all
    requests, else prompts in prefill workers (but for ``abort``, which ends them with their other halves).

    Raises Conflict where they do not end within so many seconds.
    """
    if mode == "wait":
        await _until_idle(router, workers, seconds)
    elif mode in TAKES_BACK:
        await _until_idle(router, [worker for worker in workers if worker.facts.sends_kv], _SETTLE_SECONDS)


async def _until_idle(router: ClusterView, workers: Sequence[Worker], seconds: float) -> None:
    """Raises Conflict."""
    loop = router.dispatcher.loop
    deadline = loop.time() + seconds
    urls = {worker.endpoint.url for worker in workers}
    while running := sum(worker.load for worker in router.registry if worker.endpoint.url in urls):
        if loop.time() > deadline:
            raise Conflict(f"{running} requests still run after {seconds:g} s: nothing was changed. Set pause_mode to "
                           "retract, in_place or abort, or wait for them.", param="pause_mode")
        await asyncio.sleep(_POLL_SECONDS)
        await router.apply_changes()


async def pause_workers(router: ClusterView, workers: Sequence[Worker], mode: str, body: bytes = b"") -> Answers:
    """Pauses workers by ``/pause_generation``, while requests are held; decode workers first, whose requests end with
    their prefill halves. Without effect for the mode ``wait``. ``body``: the one that asked for the mode."""
    if mode == "wait":
        return {}
    request = command("/pause_generation", body or {"mode": mode})
    senders = [worker for worker in workers if worker.facts.sends_kv]
    others = [worker for worker in workers if not worker.facts.sends_kv]
    answers = await ask_all(router, others, request, _PAUSE_SECONDS)
    if mode == "abort":
        try:
            await _until_idle(router, workers, _SETTLE_SECONDS)
        except Conflict:
            pass  # clients that read slowly: the workers say whether requests run
    return answers | await ask_all(router, senders, request, _PAUSE_SECONDS)


async def continue_workers(router: ClusterView, workers: Sequence[Worker]) -> Answers:
    """Lets workers go on; prefill workers last, so that decode workers take what they send."""
    return await ask_all(router, workers, command("/continue_generation"), _PAUSE_SECONDS)
