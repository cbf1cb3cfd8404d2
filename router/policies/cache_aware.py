"""Prefers the worker that has probably cached most of the prompt, unless loads are imbalanced.

The router knows no cache; it remembers which prompts it sent to which worker. A prompt is split
into blocks and each block gets a hash chained over all blocks before it, so equal hashes mean
equal prefixes and one dictionary lookup a block finds the longest prefix that a worker has seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice
from random import Random

from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..net.body import RoutingFields
from ..net.request import Request
from ..workers.registry import Worker
from ..workers.worker_sets import WorkerSets
from .base import Decision, Policy, Publish, Replication, by_load, prompt_text
from .load_view import EXACT_UP_TO, LoadView
from .worker_groups import WorkerGroup, WorkerGroups

BLOCK = 256
"""Bytes of a prompt's first blocks: 16 lookups for a 4 KB prompt, and a match misses at most 255 bytes."""
LEVELS = ((0, BLOCK), (16 * 1024, 1024), (64 * 1024, 4096))
"""(first byte, block size): later blocks are larger, so that a prompt of 100 KB costs 120 lookups instead of 400."""
_FIRST_LEVEL_BYTES = LEVELS[1][0]
_MIN_SAMPLED_BLOCK = 4096
_SAMPLE_BYTES = 512
"""Bytes of each end of a long block that are hashed: hashing all of 100 KB takes 65 us, a quarter of the router's work
for such a request. A prompt that differs only in the middle of a block goes where the rest is cached."""
MAX_BLOCKS = 2**20
"""Blocks remembered of all workers together: 100 MB of the router's memory, however many workers there are."""
SHARDS = 16
"""Dictionaries of a generation. One of a million entries takes 37 ms to grow and 23 ms to free, in which
every stream would stop; a sixteenth of it takes 2 ms."""


def block_hashes(text: bytes) -> list[int]:
    """Returns the hashes of the prefixes of ``text`` that end on a block's end.

    An unfinished last block is left out, as the conversation's next message would change it; a
    text below one block counts as one. Not to be changed by callers.
    """
    size = len(text)
    if size < BLOCK:
        return [hash((0, text))] if size else []
    hashes = []
    previous = 0
    for at in range(0, min(size, _FIRST_LEVEL_BYTES) - BLOCK + 1, BLOCK):
        previous = hash((previous, text[at:at + BLOCK]))
        hashes.append(previous)
    if size <= _FIRST_LEVEL_BYTES:
        return hashes
    for (start, block), (end, _) in zip(LEVELS[1:], (*LEVELS[2:], (size, 0))):
        if size < start + block:
            break
        for at in range(start, min(size, end) - block + 1, block):
            if block < _MIN_SAMPLED_BLOCK:
                previous = hash((previous, text[at:at + block]))
            else:
                previous = hash((previous, text[at:at + _SAMPLE_BYTES], text[at + block - _SAMPLE_BYTES:at + block]))
            hashes.append(previous)
    return hashes


def _ends() -> list[int]:
    """Bytes of the first n blocks, by n, up to the first block of the last level."""
    ends = [0]
    for (start, block), (end, _) in zip(LEVELS, LEVELS[1:]):
        ends += range(start + block, end + 1, block)
    return ends


_ENDS = _ends()


def covered_bytes(blocks: int) -> int:
    """Returns the bytes of a text's first ``blocks`` blocks."""
    beyond = blocks - len(_ENDS) + 1
    return _ENDS[blocks] if beyond <= 0 else _ENDS[-1] + beyond * LEVELS[-1][1]


def prompt_blocks(request: Request, fields: RoutingFields | None) -> list[int]:
    """Returns the prompt's block hashes; ``read`` of this policy, which both roles of a pair share."""
    return block_hashes(prompt_text(request, fields))


class _Shard:
    """One generation of a part of the memory: block hash -> number of the set of its workers."""

    __slots__ = ("blocks", "sets")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.sets = WorkerSets()

    def __len__(self) -> int:
        return len(self.blocks)

    def put(self, block: int, workers: frozenset[int]) -> None:
        """Stores a block of several workers."""
        before = self.blocks.get(block)
        self.blocks[block] = self.sets.acquire(workers)
        if before is not None:
            self.sets.release(before)


