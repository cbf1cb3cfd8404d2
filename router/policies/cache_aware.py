"""Prefer the worker that has probably cached most of the prompt, unless loads drift apart.

Workers do not say what they cache; the router remembers what it sent to whom. A prompt is cut
into blocks and each block gets a hash chained over all blocks before it, so equal hashes mean
equal prefixes and one dictionary lookup a block finds the longest prefix that a worker has seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice

from ..net.body import Peek
from ..net.request import Request
from ..workers.registry import Worker
from ..workers.worker_sets import WorkerSets
from .base import Decision, Publish, Replication, by_load, prompt_text
from .load_view import EXACT_UP_TO, LoadView
from .worker_groups import WorkerGroup, WorkerGroups

BLOCK = 256
"""Bytes of a prompt's first blocks: 16 lookups for a 4 KB prompt, and a match is blind to at most 255 bytes."""
LEVELS = ((0, BLOCK), (16 * 1024, 1024), (64 * 1024, 4096))
"""From which byte on blocks have which size: a prompt of 100 KB costs 120 lookups instead of 400."""
_FINE_BYTES = LEVELS[1][0]
_SAMPLED_FROM = 4096
_SAMPLE = 512
"""Bytes of each end of a long block that are hashed: hashing all of 100 KB takes 65 us, a quarter of the router's work
for such a request. A prompt that differs in the middle of a block alone goes where the rest is cached."""
MOST_BLOCKS = 2**20
"""Of all workers together: 100 MB of the router's memory, however many workers there are."""
SHARDS = 16
"""Dictionaries of a generation. One of a million entries grows for 37 ms and is freed for 23 ms, in which
every stream would stand still; a sixteenth of it takes 2 ms."""


def block_hashes(text: bytes) -> list[int]:
    """Hashes of the prefixes of ``text`` that end on a block's end.

    An unfinished last block is left out, as the next turn of a conversation would change it; a
    text below one block counts as one. Not to be changed by callers.
    """
    size = len(text)
    if size < BLOCK:
        return [hash((0, text))] if size else []
    hashes = []
    previous = 0
    for at in range(0, min(size, _FINE_BYTES) - BLOCK + 1, BLOCK):
        previous = hash((previous, text[at:at + BLOCK]))
        hashes.append(previous)
    if size <= _FINE_BYTES:
        return hashes
    for (start, block), (end, _) in zip(LEVELS[1:], (*LEVELS[2:], (size, 0))):
        if size < start + block:
            break
        for at in range(start, min(size, end) - block + 1, block):
            if block < _SAMPLED_FROM:
                previous = hash((previous, text[at:at + block]))
            else:
                previous = hash((previous, text[at:at + _SAMPLE], text[at + block - _SAMPLE:at + block]))
            hashes.append(previous)
    return hashes


def _ends() -> list[int]:
    """Bytes that so many first blocks come to, up to where all blocks are of the last level."""
    ends = [0]
    for (start, block), (end, _) in zip(LEVELS, LEVELS[1:]):
        ends += range(start + block, end + 1, block)
    return ends


_ENDS = _ends()


def covered_bytes(blocks: int) -> int:
    """Bytes that so many first blocks of a text come to."""
    beyond = blocks - len(_ENDS) + 1
    return _ENDS[blocks] if beyond <= 0 else _ENDS[-1] + beyond * LEVELS[-1][1]


def prompt_blocks(request: Request, found: Peek | None) -> list[int]:
    """``read`` of this policy: hashed once for both workers of a pair."""
    return block_hashes(prompt_text(request, found))


class _Shard:
    """One generation of a part of the memory: block hash -> number of the set of its holders."""

    __slots__ = ("blocks", "sets")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.sets = WorkerSets()

    def __len__(self) -> int:
        return len(self.blocks)

    def join(self, block: int, holders: frozenset[int]) -> None:
        """Put a block whose holders are several."""
        before = self.blocks.get(block)
        self.blocks[block] = self.sets.take(holders)
        if before is not None:
            self.sets.drop(before)


