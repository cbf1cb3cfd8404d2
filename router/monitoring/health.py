"""Health checks: which workers take traffic is decided by their answers to ``GET /health``.

A worker that is not healthy, or does not fit with others, is checked twice a second whatever the interval, so that
traffic returns within a second or so of its recovery. Failed requests are evidence too (``suspect``): a refused
connection makes a worker unhealthy at once, any other failure causes a check at once.

A worker that does not answer in time is checked again at once: with the defaults it is unhealthy at most 4 s after it
stopped (1 s to the next check, two of 1.5 s), and requests without a byte of an answer since then fail as if it had
died. A worker that continues other answers is not silent, nor is one whose answer this process was too late to read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from ...common.api.unreadable import UNREADABLE
from ...common.config.roles import ROLES
from ..config.workers import HealthArgs
from ..net.upstream_response import Failure
from ..workers.ask import WorkerClient, ask, ask_models, get
from ..workers.dp_ranks import count_of
from ..workers.registry import DEFAULT_BOOTSTRAP_PORT, Registry, Worker
from ..workers.roles import SENDER, can_serve_as, role_among, role_of_mode
from ..workers.weight_versions import WeightVersions
from .pair_trials import PairTrials

logger = logging.getLogger("baton.router")

_RECOVERY_SECONDS = 0.5
_MIN_PAUSE_SECONDS = 0.05
"""Least time between two checks of a worker, however many requests fail."""
_LATE_SECONDS = 0.25
"""A timer of ours that is later than this shows that this process stalled: the answer may be there, unread."""
_POLL_SECONDS = 0.01
_MODELS_SECONDS = 10.0
"""Between two requests for a healthy worker's models: adapters are loaded and unloaded while it serves."""


