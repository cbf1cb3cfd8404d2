"""Toy KV tiers, registered as a user's: a dict in host memory, and the same one that takes its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from baton.common.config.server.tiers import KV_TIERS
from baton.common.kvcache.page_keys import PageKey
from baton.common.kvcache.tiers.base import FinishedTask, TierContext, TierCounters, TierTask

SLOW_POLLS = 3


@KV_TIERS.register("dict", hidden=True)
class DictTier:
    capacity = 1 << 30
    busy = False

    def __init__(self, context: TierContext):
        self._groups = context.groups
        self.pages: dict[PageKey, list[torch.Tensor]] = {}
        self.page_bytes = sum(group[0].nbytes for group in self._groups)
        self.counters = TierCounters()

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    def lookup(self, keys: Sequence[PageKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def load(self, keys: Sequence[PageKey], page_ids: np.ndarray, compute_seconds: float = 0.0) -> FinishedTask:
        count = self.lookup(keys)
        for key, page in zip(keys[:count], page_ids.tolist()):
            for group, content in zip(self._groups, self.pages[key]):
                group[page] = content
        self.counters.loaded += count
        return FinishedTask(count)

    def store(self, keys: Sequence[PageKey], page_ids: np.ndarray) -> FinishedTask:
        for key, page in zip(keys, page_ids.tolist()):
            self.pages[key] = [group[page].clone() for group in self._groups]
        self.counters.stored += len(keys)
        return FinishedTask(len(keys))

    def free(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.pages.pop(key, None)

    def clear(self) -> None:
        self.pages.clear()

    def finish(self, task: TierTask) -> None:
        """A load pins nothing."""

    def flush(self) -> None:
        """Nothing is queued."""

    def pin(self, keys: Sequence[PageKey]) -> None:
        """Nothing is evicted."""

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """Nothing is evicted."""

    def poll(self) -> None:
        """Nothing is in flight."""

    def check_integrity(self) -> None:
        """A dict is as it is."""

    def close(self) -> None:
        """There is nothing to close."""


class SlowTask:
    """A load that begins when it has been polled often enough."""

    def __init__(self, load: Callable[[], FinishedTask]):
        self._load = load
        self._polls = 0
        self._finished: FinishedTask | None = None

    @property
    def done(self) -> bool:
        return self._finished is not None

    @property
    def num_pages(self) -> int:
        return 0 if self._finished is None else self._finished.num_pages

    def poll(self) -> None:
        self._polls += 1
        if self._polls >= SLOW_POLLS:
            self.wait()

    def wait(self) -> None:
        if self._finished is None:
            self._finished = self._load()

    def wait_on_device(self, group: int | None = None) -> None:
        self.wait()


@KV_TIERS.register("slow-dict", hidden=True)
class SlowDictTier(DictTier):
    def __init__(self, context: TierContext):
        super().__init__(context)
        self._tasks: list[SlowTask] = []

    def load(self, keys: Sequence[PageKey], page_ids: np.ndarray,  # type: ignore[override]
             compute_seconds: float = 0.0) -> SlowTask:
        self._tasks.append(SlowTask(lambda: super(SlowDictTier, self).load(keys, page_ids)))
        return self._tasks[-1]

    def poll(self) -> None:
        for task in self._tasks:
            task.poll()
        self._tasks = [task for task in self._tasks if not task.done]