class PrefixMemory:
    """Which workers were sent which prefixes: block hash -> ids of its holders.

    Two generations bound it at no cost a request: writes and hits go to the young one, and when that
    is half of the capacity the old one is forgotten (shard by shard). An entry costs about 100 bytes.
    """

    def __init__(self, shards: int = SHARDS) -> None:
        self._young = [_Shard() for _ in range(shards)]
        self._old = [_Shard() for _ in range(shards)]
        self._capacity = 0
        self._num_aged = 0
        self._publish: Publish | None = None
        self.sent: Counter[int] = Counter()
        """Different blocks recorded a worker, halved with each generation: how full its cache probably is."""

    def __len__(self) -> int:
        return sum(map(len, self._young)) + sum(map(len, self._old))

    @property
    def num_sets(self) -> int:
        """Distinct sets of holders, counted once a shard."""
        return sum(len(shard.sets) for shard in self._young + self._old)

    def longest(self, hashes: list[int], among: frozenset[int]) -> tuple[frozenset[int], int]:
        """``(ids in among that hold the longest known prefix, its length in blocks)``."""
        young, old, shards = self._young, self._old, len(self._young)
        owners, depth = among, 0
        last = None
        for value in hashes:
            shard = young[value % shards]
            number = shard.blocks.get(value)
            if number is None:
                shard = old[value % shards]
                number = shard.blocks.get(value)
                if number is None:
                    break
            holders = shard.sets.by_number[number]
            if holders is not last:
                narrowed = owners & holders
                if not narrowed:
                    break
                owners, last = narrowed, holders
            depth += 1
        return owners, depth

    def replicate(self, replication: Replication) -> None:
        """Records what other processes record, and tells them what this one does."""
        self._publish = replication.channel(partial(self.record, publish=False))

    def record(self, hashes: list[int], worker_id: int, capacity: int, publish: bool = True) -> None:
        """Notes that a worker was sent the prefix; keeps at most ``capacity`` blocks in all."""
        self._capacity = capacity
        shards = len(self._young)
        most = capacity // (2 * shards)
        added = 0
        for value in hashes:
            index = value % shards
            shard = self._young[index]
            number = shard.blocks.get(value)
            if number is None:
                if len(shard.blocks) >= most:
                    self._age(index)
                    shard = self._young[index]
                old = self._old[index]
                number = old.blocks.get(value)
                if number is None or old.sets.by_number[number] == {worker_id}:
                    shard.blocks[value] = shard.sets.alone(worker_id)
                else:
                    shard.join(value, old.sets.by_number[number] | {worker_id})
                added += 1
            elif worker_id not in shard.sets.by_number[number]:
                shard.join(value, shard.sets.by_number[number] | {worker_id})
                added += 1
        self.sent[worker_id] += added
        if publish and self._publish is not None:
            self._publish(worker_id, capacity, hashes)

    def forget(self, worker_id: int) -> None:
        """The worker has nothing of what it was sent."""
        for shard in self._young + self._old:
            shard.sets.leave(worker_id)
        del self.sent[worker_id]

    def evict(self) -> None:
        """Forget what was not seen since the last call but one, where memory is filling up.

        Worth its while from a quarter of the capacity on; so at least that much is always kept.
        """
        for index, shard in enumerate(self._young):
            if len(shard) > self._capacity // (4 * len(self._young)):
                self._age(index)

    def turn(self) -> None:
        """Forget what was not seen since the last call."""
        if len(self):
            for index in range(len(self._young)):
                self._age(index)

    def _age(self, index: int) -> None:
        self._old[index], self._young[index] = self._young[index], _Shard()
        self._num_aged += 1
        if self._num_aged % len(self._young) == 0:
            self.sent = Counter({worker: count // 2 for worker, count in self.sent.items() if count > 1})


class CacheAware:
    """Longest remembered prefix, or the least load.

    - Loads drift apart (most - least > ``balance_abs_threshold`` and most > least *
      ``balance_rel_threshold``): the least loaded worker.
    - Some worker saw at least ``cache_threshold`` of the prompt: the least loaded of those that saw
      most. But where many prompts go on differently from the end of that prefix (a system prompt, not
      a conversation's past), a quarter of ``balance_abs_threshold`` is the most that its holders may be
      ahead of the least loaded worker: one more copy of it costs less than a queue behind one worker.
    - Else, of workers that are at most a sixteenth of it ahead of the least loaded one, the one that was sent the
      fewest different blocks: prompts that come again then find as much room in one cache as in another.

    Every ``eviction_interval`` seconds old prefixes are forgotten; at most ``max_tree_size`` bytes of
    text a worker are remembered at any time, and at most ``most_blocks`` blocks in all.
    """

    read = staticmethod(prompt_blocks)

    def __init__(self, *, cache_threshold: float = 0.5, balance_abs_threshold: int = 32,
                 balance_rel_threshold: float = 1.0001, max_tree_size: int = 2**24, eviction_interval: float = 60.0,
                 most_blocks: int = MOST_BLOCKS):
        self._cache_threshold = cache_threshold
        self._abs = balance_abs_threshold
        self._rel = balance_rel_threshold
        self._slack = balance_abs_threshold // 16
        self._blocks_per_worker = max_tree_size // BLOCK
        self.most_blocks = most_blocks
        self._interval = eviction_interval
        self._next_eviction: float | None = None
        self.memory = PrefixMemory()
        self._branches = Branches()
        self._loads = LoadView()
        self._fleets = WorkerGroups()
        self._turn = 0

    def choose(self, workers: Sequence[Worker], hashes: list[int]) -> Decision:
        decision = self._choose(workers, hashes)
        if hashes:
            capacity = min(self.most_blocks, self._blocks_per_worker * len(workers))
            self.memory.record(hashes, decision.worker.id, capacity)
        return decision

    def cached_share(self, workers: Sequence[Worker], hashes: list[int]) -> float:
        """The share of the prompt, 0 to 1, that the worker it would go to was sent before; decides nothing."""
        self._loads.look(workers)
        if not hashes or self._drifted():
            return 0.0
        fleet = self._fleets.of(workers)
        owners, depth = self.memory.longest(hashes, fleet.ids)
        ahead = self._lightest(owners, fleet).load - self._loads.least
        share = covered_bytes(depth) / covered_bytes(len(hashes))
        return share if share >= self._cache_threshold and ahead <= self._abs // 4 else 0.0

    def replicate(self, replication: Replication) -> None:
        self.memory.replicate(replication)

    def sweep(self, now: float) -> None:
        """Called every second or so; ``now`` in seconds."""
        if self._next_eviction is None or now >= self._next_eviction:
            if self._next_eviction is not None:
                self.memory.evict()
            self._next_eviction = now + self._interval

    def _choose(self, workers: Sequence[Worker], hashes: list[int]) -> Decision:
        if len(workers) == 1:
            return Decision(workers[0], "only")
        loads, sent = self._loads, self.memory.sent
        loads.look(workers)
        least = loads.least
        if loads.most - least > self._abs and self._drifted():
            return Decision(loads.lightest(sent), "balance")
        if hashes:
            fleet = self._fleets.of(workers)
            owners, depth = self.memory.longest(hashes, fleet.ids)
            if depth and (depth == len(hashes)
                          or covered_bytes(depth) >= self._cache_threshold * covered_bytes(len(hashes))):
                holder = self._lightest(owners, fleet)
                shared = self._branches.note(hashes[depth - 1])
                if shared and holder.load - least > self._abs // 4:
                    return Decision(loads.lightest(sent), "balance")
                return Decision(holder, "cache_hit")
        return Decision(loads.lightest(sent, self._slack), "cache_miss")

    def _lightest(self, owners: frozenset[int], fleet: WorkerGroup) -> Worker:
        """The least loaded of them; of very many, of some, others each time: all would take longer than is gained."""
        if len(owners) == 1:
            (owner,) = owners
            return fleet.by_id[owner]
        if len(owners) == len(fleet.ids) <= EXACT_UP_TO:
            return self._loads.first
        some: Iterable[int] = owners
        if len(owners) > EXACT_UP_TO:
            self._turn = (self._turn + EXACT_UP_TO) % len(owners)
            some = islice(chain(owners, owners), self._turn, self._turn + EXACT_UP_TO)
        return min([fleet.by_id[owner] for owner in some], key=by_load)

    def _drifted(self) -> bool:
        loads = self._loads
        return loads.most - loads.least > self._abs and loads.most > loads.least * self._rel


class Branches:
    """Prefixes after which prompts went on in different ways, the more often seen the surer."""

    FROM = 3
    """A conversation's next turn leaves its past once, an edited or repeated one twice; a system prompt always."""
    CAPACITY = 65536

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def note(self, end: int) -> bool:
        """A prompt left the known text at ``end`` (a block's hash); returns whether many did."""
        seen = self._young.get(end) or self._old.get(end, 0)
        if seen < self.FROM:
            if len(self._young) >= self.CAPACITY // 2:
                self._old, self._young = self._young, {}
            self._young[end] = seen + 1
        return seen + 1 >= self.FROM