class HealthMonitor:
    """One task a worker that checks it; changes worker states through the registry.

    ``on_role(worker, role)`` is called for a server that has changed its role.
    ``on_ranks(worker, count)`` is called with the number of ranks of a worker's server before the worker takes
    requests; it may replace the worker by others.
    """

    def __init__(self, args: HealthArgs, registry: Registry, *,
                 on_ranks: Callable[[Worker, int], None] | None = None,
                 on_role: Callable[[Worker, str], object] = lambda worker, role: None):
        self._registry = registry
        self._on_ranks = on_ranks
        self._on_role = on_role
        self._interval = args.health_check_interval_secs
        self._pauses = {"healthy": self._interval, "starting": args.worker_startup_check_interval}
        self._timeout = args.health_check_timeout_secs
        self._endpoint = args.health_check_endpoint
        self._startup = args.worker_startup_timeout_secs
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._wake: dict[Worker, asyncio.Event] = {}
        self._reported: set[Worker] = set()
        self._trials = PairTrials(registry, self._check_soon)
        self._weights = WeightVersions(registry)
        self._to_relearn: set[Worker] = set()
        """Workers whose server information is asked for again: a peer refused to pair with them."""

    def watch(self, worker: Worker, client: WorkerClient) -> None:
        self._wake[worker] = asyncio.Event()
        self._tasks[worker] = asyncio.get_running_loop().create_task(self._watch(worker, client))

    def unwatch(self, worker: Worker) -> None:
        del self._wake[worker]
        self._reported.discard(worker)
        self._to_relearn.discard(worker)
        self._trials.forget(worker)
        self._tasks.pop(worker).cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for worker in list(self._tasks):
            self.unwatch(worker)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._trials.close()

    def suspect(self, worker: Worker, failure: Failure) -> None:
        """Notes that a request failed on a worker below HTTP."""
        if worker in self._wake:
            if failure.refused:
                for known in self._registry:
                    if known.root is worker.root:  # Nothing listens there: this concerns all ranks of the server.
                        self._note_failure(known, failure.detail, certain=True)
            if failure.reason == "misfit":
                self._to_relearn.add(worker)
                self._trials.retry(worker)
            self._wake[worker].set()

    async def relearn(self, client: WorkerClient, seconds: float) -> None:
        """Reads anew what the workers that take requests say of themselves, and tries their pairs; returns once that is
        done, or after so many seconds."""
        deadline = client.loop.time() + seconds
        await asyncio.gather(*(self._learn(worker, client) for worker in self._registry if worker.state == "healthy"))
        while self._trials.untried and client.loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    def settle_weights(self, updated: Sequence[Worker]) -> None:
        """Lets the weights of these workers be those of the cluster."""
        self._weights.settle(updated)

    def take_out(self, worker: Worker, reason: str, epoch: str | None) -> None:
        """Lets a worker take no requests as long as it has this epoch."""
        self._weights.take_out(worker, reason, epoch)

    def _check_soon(self, worker: Worker) -> None:
        """Ends the pause before a worker's next check."""
        if worker in self._wake:
            self._wake[worker].set()

    async def _watch(self, worker: Worker, client: WorkerClient) -> None:
        wake = self._wake[worker]
        deadline: float | None = client.loop.time() + self._startup
        asked_models = 0.0
        while True:
            wake.clear()
            if worker.state != "healthy":
                asked_models = client.loop.time()
            silent = await self._check(worker, client)
            self._registry.record_first_check(worker)
            if worker.state == "healthy" and not silent and client.loop.time() >= asked_models + _MODELS_SECONDS:
                asked_models = client.loop.time()
                await ask_models(client, worker, self._timeout)
            checked = client.loop.time()
            if worker.state != "starting":
                deadline = None
            elif deadline is not None and client.loop.time() > deadline:
                deadline = None
                logger.error("Worker %s is not healthy %g s after it joined; still trying.", worker.url, self._startup)
            pause = self._pauses.get("unhealthy" if worker.misfits else worker.state,
                                     min(self._interval, _RECOVERY_SECONDS))
            if silent:
                pause = _MIN_PAUSE_SECONDS
            # No wait_for: up to Python 3.11 it may swallow a cancellation that comes as its time is up.
            due = client.loop.time() + pause
            timer = client.loop.call_at(due, wake.set)
            try:
                await wake.wait()
            finally:
                timer.cancel()
            if (wait := checked + _MIN_PAUSE_SECONDS - client.loop.time()) > 0:
                await asyncio.sleep(wait)  # Woken by a failed request, perhaps one of a crowd.

    async def _check(self, worker: Worker, client: WorkerClient) -> bool:
        """Checks a worker; returns True if it was silent."""
        if worker.always_healthy:
            if worker.state != "healthy" or worker in self._to_relearn:
                await self._admit(worker, client)
            return False
        began, pool = client.loop.time(), client.pool(worker)
        pool.update_silence()
        answer = await ask(client, worker, get(self._endpoint), self._timeout)
        if answer.silent:
            late = client.loop.time() - began - self._timeout > _LATE_SECONDS
            if not late and not pool.received_since(began):
                self._note_failure(worker, answer.detail, certain=False, silent=True)
                if worker.hung:
                    client.fail_silent_calls(worker)
            return True
        stage = "" if answer.ok else _startup_stage(answer.body)
        if stage != worker.stage:
            worker.stage = stage
            self._registry.rebuild()
        if not answer.ok:
            detail = answer.detail or f"{worker.url} answered {self._endpoint} with {answer.status}"
            self._note_failure(worker, detail, certain=answer.refused)
        else:
            await self._admit(worker, client, answer.json_object().get("epoch"))
        return False

    async def _admit(self, worker: Worker, client: WorkerClient, epoch: str | None = None) -> None:
        """Makes a worker available whose check passed and that fits its role. Its server information is read again
        where it may have changed."""
        changed = (worker.state != "healthy" or worker in self._to_relearn
                   or (epoch is not None and epoch != worker.epoch))
        self._to_relearn.discard(worker)
        if changed and (role := await self._learn(worker, client)) is not None:
            self._reject_role(worker, role)
        elif worker in self._wake and self._registry.record_check_passed(worker):
            logger.info("Worker %s (%s) takes requests.", worker.url, worker.role)

    def _note_failure(self, worker: Worker, detail: str, *, certain: bool, silent: bool = False) -> None:
        if self._registry.record_check_failed(worker, certain=certain, silent=silent):
            logger.warning("Worker %s takes no requests: %s.", worker.url, detail)

    def _reject_role(self, worker: Worker, role: str) -> None:
        """Makes a worker of the wrong role unavailable. It would answer, and wrongly: a prefill server used as a decode
        worker ends every answer after its first token."""
        self._registry.record_check_failed(worker, certain=True)
        if worker not in self._reported:
            self._reported.add(worker)
            logger.error("Worker %s was named as %s worker, and says that it is a %s server: it gets no requests.",
                         worker.url, worker.role, ROLES.get(role).label)

    async def _learn(self, worker: Worker, client: WorkerClient) -> str | None:
        """Reads a worker's server information, for what the administrator did not set; a worker without it keeps the
        defaults. Returns the server's role where it cannot serve in the one that it was given."""
        await ask_models(client, worker, self._timeout)
        info = (await ask(client, worker, get("/get_server_info"), self._timeout)).json_object()
        mode = info.get("disaggregation_mode")
        if info.get("enable_pd_role_switch") is True and self._follow_role(worker, mode):
            return None
        if not worker.asks_role and not can_serve_as(mode, worker.role) and not worker.serves_whole:
            return str(mode)
        worker.is_baton = info.get("stream_continuation") is True
        worker.keeps_files = bool(info.get("file_storage_path"))
        tag = info.get("response_tag")
        worker.response_tag = tag if isinstance(tag, str) else None
        if self._on_ranks is not None and info:
            self._on_ranks(worker, count_of(info))
        if worker.asks_role or (worker.facts.sends_kv and worker.asks_port):
            apply_server_info(worker, info)
            if not worker.facts.transfers_kv:
                logger.error("Worker %s is neither a prefill nor a decode server: it gets no requests.", worker.url)
        if worker not in self._wake:
            return None
        updated = self._trials.update(worker, info, client)
        self._weights.check()
        if updated and worker.state == "healthy":
            for wake in self._wake.values():  # Its weights were replaced: others' may have been, too.
                wake.set()
        return None


    def _follow_role(self, worker: Worker, mode: object) -> bool:
        """Takes note of the role of a server that may change it; True where another worker takes this one's place."""
        unknown = worker.asks_role and not worker.facts.transfers_kv
        role = role_among(mode, SENDER if unknown else worker.role)
        if unknown and role is not None:
            worker.role = role
        if role is not None and role != worker.role:
            if worker in self._wake:
                logger.info("Worker %s (%s) is a %s worker now.", worker.url, worker.role, role)
                self._on_role(worker, role)
            return True
        worker.switches = True
        serves_whole = worker.facts.transfers_kv and role is not None and not ROLES.get(str(mode)).transfers_kv
        if worker.serves_whole is not serves_whole:
            worker.serves_whole = serves_whole
            self._registry.rebuild()
        return False


def _startup_stage(body: bytes) -> str:
    """Returns the progress of a server that starts, from its answer to /health; empty of any other answer."""
    try:
        progress = msgspec.json.decode(body, type=_StartupProgress)
    except UNREADABLE:
        return ""
    return f"{progress.stage[:100]}, {progress.progress:.0%}"


class _StartupProgress(msgspec.Struct):
    stage: str
    progress: Annotated[float, msgspec.Meta(ge=0, le=1)]


def apply_server_info(worker: Worker, info: dict[str, Any]) -> None:
    """Takes role and bootstrap port from a ``/get_server_info`` answer, where they were left open."""
    mode = info.get("disaggregation_mode")
    if worker.asks_role and not worker.switches:
        worker.role = role_of_mode(mode)
    if worker.asks_port:
        port = info.get("disaggregation_bootstrap_port")
        worker.bootstrap_port = port if isinstance(port, int) else DEFAULT_BOOTSTRAP_PORT
