"""Claims batches and keeps them going."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from ..context import ServingContext
from ..storage.batch_store import LEASE_SECONDS, Claimed, LeaseLost
from ..storage.storage import Storage
from .job import BatchJob, BatchSlots, Route

log = logging.getLogger("baton.batches")

_LOOK_SECONDS = min(0.5, LEASE_SECONDS / 4)
_SWEEP_SECONDS = 60.0
_TOGETHER = 4  # batches whose lines take turns: a long one does not hold up a short one behind it


class BatchRunner:
    """Works on the open batches of a storage, those that another server left included, until it is cancelled."""

    def __init__(self, front: ServingContext, storage: Storage, routes: Mapping[str, Route], concurrency: int):
        """``routes`` by endpoint; ``concurrency``: lines that run together at most."""
        self._front = front
        self._storage = storage
        self._batches = storage.batches
        self._routes = routes
        self._places = BatchSlots(front, concurrency)
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._cancelling: set[str] = set()  # batches whose job was told, or began as, an end
        self._wake = asyncio.Event()

    def look(self) -> None:
        """There may be something new to do."""
        self._wake.set()

    async def run(self) -> None:
        keeper = asyncio.create_task(self._keep())
        try:
            while True:
                await self._claim()
                self._wake.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _LOOK_SECONDS)
        finally:
            tasks = [keeper, *self._jobs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _claim(self) -> None:
        while self._front.is_ready and len(self._jobs) < _TOGETHER:
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
            await BatchJob(self._front, self._storage, claimed, self._routes, self._places).run()
        except LeaseLost:
            pass
        except Exception:
            log.exception("%s cannot go on; it is tried again when a server starts", batch_id)
            await asyncio.get_running_loop().create_future()  # keeps its place, and its lease
        finally:
            await self._batches.release(batch_id)
            del self._jobs[batch_id]
            self._cancelling.discard(batch_id)
            self._wake.set()

    async def _keep(self) -> None:
        """Renew the leases, notice what clients cancelled (here or on another server), remove expired files."""
        elapsed = _SWEEP_SECONDS
        while True:
            standing = await self._batches.renew()
            for batch_id, job in list(self._jobs.items()):
                if standing.get(batch_id) == "cancelling" and batch_id not in self._cancelling:
                    self._cancelling.add(batch_id)
                    job.cancel()  # and claimed again, to write down what there is
            if elapsed >= _SWEEP_SECONDS:
                elapsed = 0.0
                await self._storage.files.sweep()
            await asyncio.sleep(_LOOK_SECONDS)
            elapsed += _LOOK_SECONDS