class PrefixMemory:
    """Prefixes that each worker was sent: block hash -> ids of its workers.

    Two generations bound it at no cost a request: writes and hits go to the young one, and when that
    fills half of the capacity the old one is forgotten (shard by shard). An entry costs about 100 bytes.
    """

    def __init__(self, shards: int = SHARDS) -> None:
        self._young = [_Shard() for _ in range(shards)]
        self._old = [_Shard() for _ in range(shards)]
        self._capacity = 0
        self._num_aged = 0
        self._publish: Publish | None = None
        self.blocks_sent: Counter[int] = Counter()
        """Different blocks recorded a worker, halved with each generation: an estimate of its cache's size."""

    def __len__(self) -> int:
        return sum(map(len, self._young)) + sum(map(len, self._old))

    @property
    def num_sets(self) -> int:
        """Distinct sets of workers, counted once a shard."""
        return sum(len(shard.sets) for shard in self._young + self._old)

    def longest_match(self, hashes: list[int], among: frozenset[int]) -> tuple[frozenset[int], int]:
        """Returns ``(ids in among that were sent the longest known prefix, its length in blocks)``."""
        young, old, shards = self._young, self._old, len(self._young)
        matched, depth = among, 0
        last = None
        for value in hashes:
            shard = young[value % shards]
            number = shard.blocks.get(value)
            if number is None:
                shard = old[value % shards]
                number = shard.blocks.get(value)
                if number is None:
                    break
            workers = shard.sets.by_number[number]
            if workers is not last:
                narrowed = matched & workers
                if not narrowed:
                    break
                matched, last = narrowed, workers
            depth += 1
        return matched, depth

    def replicate(self, replication: Replication) -> None:
        """Records what other processes record, and publishes what this one does."""
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
                    shard.blocks[value] = shard.sets.singleton(worker_id)
                else:
                    shard.put(value, old.sets.by_number[number] | {worker_id})
                added += 1
            elif worker_id not in shard.sets.by_number[number]:
                shard.put(value, shard.sets.by_number[number] | {worker_id})
                added += 1
        self.blocks_sent[worker_id] += added
        if publish and self._publish is not None:
            self._publish(worker_id, capacity, hashes)

    def forget(self, worker_id: int) -> None:
        """Forgets all prefixes of a worker."""
        for shard in self._young + self._old:
            shard.sets.remove_worker(worker_id)
        del self.blocks_sent[worker_id]

    def evict(self) -> None:
        """Forgets what was not seen since the last call but one, where memory is filling up.

        It pays from a quarter of the capacity on; so at least that much always stays.
        """
        for index, shard in enumerate(self._young):
            if len(shard) > self._capacity // (4 * len(self._young)):
                self._age(index)

    def age(self) -> None:
        """Forgets what was not seen since the last call but one: the young generation becomes the old one."""
        if len(self):
            for index in range(len(self._young)):
                self._age(index)

    def _age(self, index: int) -> None:
        self._old[index], self._young[index] = self._young[index], _Shard()
        self._num_aged += 1
        if self._num_aged % len(self._young) == 0:
            self.blocks_sent = Counter({worker: count // 2 for worker, count in self.blocks_sent.items()
                                        if count > 1})


