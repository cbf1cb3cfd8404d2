"""The interface of a router to its own endpoints and its dashboard."""

from __future__ import annotations

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

    def add_worker(self, worker: Worker) -> None:
        """Raises Conflict when its URL is taken."""

    def drain_worker(self, url: str) -> list[Worker]: ...

    def remove_worker(self, url: str, *, force: bool = False) -> list[Worker]: ...

    def update_worker(self, url: str, metadata: WorkerMetadata, api_key: str | None) -> None: ...

    def counts(self) -> dict[str, int]: ...
