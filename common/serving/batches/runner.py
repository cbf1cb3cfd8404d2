"""The background task that claims batches, runs them and renews their leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from ..context.serving_context import ServingContext
from ..storage.batch_store import LEASE_SECONDS, Claimed, LeaseLost
from ..storage.storage import Storage
from .job import BatchJob, BatchSlots, Route

log = logging.getLogger("baton.batches")

_POLL_SECONDS = min(0.5, LEASE_SECONDS / 4)
_SWEEP_SECONDS = 60.0
_MAX_CONCURRENT_BATCHES = 4  # their lines are interleaved: a long batch does not delay a short one


class BatchRunner:
    """Runs the open batches of a storage, also those of a server that died, until it is cancelled."""

    def __init__(self, context: ServingContext, storage: Storage, routes: Mapping[str, Route], concurrency: int):
        """``routes`` by endpoint; ``concurrency``: the most lines that run at once."""
        self._context = context
        self._storage = storage
        self._batches = storage.batches
        self._routes = routes
        self._slots = BatchSlots(context, concurrency)
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._cancelling: set[str] = set()  # batches that are being cancelled
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Checks for new batches at once."""
        self._wake.set()

    async def run(self) -> None:
        lease_task = asyncio.create_task(self._renew_leases())
        try:
            while True:
                await self._claim()
                self._wake.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _POLL_SECONDS)
        finally:
            tasks = [lease_task, *self._jobs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _claim(self) -> None:
        while self._context.status.is_ready and len(self._jobs) < _MAX_CONCURRENT_BATCHES:
            claimed = await self._batches.claim()
            if claimed is None:
                return
            batch = claimed.batch
            log.info("%s: %s, %d lines are answered", batch.id, batch.status, len(claimed.done))
            if batch.status == "cancelling":
                self._cancelling.add(batch.id)
            self._jobs[batch.id] = asyncio.create_task(self._work(claimed), name=batch.id)

    async def _work(self, claimed: Claimed) -> None:
        batch_id = claimed.batch.id
        try:
            await BatchJob(self._context, self._storage, claimed, self._routes, self._slots).run()
        except LeaseLost:
            pass
        except Exception:
            log.exception("%s failed; it is retried when a server starts", batch_id)
            await asyncio.get_running_loop().create_future()  # occupies its slot, and keeps its lease
        finally:
            await self._batches.release(batch_id)
            del self._jobs[batch_id]
            self._cancelling.discard(batch_id)
            self._wake.set()

    async def _renew_leases(self) -> None:
        """Renews the leases, notices cancelled batches (here or on another server), drops expired files."""
        elapsed = _SWEEP_SECONDS
        while True:
            statuses = await self._batches.renew()
            for batch_id, job in list(self._jobs.items()):
                if statuses.get(batch_id) == "cancelling" and batch_id not in self._cancelling:
                    self._cancelling.add(batch_id)
                    job.cancel()  # it is claimed again, to write the answers so far
            if elapsed >= _SWEEP_SECONDS:
                elapsed = 0.0
                await self._storage.files.sweep()
            await asyncio.sleep(_POLL_SECONDS)
            elapsed += _POLL_SECONDS