class CacheAware:
    """Longest remembered prefix, or the least load.

    - Loads are imbalanced (max - min > ``balance_abs_threshold`` and max > min *
      ``balance_rel_threshold``): the least loaded worker.
    - Some worker was sent at least ``cache_threshold`` of the prompt: the least loaded of those that were sent
      most. But where many prompts continue differently from the end of that prefix (a system prompt, not
      a conversation's past), a quarter of ``balance_abs_threshold`` is the most that its workers may be
      ahead of the least loaded one: one more copy of it costs less than a queue at one worker.
    - Else, of workers that are at most a sixteenth of it ahead of the least loaded one, the one that was sent the
      fewest different blocks: so that prompts that come again fit equally well into all caches.

    Every ``eviction_interval`` seconds old prefixes are forgotten; at most ``max_tree_size`` bytes of
    text a worker are remembered at any time, and at most ``max_blocks`` blocks in all.
    """

    read = staticmethod(prompt_blocks)

    def __init__(self, *, cache_threshold: float = 0.5, balance_abs_threshold: int = 32,
                 balance_rel_threshold: float = 1.0001, max_tree_size: int = 2**24, eviction_interval: float = 60.0,
                 max_blocks: int = MAX_BLOCKS):
        self._cache_threshold = cache_threshold
        self._abs = balance_abs_threshold
        self._rel = balance_rel_threshold
        self._slack = balance_abs_threshold // 16
        self._blocks_per_worker = max_tree_size // BLOCK
        self.max_blocks = max_blocks
        self._interval = eviction_interval
        self._next_eviction: float | None = None
        self.memory = PrefixMemory()
        self._branches = Branches()
        self._loads = LoadView()
        self._groups = WorkerGroups()
        self._rotation = 0

    def choose(self, workers: Sequence[Worker], hashes: list[int]) -> Decision:
        decision = self._choose(workers, hashes)
        if hashes:
            capacity = min(self.max_blocks, self._blocks_per_worker * len(workers))
            self.memory.record(hashes, decision.worker.id, capacity)
        return decision

    def cached_share(self, workers: Sequence[Worker], hashes: list[int]) -> float:
        """Returns the share of the prompt, 0 to 1, that the worker it would go to was sent before; decides nothing."""
        self._loads.refresh(workers)
        if not hashes or self._imbalanced():
            return 0.0
        group = self._groups.of(workers)
        owners, depth = self.memory.longest_match(hashes, group.ids)
        ahead = self._least_loaded(owners, group).load - self._loads.min_load
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
        loads, sent = self._loads, self.memory.blocks_sent
        loads.refresh(workers)
        least = loads.min_load
        if loads.max_load - least > self._abs and self._imbalanced():
            return Decision(loads.least_loaded(sent), "balance")
        if hashes:
            group = self._groups.of(workers)
            owners, depth = self.memory.longest_match(hashes, group.ids)
            if depth and (depth == len(hashes)
                          or covered_bytes(depth) >= self._cache_threshold * covered_bytes(len(hashes))):
                best = self._least_loaded(owners, group)
                shared = self._branches.note(hashes[depth - 1])
                if shared and best.load - least > self._abs // 4:
                    return Decision(loads.least_loaded(sent), "balance")
                return Decision(best, "cache_hit")
        return Decision(loads.least_loaded(sent, self._slack), "cache_miss")

    def _least_loaded(self, owners: frozenset[int], group: WorkerGroup) -> Worker:
        """Returns the least loaded of them. Of very many only some are compared, others each time: comparing
        all would take longer than is won."""
        if len(owners) == 1:
            (owner,) = owners
            return group.by_id[owner]
        if len(owners) == len(group.ids) <= EXACT_UP_TO:
            return self._loads.first
        some: Iterable[int] = owners
        if len(owners) > EXACT_UP_TO:
            self._rotation = (self._rotation + EXACT_UP_TO) % len(owners)
            some = islice(chain(owners, owners), self._rotation, self._rotation + EXACT_UP_TO)
        return min([group.by_id[owner] for owner in some], key=by_load)

    def _imbalanced(self) -> bool:
        loads = self._loads
        return loads.max_load - loads.min_load > self._abs and loads.max_load > loads.min_load * self._rel


class Branches:
    """Prefixes after which prompts continue in different ways."""

    MIN_SEEN = 3
    """A conversation's next turn leaves its past once, an edited or repeated one twice; a system prompt always."""
    CAPACITY = 65536

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def note(self, end: int) -> bool:
        """Notes that a prompt left the known text at ``end`` (a block's hash); returns True if many did."""
        seen = self._young.get(end) or self._old.get(end, 0)
        if seen < self.MIN_SEEN:
            if len(self._young) >= self.CAPACITY // 2:
                self._old, self._young = self._young, {}
            self._young[end] = seen + 1
        return seen + 1 >= self.MIN_SEEN


@ROUTING_POLICIES.register("cache_aware")
def make(args: PolicyArgs, rng: Random) -> Policy:
    return CacheAware(cache_threshold=args.cache_threshold, balance_abs_threshold=args.balance_abs_threshold,
                      balance_rel_threshold=args.balance_rel_threshold, max_tree_size=args.max_tree_size,
                      eviction_interval=args.eviction_interval)
