"""Policies of one process that know what the policies of the others did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import blake2b

from ..net.request import Group
from ..policies import Policy
from ..policies.base import Apply, Publish
from .ring_buffer import RingWriter
from .shared_stats import COUNTERS, SharedCount, SharedStats


class PolicyReplicator:
    """Joins the policies of this process with those of the others, which were built alike."""

    def __init__(self, stats: SharedStats, child: int):
        self._stats = stats
        self._child = child
        self._ring = RingWriter(stats, child)

    def join(self, group: Group, policies: Iterable[Policy]) -> dict[int, Apply]:
        """Joins the policies of one model; returns the functions that apply others' records, by kind."""
        apply: dict[int, Apply] = {}
        for index, policy in enumerate(dict.fromkeys(policies)):
            if hasattr(policy, "replicate"):
                policy.replicate(_PolicyReplication(self._ring, _first_kind(group), apply,
                                                    self._counter(index) if group is None else None))
        return apply

    def _counter(self, index: int) -> Iterator[int]:
        cells = [self._stats.cells(other) for other in range(self._stats.count)]
        return SharedCount(cells, self._child, COUNTERS + index)


class _PolicyReplication:
    """One policy's channels: kinds of records in the ring buffer. Requests are counted over all processes where there
    is one model; of several models, each process counts for itself."""

    def __init__(self, ring: RingWriter, first_kind: int, apply: dict[int, Apply], counter: Iterator[int] | None):
        self._ring = ring
        self._first_kind = first_kind
        self._apply = apply
        self._counter = counter

    def channel(self, apply: Apply) -> Publish:
        kind = self._first_kind + len(self._apply)
        self._apply[kind] = apply
        return partial(self._ring.write, kind)

    def counter(self) -> Iterator[int] | None:
        return self._counter


def _first_kind(group: Group) -> int:
    """The kind of a model's first records, the same in all processes: 16 for each, by 27 bits of its name's hash."""
    if group is None:
        return 1
    return 16 + (int.from_bytes(blake2b(group.encode(), digest_size=4).digest(), "little") >> 5) * 16
