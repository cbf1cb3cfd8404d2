"""Interfaces of KV tiers: places outside the device's pool that keep copies of pages, each under a key.

A tier belongs to one rank, which copies its own part of a page. **Its index is deterministic**: ranks of a group that
make the same calls in the same order have the same keys in the same slots, so that ``lookup`` needs no agreement. What
ends at a time of its own (loads, memory that is pinned in the background, reads of a storage) the ranks agree on, and
tell the tier in calls that all of them make in the same iteration: ``finish``, ``grow``, ``publish``. A tier keeps what
it is given until it needs the room; what it has lost is computed again.

Unless a method says otherwise it is called by the rank's loop alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..eviction.base import EvictionOrder
from ..page_keys import PageKey

if TYPE_CHECKING:
    import torch

    from ..pool import KVPool
    from .shared_pages import HostShare


@dataclass(frozen=True)
class TierContext:
    """Facts that a tier is made from. ``num_bytes``: the memory it may take, as the flag ``flag`` says. With a
    ``draft_pool`` a page is that of both pools: they are stored, loaded and dropped together. ``io_backend``: see
    page_copies.py. ``in_background``: the memory may come later; who makes the tier calls ``grow``. ``order``: the
    eviction policy, by default LRU.

    ``share``: the ranks of this host that have the same pages, and keep one copy of them together.

    ``further``: the pools of further cache groups (cache_group.py). Then a page has an id in each cache group, page ids
    are [cache groups, n], and what is ABSENT is not loaded; all of a page that is stored is there.
    """

    pool: KVPool
    num_bytes: int
    flag: str
    draft_pool: KVPool | None = None
    io_backend: str = "direct"
    in_background: bool = False
    order: EvictionOrder | None = None
    further: Sequence[KVPool] = ()
    share: HostShare | None = None

    @property
    def groups(self) -> list[torch.Tensor]:
        """The memory of all layer groups: those of the cache groups, and the draft's."""
        pools = [self.pool, *self.further, *([self.draft_pool] if self.draft_pool is not None else [])]
        return [group for pool in pools for group in pool.groups]

    @property
    def cache_groups(self) -> list[int]:
        """Of each of ``groups`` the cache group whose page ids it goes by; the draft's are the first one's."""
        numbers = [number for number, pool in enumerate((self.pool, *self.further)) for _ in pool.groups]
        return numbers + [0] * (len(self.groups) - len(numbers))


@dataclass
class TierCounters:
    """Pages that a tier has copied, and those that it has dropped to make room."""

    stored: int = 0
    loaded: int = 0
    evicted: int = 0


class TierTask(Protocol):
    """A copy between pool and tier, which may be in flight."""

    @property
    def done(self) -> bool:
        """True once device work that is launched from then on finds the pages loaded, or may overwrite the pages that
        were stored. Never blocks, and once true stays true. A load may be done while later layer groups are on their
        way: the next step waits for them on the device, group by group. Only ``wait`` makes the pages safe for others
        than the device's own steps (peers that read or write them)."""

    @property
    def num_pages(self) -> int:
        """The number of leading pages that were copied; final once ``done``."""
        ...

    def wait(self) -> None:
        """Block until the copy is complete for everyone: the host, other streams, and peers that write into pages."""

    def wait_on_device(self, group: int | None = None) -> None:
        """Let the device's current stream wait for layer group ``group`` of the copy, or for all of it; the host goes
        on. Groups are counted as in ``TierContext.groups``. A store that is queued begins now."""


