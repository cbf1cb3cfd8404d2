"""The weights that a cluster serves since they were updated through the router, and the workers that have others.

Until the first update each worker may have its own: prefill and decode fit together or not (see ``compatibility``), and
servers may be updated one after the other. An update through the router settles the weights of a model's workers; a
worker that has others from then on, because the update failed on it or because it joined later, is ``outdated``: it
gets no requests. When no worker has the settled weights any more, all of the model's may serve again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .registry import Registry, Worker

ModelIds = tuple[str, ...]


class SettledWeights(NamedTuple):
    """The weights after an update: their version's name, and the fingerprints of the workers that have them."""

    version: str | None
    fingerprints: frozenset[str]

    def misses(self, worker: Worker) -> str:
        """Why a worker does not have them; "" if it does, as far as it reports its weights."""
        if None not in (self.version, worker.weight_version) and self.version != worker.weight_version:
            return f"it has the weight version {worker.weight_version}, and the cluster has {self.version}"
        if worker.model_fingerprint is not None and self.fingerprints \
                and worker.model_fingerprint not in self.fingerprints:
            return "it has other weights than those that the cluster was updated to"
        return ""


class WeightVersions:
    """Keeps ``outdated`` of all workers up to date."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._settled: dict[ModelIds, SettledWeights] = {}
        self._failed: dict[Worker, tuple[str, str | None]] = {}
        """Why an update failed on a worker, and the worker's epoch then."""

    def take_out(self, worker: Worker, reason: str, epoch: str | None) -> None:
        """Lets a worker take no requests as long as it has this epoch."""
        self._failed[worker] = reason, epoch
        worker.outdated = reason
        self._registry.update_available()

    def settle(self, updated: Iterable[Worker]) -> None:
        """Takes the weights that these workers report for those of their models."""
        by_models: dict[ModelIds, list[Worker]] = {}
        for worker in updated:
            self._failed.pop(worker, None)
            by_models.setdefault(worker.model_ids, []).append(worker)
        for models, workers in by_models.items():
            self._settled[models] = SettledWeights(workers[0].weight_version, frozenset(
                worker.model_fingerprint for worker in workers if worker.model_fingerprint is not None))
        self.check()

    def check(self) -> None:
        """Derives which workers are outdated."""
        changed = False
        workers = list(self._registry)
        self._failed = {worker: why for worker, why in self._failed.items() if worker in self._registry}
        reasons = {worker: self._reason(worker) for worker in workers}
        for models in list(self._settled):
            theirs = [worker for worker in workers if worker.model_ids == models]
            if theirs and all(reasons[worker] for worker in theirs):
                del self._settled[models]
                reasons |= {worker: self._reason(worker) for worker in theirs}
        for worker, reason in reasons.items():
            changed |= worker.outdated != reason
            worker.outdated = reason
        if changed:
            self._registry.update_available()

    def _reason(self, worker: Worker) -> str:
        reason, epoch = self._failed.get(worker, ("", None))
        if reason and worker.epoch in (None, epoch):
            return reason
        settled = self._settled.get(worker.model_ids)
        return "" if settled is None else settled.misses(worker)
