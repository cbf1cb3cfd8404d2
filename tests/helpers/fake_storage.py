"""A storage in memory, whose queries and reads take their steps when a test says so, and fail as it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.common.kvcache.page_keys import PageKey
from baton.common.kvcache.storage.storage import StorageCounters


class FakeQuery:
    def __init__(self, storage: FakeStorage, keys: Sequence[PageKey], delay: int):
        self._storage, self._keys, self._delay = storage, list(keys), delay
        self.done, self.count = False, 0
        self.step()

    def step(self) -> None:
        self._delay -= 1
        if self._delay < 0 and not self.done:
            objects = self._storage.objects
            self.count = next((i for i, key in enumerate(self._keys) if key not in objects), len(self._keys))
            self.done = True


class FakeRead:
    """Fills a slot a step; ends at a page that was lost, or where it was cancelled."""

    def __init__(self, storage: FakeStorage, keys: Sequence[PageKey], slots: np.ndarray, delay: int, fails_at: int):
        self._storage, self._keys, self._slots = storage, list(keys), slots.tolist()
        self._delay, self._fails_at = delay, fails_at
        self.done, self.num_pages, self.cancelled = False, 0, False
        self.step()

    def step(self) -> None:
        self._delay -= 1
        if self._delay >= 0 or self.done:
            return
        for _ in range(self._storage.pages_a_step):
            index = self.num_pages
            if (index == len(self._keys) or index == self._fails_at or self.cancelled
                    or (content := self._storage.objects.get(self._keys[index])) is None):
                self.done = True
                return
            begin = 0
            for view in self._storage.host.slot_views(self._slots[index]):
                view[...] = content[begin:begin + view.size].reshape(view.shape)
                begin += view.size
            self.num_pages += 1

    def cancel(self) -> None:
        self.cancelled = True


class FakeStorage:
    """``objects``: page contents by key. A HostListener that writes all pages at once. ``rng`` draws the delays and the
    pages at which reads fail."""

    name = "fake"
    counters = StorageCounters()
    num_queued_writes = 0
    healthy = True
    read_rate = 0.0

    def __init__(self, host: Any, rng: np.random.Generator | None = None, *, max_delay: int = 0,
                 fail_share: float = 0.0, pages_a_step: int = 1 << 20):
        self.host, self.rng = host, rng or np.random.default_rng(0)
        self.max_delay, self.fail_share, self.pages_a_step = max_delay, fail_share, pages_a_step
        self.objects: dict[PageKey, np.ndarray] = {}
        self.tasks: list[FakeQuery | FakeRead] = []
        self.num_reads = 0
        host.listeners.append(self)

    def step(self) -> None:
        """Time goes on for all that is under way."""
        for task in self.tasks:
            task.step()
        self.tasks = [task for task in self.tasks if not task.done]

    def query(self, keys: Sequence[PageKey]) -> FakeQuery:
        query = FakeQuery(self, keys, int(self.rng.integers(0, self.max_delay + 1)))
        self.tasks.append(query)
        return query

    def read(self, keys: Sequence[PageKey], slots: np.ndarray) -> FakeRead:
        self.num_reads += 1
        fails_at = int(self.rng.integers(0, len(keys))) if self.rng.random() < self.fail_share else -1
        read = FakeRead(self, keys, slots, int(self.rng.integers(0, self.max_delay + 1)), fails_at)
        self.tasks.append(read)
        return read

    def stored(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            if key not in self.objects:
                content = np.empty(self.host.page_bytes, np.uint8)
                if self.host.read_slot(key, content):
                    self.objects[key] = content

    def dropped(self, keys: Sequence[PageKey]) -> None:
        """The storage keeps what host memory drops."""

    def cleared(self) -> None:
        self.objects.clear()
