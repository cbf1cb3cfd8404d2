"""Policies of one process that know what the policies of the others did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b

from ...common.api.kv_events import PromptPages
from ..policies import Policy
from ..policies.cache_aware import CacheAware, PrefixMemory
from ..policies.cache_exact import CacheExact
from ..policies.manual import Manual
from ..policies.text_pages import TextPages
from ..workers.models import Group
from .ring import Apply, RingWriter
from .shared_stats import TURNS, SharedCount, SharedStats


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


class PolicySharing:
    """Joins the policies of this process with those of the others, which were built alike."""

    def __init__(self, board: SharedStats, child: int):
        self._board = board
        self._child = child
        self._ring = RingWriter(board, child)

    def join(self, group: Group, policies: Iterable[Policy]) -> dict[int, Apply]:
        """Join those of one model; returns what takes in the records of the others' rings, by kind.

        Turns are counted over all processes where there is one model; of several, each process takes its own.
        """
        apply: dict[int, Apply] = {}
        first = _first_kind(group)
        for index, policy in enumerate(dict.fromkeys(policies)):
            if isinstance(policy, CacheAware):
                policy.memory = self._prefixes(first, apply)
            elif isinstance(policy, CacheExact):
                policy.recent, policy.recent_decode = self._prefixes(first, apply), self._prefixes(first, apply)
                policy.sent = self._prefixes(first, apply)
                kind = first + len(apply)
                policy.texts = texts = SharedTexts(policy.texts.capacity, self._ring, kind)
                apply[kind] = texts.heard
            elif isinstance(policy, Manual):
                kind = first + len(apply)
                policy.given = partial(self._give, kind)
                apply[kind] = partial(_given, policy)
            elif group is None and hasattr(policy, "turns"):
                cells: Sequence[memoryview] = [self._board.cells(other) for other in range(self._board.count)]
                policy.turns = SharedCount(cells, self._child, TURNS + index)
        return apply

    def _give(self, kind: int, key: int, worker_id: int, new: bool) -> None:
        self._ring.write(kind, worker_id, int(new), (key,))

    def _prefixes(self, first: int, apply: dict[int, Apply]) -> SharedPrefixes:
        kind = first + len(apply)
        memory = SharedPrefixes(self._ring, kind)
        apply[kind] = memory.heard
        return memory


def _given(policy: Manual, words: list[int], worker_id: int, number: int) -> None:
    """Another process gave a key to a worker."""
    for key in words[:1]:
        policy.table.give(key, worker_id, new=bool(number))


def _first_kind(group: Group) -> int:
    """The kind of a model's first records, the same in all processes: 16 for each, by 27 bits of its name's hash."""
    if group is None:
        return 1
    return 16 + (int.from_bytes(blake2b(group.encode(), digest_size=4).digest(), "little") >> 5) * 16
