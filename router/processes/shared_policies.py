"""Policies of one process that know what the policies of the others did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...common.api.kv_events import PromptPages
from ..policies import Policy
from ..policies.cache_aware import CacheAware, PrefixMemory
from ..policies.cache_exact import CacheExact
from ..policies.text_pages import TextPages
from .board import TURNS, Board, SharedCount
from .ring import Apply, RingWriter


class SharedPrefixes(PrefixMemory):
    """A prefix memory that tells the other processes what it records, and takes in what they recorded."""

    def __init__(self, ring: RingWriter, kind: int):
        super().__init__()
        self._ring = ring
        self._kind = kind

    def record(self, hashes: list[int], worker_id: int, capacity: int) -> None:
        super().record(hashes, worker_id, capacity)
        self._ring.write(self._kind, worker_id, capacity, hashes)

    @property
    def heard(self) -> Apply:
        """Called with what another process recorded."""
        return super().record


class SharedTexts(TextPages):
    """The pages of texts, learnt from answers in any process."""

    def __init__(self, capacity: int, ring: RingWriter, kind: int):
        super().__init__(capacity)
        self._ring = ring
        self._kind = kind

    def learn(self, blocks: list[int], size: int, pages: PromptPages) -> None:
        super().learn(blocks, size, pages)
        told = [word for pair in pages.told for word in pair]
        self._ring.write(self._kind, size, len(blocks), [pages.pages, pages.page_size, *blocks, *told])

    def heard(self, words: list[int], size: int, count: int) -> None:
        """Another process learnt this."""
        blocks, told = words[2:2 + count], words[2 + count:]
        if len(blocks) == count and count and len(told) % 2 == 0 and words[0] > 0:
            super().learn(blocks, size, PromptPages(words[0], words[1], list(zip(told[::2], told[1::2]))))


def share(policies: Iterable[Policy], board: Board, child: int) -> dict[int, Apply]:
    """Join the policies of this process with those of the others, which were built alike; returns what takes in the
    records of the others' rings, by kind."""
    ring = RingWriter(board, child)
    apply: dict[int, Apply] = {}
    for index, policy in enumerate(dict.fromkeys(policies)):
        if isinstance(policy, CacheAware):
            policy.memory = _prefixes(ring, apply)
        elif isinstance(policy, CacheExact):
            policy.recent, policy.recent_decode = _prefixes(ring, apply), _prefixes(ring, apply)
            policy.sent = _prefixes(ring, apply)
            policy.recent_decode = _prefixes(ring, apply)
            policy.texts = texts = SharedTexts(policy.texts.capacity, ring, len(apply) + 1)
            apply[len(apply) + 1] = texts.heard
        elif hasattr(policy, "turns"):
            cells: Sequence[memoryview] = [board.cells(other) for other in range(board.count)]
            policy.turns = SharedCount(cells, child, TURNS + index)
    return apply


def _prefixes(ring: RingWriter, apply: dict[int, Apply]) -> SharedPrefixes:
    kind = len(apply) + 1
    memory = SharedPrefixes(ring, kind)
    apply[kind] = memory.heard
    return memory
