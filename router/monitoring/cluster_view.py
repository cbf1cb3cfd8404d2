"""The interface of a router to its own endpoints and its dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ..config import RouterConfig
from ..obs.metrics import Metrics
from ..relay.dispatcher import Dispatcher
from ..workers.registry import Registry, Worker, WorkerMetadata
from .dashboard import Sampler
from .worker_reports import WorkerReports


class ClusterView(Protocol):
    """The workers of a router. Methods that take a URL raise NotFound."""

    config: RouterConfig
    registry: Registry
    metrics: Metrics
    dispatcher: Dispatcher
    sampler: Sampler
    reports: WorkerReports
    update_lock: asyncio.Lock
    """Held while weights are updated."""

    def add_worker(self, worker: Worker) -> None:
        """Raises Conflict when its URL is taken."""

    def drain_worker(self, url: str) -> list[Worker]: ...

    def remove_worker(self, url: str, *, force: bool = False) -> list[Worker]: ...

    def update_worker(self, url: str, metadata: WorkerMetadata, api_key: str | None) -> None: ...

    def take_out(self, url: str, reason: str, epoch: str | None) -> None:
        """Cuts all requests of a server, and lets it take none as long as it has this epoch."""

    def change_role(self, worker: Worker, role: str) -> Worker:
        """Lets a worker's server, with all of its ranks, serve in another role; returns its new worker."""

    async def apply_changes(self) -> None:
        """Returns once all processes of the router act on what the registry says, and the workers' loads are those of
        all of them."""

    async def relearn(self, seconds: float) -> None:
        """Reads anew what healthy workers say of themselves, and tries their pairs; returns once that is done, or after
        so many seconds."""

    def settle_weights(self, updated: Sequence[Worker]) -> None:
        """Lets the weights of these workers be those of the cluster: who has others gets no requests."""

    def counts(self) -> dict[str, int]: ...
