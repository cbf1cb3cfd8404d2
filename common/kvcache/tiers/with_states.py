"""Host memory for hybrid models: pages of keys and values, and states of the pages that have one.

Both have the same keys. A state is dropped with its page of keys and values, without which it is of no use; a page may
be without a state, or outlive it. What can be loaded ends with a page that has both: its state alone is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..cache_group import ABSENT
from ..page_keys import PageKey
from .base import HostListener, TierContext, TierCounters, TierTask
from .host import HostTier


class HybridTask:
    """A copy of pages of keys and values, and one of states."""

    def __init__(self, pages: TierTask, states: TierTask | None, first_state_group: int, num_state_groups: int):
        self.pages, self.states = pages, states
        self._first, self._count = first_state_group, num_state_groups

    @property
    def num_pages(self) -> int:
        return self.pages.num_pages

    @property
    def done(self) -> bool:
        return self.pages.done and (self.states is None or self.states.done)

    def wait(self) -> None:
        for task in filter(None, (self.pages, self.states)):
            task.wait()

    def wait_on_device(self, group: int | None = None) -> None:
        of_states = group is not None and self._first <= group < self._first + self._count
        if self.states is not None and (group is None or of_states):
            self.states.wait_on_device(None if group is None else group - self._first)
        if not of_states:  # the draft's layer groups follow the states'
            self.pages.wait_on_device(group if group is None or group < self._first else group - self._count)


class HybridHostTier:
    """Two host tiers, see above; what base.py guarantees holds for both. ``context.further`` is the pool of states."""

    def __init__(self, context: TierContext):
        """The memory is shared out as the device's is. Raises ConfigError as HostTier."""
        states, = context.further
        context = dataclasses.replace(context, in_background=False, further=())
        sizes = [sum(group.nbytes for group in pool.groups) for pool in (context.pool, states)]
        of_states = TierContext(states, context.num_bytes * sizes[1] // sum(sizes), context.flag, order=context.order,
                                io_backend=context.io_backend)
        self.pages = HostTier(dataclasses.replace(context, num_bytes=context.num_bytes - of_states.num_bytes))
        self.states = HostTier(of_states)
        self.counters: TierCounters = self.pages.counters
        self._state_groups = len(context.pool.groups), len(states.groups)
        self.pages.listeners.append(_DropsStates(self.states))

    def __repr__(self) -> str:
        return f"HybridHostTier({self.pages}, states {self.states})"

    @property
    def listeners(self) -> list[HostListener]:
        return self.pages.listeners

    @property
    def page_bytes(self) -> int:
        return self.pages.page_bytes

    @property
    def capacity(self) -> int:
        return self.pages.capacity

    @property
    def num_pages(self) -> int:
        return self.pages.num_pages

    @property
    def busy(self) -> bool:
        return self.pages.busy or self.states.busy

    def lookup(self, keys: Sequence[PageKey]) -> int:
        """As KVTier's; the last page has a state."""
        count = self.pages.lookup(keys)
        while count and not self.states.lookup(keys[count - 1:count]):
            count -= 1
        return count

    def load(self, keys: Sequence[PageKey], page_ids: np.ndarray, compute_seconds: float = 0.0) -> HybridTask:
        """``page_ids`` [2, n]: of states only the last is not ABSENT. ``compute_seconds`` has no effect: a load is done
        when all of it is there."""
        keys, ids = keys[:self.lookup(keys)], np.atleast_2d(page_ids)
        states = self.states.load(keys[-1:], ids[1, len(keys) - 1:len(keys)]) if keys else None
        return self._task(self.pages.load(keys, ids[0, :len(keys)]), states)

    def finish(self, task: TierTask) -> None:
        assert isinstance(task, HybridTask)
        self.pages.finish(task.pages)
        if task.states is not None:
            self.states.finish(task.states)

    def store(self, keys: Sequence[PageKey], page_ids: np.ndarray) -> HybridTask:
        """``page_ids`` [2, n], of states some ABSENT; or those of keys and values [n] alone."""
        first, *further = np.atleast_2d(page_ids)
        stored = self.pages.store(keys, first)
        states: TierTask | None = None
        for ids in further:
            there = np.flatnonzero(ids[:stored.num_pages] != ABSENT)
            if len(there):
                states = self.states.store([keys[place] for place in there.tolist()], ids[there])
        return self._task(stored, states)

    def _task(self, pages: TierTask, states: TierTask | None) -> HybridTask:
        return HybridTask(pages, states, *self._state_groups)

    def flush(self) -> None:
        self.pages.flush()
        self.states.flush()

    def pin(self, keys: Sequence[PageKey]) -> None:
        """As KVTier's, of keys that ``lookup`` has counted."""
        self.pages.pin(keys)
        self.states.pin(keys[-1:])

    def unpin(self, keys: Sequence[PageKey]) -> None:
        self.pages.unpin(keys)
        self.states.unpin(keys[-1:])

    def free(self, keys: Sequence[PageKey]) -> None:
        self.pages.free(keys)

    def clear(self) -> None:
        self.pages.clear()

    def poll(self) -> None:
        self.pages.poll()
        self.states.poll()

    def close(self) -> None:
        self.pages.close()
        self.states.close()

    def check_integrity(self) -> None:
        self.pages.check_integrity()
        self.states.check_integrity()
        assert all(self.pages.lookup([key]) for key in self.states.keys), "a state outlives its page"


class _DropsStates:
    """Drops states with their pages."""

    def __init__(self, states: HostTier):
        self._states = states

    def stored(self, keys: Sequence[PageKey]) -> None:
        """A state is stored with its page, or later."""

    def dropped(self, keys: Sequence[PageKey]) -> None:
        self._states.free(keys)

    def cleared(self) -> None:
        self._states.clear()