class KVTier(Protocol):
    """Copies of pages by key. No method blocks on I/O, apart from ``close``."""

    counters: TierCounters

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, over all layer groups of this rank."""

    @property
    def capacity(self) -> int:
        """Pages that it can keep now."""

    @property
    def num_pages(self) -> int:
        """Pages that it keeps."""

    @property
    def busy(self) -> bool:
        """True while copies out of the pool are queued or in flight, which ``poll`` advances."""

    def lookup(self, keys: Sequence[PageKey]) -> int:
        """Returns the number of leading ``keys`` whose pages can be loaded now. Equal on all ranks."""
        ...

    def load(self, keys: Sequence[PageKey], page_ids: np.ndarray, compute_seconds: float = 0.0) -> TierTask:
        """Copies the pages of ``keys`` into the pool's pages ``page_ids``, in order; fewer where it has lost some. They
        are not evicted until ``finish``. ``compute_seconds``: how long the step that reads them will compute (0: not
        known); where that hides the rest of the copy, the task is ``done`` before all layer groups are there."""
        ...

    def finish(self, task: TierTask) -> None:
        """Ends a load: its pages may be evicted again. Called once for each load, in the same iteration by all ranks,
        also where the load's request has gone; the copy may still be in flight."""

    def store(self, keys: Sequence[PageKey], page_ids: np.ndarray) -> TierTask:
        """Queues copies of the pool's pages, as the work that the device has been given by ``flush`` leaves them; those
        that it keeps already are not copied again, and others may be dropped for them. ``lookup`` and ``load`` find
        them at once. The pages may be overwritten by device work that follows ``task.wait_on_device``, by anybody after
        ``task.wait``, or when the task is ``done``; it covers earlier copies of ``keys`` that are in flight, too."""
        ...

    def flush(self) -> None:
        """Starts the queued copies, off the compute stream, after all that this has been given. Once a step, after the
        launch."""

    def pin(self, keys: Sequence[PageKey]) -> None:
        """Keeps the pages of ``keys``, all of which it has, from eviction; each ``pin`` needs an ``unpin``."""

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """Takes one ``pin`` of each of ``keys`` back; those that it does not keep any more are ignored."""

    def free(self, keys: Sequence[PageKey]) -> None:
        """Drops the pages of ``keys``, pinned or not; those that it does not keep are ignored."""

    def clear(self) -> None:
        """Drops all pages, pinned ones too: they are of other weights. Slots that are reserved come back by ``publish``
        or ``unreserve``, and what was read into them is not found."""

    def poll(self) -> None:
        """Advances copies in flight, and calls listeners; once a step."""

    def close(self) -> None:
        """Ends all copies, and gives its memory and files back."""

    def check_integrity(self) -> None:
        """Asserts that each page it keeps has a place of its own."""


class HostListener(Protocol):
    """Hears what host memory holds: storage writes, KV events. Called by the rank's loop; must not block."""

    def stored(self, keys: Sequence[PageKey]) -> None:
        """The pages of ``keys`` are complete in host memory: ``read_slot`` can copy them. At a rank's own time, in
        ``poll`` or ``publish``; each time that they come, after they were dropped again too."""

    def dropped(self, keys: Sequence[PageKey]) -> None:
        """The pages of ``keys`` have left host memory; some may never have been complete."""

    def cleared(self) -> None:
        """All pages have left, because they are of other weights."""


class HostSlots(Protocol):
    """The part of a host tier that a storage fills and reads. A slot holds a page."""

    listeners: list[HostListener]

    @property
    def page_bytes(self) -> int:
        """Bytes of a slot: the sum of ``slot_views``."""

    def reserve(self, count: int) -> np.ndarray | None:
        """Takes slots [count] int64, which a storage read fills; evicts for them. None, and nothing is evicted, where
        pins leave too few. ``lookup`` finds them only after ``publish``. Equal on all ranks."""

    def publish(self, keys: Sequence[PageKey], slots: np.ndarray) -> None:
        """Lets ``lookup`` find reserved slots, which are filled; one whose key is there already becomes free, as all do
        that were reserved before ``clear``. In the same iteration on all ranks."""

    def unreserve(self, slots: np.ndarray) -> None:
        """Gives reserved slots back; the caller writes into them no more. In the same iteration on all ranks."""

    def slot_views(self, slot: int) -> list[np.ndarray]:
        """Memory of a reserved slot: a contiguous array of uint8 for each layer group, one pool after the other. Any
        thread; blocks until copies of the device from or to the slot have ended, so that it can be written."""
        ...

    def read_slot(self, key: PageKey, into: np.ndarray) -> bool:
        """Copies a page to ``into`` [page_bytes] uint8, in the order of ``slot_views``. Any thread. False where it is
        not there, not complete, or was evicted meanwhile: then ``into`` holds nothing of use."""
        ...


class GrowingTier(Protocol):
    """A tier whose memory is allocated and pinned in the background. All ranks agree on what all of them have."""

    @property
    def num_allocated(self) -> int:
        """Pages that this rank's memory can hold so far; grows at its own time."""

    def grow(self, num_pages: int) -> None:
        """Sets ``capacity`` to the minimum of all ranks' ``num_allocated``. In the same iteration on all ranks."""


class PageLoad(Protocol):
    """A load that is in flight."""

    def wait_on_device(self, group: int | None = None) -> None:
        """See TierTask."""


class StepLoads(Protocol):
    """A tier whose loads may be finished while they are in flight: steps wait for them on the device."""

    @property
    def step_loads(self) -> Sequence[PageLoad]:
        """The loads for which the next step waits."""

    def take_step_loads(self) -> Sequence[PageLoad]:
        """``step_loads``; the caller makes the device's current stream wait for all their layer groups, each before the
        group's pages are read. What the stream is given afterwards needs not wait again."""
        ...


@dataclass(frozen=True)
class FinishedTask:
    """A copy that was complete when the call returned."""

    num_pages: int
    done: bool = True

    def wait(self) -> None:
        """There is nothing to wait for."""

    def wait_on_device(self, group: int | None = None) -> None:
        """There is nothing to wait for."""
