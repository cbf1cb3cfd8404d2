"""Workers' reports for the dashboard: requested while a page is open, and for a minute after.

They are read from each worker's ``/metrics``, under our names or SGLang's, so both kinds of servers are shown alike.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import NamedTuple, Protocol

import msgspec

from ..relay.dispatcher import Dispatcher
from ..workers.ask import ask, get
from ..workers.registry import Registry, Worker

PERIOD_SECONDS = 2.0
MAX_CONCURRENT = 16
_ACTIVE_SECONDS = 60.0
_TIMEOUT_SECONDS = 1.5

_NAMES = {
    "running": ("baton:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("baton:num_requests_waiting", "sglang:num_queue_reqs"),
    "transferring": ("baton:num_requests_transferring",),
    "token_usage": ("baton:token_usage", "sglang:token_usage"),
    "tokens_in": ("baton:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "tokens_out": ("baton:generation_tokens_total", "sglang:generation_tokens_total"),
    "ttft_seconds": ("baton:time_to_first_token_seconds_sum", "sglang:time_to_first_token_seconds_sum"),
    "ttft_count": ("baton:time_to_first_token_seconds_count", "sglang:time_to_first_token_seconds_count"),
    "started": ("process_start_time_seconds",),
}
_FIELDS = {name: field for field, names in _NAMES.items() for name in names}
_SAMPLE = re.compile(rf"^({'|'.join(map(re.escape, _FIELDS))})(?:\{{[^\n]*\}})? (\S+)", re.MULTILINE)


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker's report; None: it does not report this. ``ttft`` is the mean since the report before, or earlier;
    ``tokens_in`` and ``tokens_out`` are tokens a second."""

    running: float | None = None
    waiting: float | None = None
    transferring: float | None = None
    token_usage: float | None = None
    tokens_in: float | None = None
    tokens_out: float | None = None
    ttft: float | None = None
    uptime: float | None = None


class _Reading(NamedTuple):
    at: float
    values: dict[str, float]


def read(page: str) -> dict[str, float]:
    """Reads the values of a metrics page by ``_NAMES``; of labelled ones the sum, of shares the largest.

    A page that has a metric under both names counts once, by ours.
    """
    by_field: dict[str, dict[str, float]] = {}
    for name, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        field = _FIELDS[name]
        named = by_field.setdefault(field, {})
        named[name] = max(named.get(name, 0.0), value) if field == "token_usage" else named.get(name, 0.0) + value
    return {field: next(named[name] for name in _NAMES[field] if name in named) for field, named in by_field.items()}


def report(before: _Reading | None, now: _Reading, wall: float, ttft: float | None) -> WorkerReport:
    """``wall``: the time of day in seconds; ``ttft``: that of the report before."""
    values, rates = now.values, {}
    if before is not None and now.at > before.at:
        for field in ("tokens_in", "tokens_out"):
            if field in values:
                increase = values[field] - before.values.get(field, 0.0)
                rates[field] = max(0.0, increase) / (now.at - before.at)  # Below 0: it was restarted.
        count = values.get("ttft_count", 0.0) - before.values.get("ttft_count", 0.0)
        if count > 0:
            ttft = (values.get("ttft_seconds", 0.0) - before.values.get("ttft_seconds", 0.0)) / count
    return WorkerReport(
        values.get("running"), values.get("waiting"), values.get("transferring"), values.get("token_usage"),
        rates.get("tokens_in"), rates.get("tokens_out"), ttft,
        max(0.0, wall - values["started"]) if "started" in values else None)


class ReportedRouter(Protocol):
    """A router, as far as reports need it."""

    registry: Registry
    dispatcher: Dispatcher


class WorkerReports:
    """The latest report of each server; its ranks share it."""

    def __init__(self, router: ReportedRouter):
        self._router = router
        self._readings: dict[int, _Reading] = {}
        self._reports: dict[int, WorkerReport] = {}
        self._active_until = 0.0
        self._task: asyncio.Task[None] | None = None

    def of(self, worker: Worker) -> WorkerReport | None:
        return self._reports.get(worker.root.id)

    def tokens(self) -> tuple[float, float] | None:
        """Returns tokens a second into and out of all workers; None while no page is open.

        Both workers of a pair count a prompt: prompt tokens are read from prefill workers, generated ones from decode
        workers.
        """
        if self._task is None:
            return None
        servers = _servers(self._router.registry)
        reports = [(worker, self._reports[server]) for server, worker in servers.items() if server in self._reports]
        if not reports:
            return None
        return (sum(report.tokens_in or 0.0 for worker, report in reports if worker.facts.computes_prompts),
                sum(report.tokens_out or 0.0 for worker, report in reports if worker.facts.decodes))

    def request(self) -> None:
        """Starts asking workers, or continues: a page is open."""
        self._active_until = time.monotonic() + _ACTIVE_SECONDS
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._ask_all())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _ask_all(self) -> None:
        try:
            while time.monotonic() < self._active_until:
                began = time.monotonic()
                slots = asyncio.Semaphore(MAX_CONCURRENT)
                servers = _servers(self._router.registry)
                await asyncio.gather(*(self._ask(server, worker, slots) for server, worker in servers.items()))
                for known in (self._readings, self._reports):
                    for gone in known.keys() - servers.keys():
                        del known[gone]
                await asyncio.sleep(max(0.5, PERIOD_SECONDS - (time.monotonic() - began)))
        finally:
            self._task = None
            self._readings.clear()
            self._reports.clear()

    async def _ask(self, server: int, worker: Worker, slots: asyncio.Semaphore) -> None:
        async with slots:
            answer = await ask(self._router.dispatcher, worker, get("/metrics"), _TIMEOUT_SECONDS)
        if not answer.ok:
            self._reports.pop(server, None)
            return
        now = _Reading(time.monotonic(), read(answer.body.decode(errors="replace")))
        before, last = self._readings.get(server), self._reports.get(server)
        self._readings[server] = now
        self._reports[server] = report(before, now, time.time(), last.ttft if last is not None else None)


def _servers(registry: Registry) -> dict[int, Worker]:
    """Returns one worker of each server that answers, by the id of the server's root."""
    return {worker.root.id: worker for worker in registry if worker.state == "healthy"}
