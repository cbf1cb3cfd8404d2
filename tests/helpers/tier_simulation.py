"""A scheduler over a prefix cache, a host tier and a storage, with a model that writes what it was given: each position
of a page gets a number that follows from all tokens up to it. So a page that was lost, owned twice, loaded for other
tokens or overwritten too early is seen when it is read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from baton.common.api.messages import Generate
from baton.common.api.namespace import Namespace
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import ScheduleArgs
from baton.common.config.server.tiers import WRITE_POLICIES, PrefetchLimits
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.pool import KVPool
from baton.common.kvcache.storage.first_rank import FirstRankStorage
from baton.common.kvcache.tiers.base import TierContext
from baton.common.kvcache.tiers.host import HostTier
from baton.common.kvcache.tiers.shared_pages import HostShare
from baton.common.kvcache.tiers.slot_memory import SlotMemory
from baton.common.request.req import Req
from baton.common.scheduler.batcher import Batcher
from baton.common.scheduler.preemption.copy_rates import AgreedRates
from baton.common.scheduler.tier_loads import TierLoads
from baton.common.scheduler.tier_prefetch import Prefetches

from .fake_storage import FakeStorage
from .late_copies import LateCopies

PAGE, PAGES, SLOTS = 4, 40, 48
_LAYOUT = KVLayout(groups=(1, 1), num_kv_heads=1, head_dim=1, page_size=PAGE, dtype="float32")


def shares(count: int) -> list[HostShare]:
    """Host memory of ranks that share it, in this process."""
    memory = np.zeros(HostShare.HEADER_BYTES + SlotMemory.num_bytes([_LAYOUT.page_bytes // 2] * 2, SLOTS), np.uint8)
    return [HostShare.of(index, count, memory) for index in range(count)]


class SimulatedRank:
    """One rank: its caches and its batcher. Ranks that are given the same calls take the same decisions, whatever their
    own ``rng`` does to copies and to the storage."""

    def __init__(self, group: Any, seed: int, *, alone: bool = True, shared: bool = False,
                 prefetch_policy: Any = "timeout", write_policy: str = "write_through",
                 share: HostShare | None = None):
        """``share``: with ranks that have the same pages; the first one has the storage."""
        self.rng = np.random.default_rng(seed)
        self.pool = KVPool(_LAYOUT, PAGES, "cpu")
        self._memory = [tensor.view(PAGES, 2, PAGE).numpy() for tensor in self.pool.groups]
        self.cache = KVCacheManager(PAGES, PAGE)
        context = TierContext(self.pool, SLOTS * _LAYOUT.page_bytes, "-", share=share)
        made = []

        def late_copies(memory: Any) -> Any:
            made.append(LateCopies(context, memory))
            return made[0]

        self.host = HostTier(context, late_copies)
        self.device = made[0]
        self.cache.attach_tier(self.host, WRITE_POLICIES.get(write_policy)(), shared=shared, alone=alone)
        self.storage = (FakeStorage(self.host, self.rng, max_delay=4, fail_share=0.1, pages_a_step=3)
                        if share is None or share.index == 0 else FirstRankStorage("fake"))
        rates = AgreedRates(1e9, group)
        self.prefetches = Prefetches(self.cache, self.host, self.storage, group, rates, prefetch_policy,
                                     PrefetchLimits(2 * PAGE, 5.0, 0.0))
        self.loads = TierLoads(self.cache, self.host, group, rates, self.prefetches, alone=alone, shared=shared)
        self.batcher = Batcher(self.cache, ScheduleArgs(max_running_requests=6, chunked_prefill_size=24,
                                                        schedule_conservativeness=0.0), loads=self.loads, rates=rates)
        self._numbers: dict[Req, list[int]] = {}
        self.num_checked = 0

    def add(self, req: Req) -> None:
        self.batcher.prefetch(req, req.prefix_limit)
        self.batcher.enqueue(req)

    def abort(self, req: Req) -> None:
        self._numbers.pop(req, None)
        self.batcher.finish(req)

    def step(self, now: float) -> tuple[list[tuple[str, int, int]], list[Req]]:
        """One step; returns its chunks, and the requests that ended."""
        batcher, ended = self.batcher, []
        batcher.poll_loads(now)
        batch = None if batcher.paused else batcher.next_prefill()
        if batch is None and not batcher.paused:
            if not batcher.allocate_running():
                batcher.retraction.retract_decode()
            batch = batcher.next_decode()
        launched = []
        if batch is not None:
            for load in self.host.take_step_loads():
                load.wait_on_device()
            chunks = list(batch.chunks)
            for chunk in chunks:
                self._compute(chunk.req, chunk.start, chunk.stop)
                launched.append((chunk.req.rid, chunk.start, chunk.stop))
            batcher.mark_launched(batch)
            for chunk in chunks:
                if chunk.samples:
                    chunk.req.append_pending(self._numbers_of(chunk.req, chunk.stop)[-1] % 3)
                    if chunk.req.finish is not None:
                        ended.append(chunk.req)
                        self._numbers.pop(chunk.req)
            batcher.finish_all(ended)
        batcher.flush_stores()
        self.device.run_some(self.rng)
        if isinstance(self.storage, FakeStorage):
            self.storage.step()
            if len(self.storage.objects) > 400:  # some are lost, whatever they are needed for
                for key in [*self.storage.objects][int(self.rng.integers(7))::7]:
                    del self.storage.objects[key]
        return launched, ended

    def check(self) -> None:
        self.cache.check_integrity()
        self.host.check_integrity()
        if self.batcher.idle:
            self.loads.check_integrity()
            assert self.cache.num_allocated == 0

    def _compute(self, req: Req, start: int, stop: int) -> None:
        """Check what the request reads, and write what it computes."""
        table = req.page_table
        assert table is not None
        numbers = np.array(self._numbers_of(req, stop), np.float32)
        if stop - start > 1 or self.rng.random() < 0.1:
            pages = table.ids[:-(-start // PAGE)]
            for memory in self._memory:
                found = memory[pages].transpose(1, 0, 2).reshape(2, -1)[:, :start]
                assert (found == numbers[:start]).all(), f"{req.rid} reads other tokens' pages"
            self.num_checked += start
        positions = np.arange(start, stop)
        pages, offsets = table.ids[positions // PAGE], positions % PAGE
        for memory in self._memory:
            memory[pages, :, offsets] = numbers[start:stop, None]

    def _numbers_of(self, req: Req, count: int) -> list[int]:
        numbers = self._numbers.setdefault(req, [])
        tokens = req.tokens.view()
        before = numbers[-1] if numbers else len(req.namespace.salt or "")
        for token in tokens[len(numbers):count].tolist():
            before = (before * 31 + token + 1) & 0xFFFFF
            numbers.append(before)
        return numbers[:count]


class Traffic:
    """Random requests whose prompts begin as earlier answers ended, for any number of ranks."""

    def __init__(self, ranks: list[SimulatedRank], seed: int):
        self.ranks = ranks
        self.rng = random.Random(seed)
        self.transcripts: list[list[int]] = [[]]
        self.live: dict[str, list[Req]] = {}
        self.version = ""
        self.now = 0.0
        self.num_ended = 0

    def step(self, tick: Any = None) -> None:
        """One step of all ranks, after ``tick``; their decisions are the same."""
        rng = self.rng
        if len(self.live) < 10 and rng.random() < 0.2:
            self._start()
        if self.live and rng.random() < 0.01:
            for rank, req in zip(self.ranks, self.live.pop(rng.choice(list(self.live)))):
                rank.abort(req)
        if rng.random() < 0.0005:
            self.version = "" if self.version else "x"
            for rank in self.ranks:
                rank.cache.change_weights(self.version)
        if rng.random() < 0.002:
            for rank in self.ranks:
                rank.batcher.pause("retract")
        elif rng.random() < 0.3:
            for rank in self.ranks:
                rank.batcher.paused = None
        if tick is not None:
            tick()
        self.now += 0.1
        results = [rank.step(self.now) for rank in self.ranks]
        first = self.ranks[0]
        for rank, (launched, ended) in zip(self.ranks[1:], results[1:]):
            assert launched == results[0][0] and [req.rid for req in ended] == [req.rid for req in results[0][1]]
            assert rank.cache.num_free == first.cache.num_free and rank.host._slot_of == first.host._slot_of
        for req in results[0][1]:
            del self.live[req.rid]
            self.num_ended += 1
            self.transcripts = [*self.transcripts[-40:], req.tokens.view().tolist()]

    def _start(self) -> None:
        rng = self.rng
        stem = rng.choice(self.transcripts)
        prompt = [*stem[:rng.randrange(len(stem) + 1)][:60], *(rng.randrange(3) for _ in range(rng.randrange(1, 9)))]
        message = Generate(f"{self.now:.1f}", prompt, SamplingParams(max_new_tokens=rng.randrange(1, 20)),
                           namespace=Namespace(self.version))
        reqs = [Req.from_message(message, eos_ids=frozenset(), now=self.now, timeout=1e9) for _ in self.ranks]
        self.live[message.rid] = reqs
        for rank, req in zip(self.ranks, reqs):
            rank.add(req)

    def end(self, tick: Any = None) -> None:
        """Steps without new requests, until all have ended."""
        for rank in self.ranks:
            rank.batcher.paused = None
        random_source, self.rng = self.rng, _Never()
        for _ in range(5000):
            if all(rank.batcher.idle for rank in self.ranks):
                break
            self.step(tick)
        self.rng = random_source
        assert not self.live and all(rank.batcher.idle for rank in self.ranks)
        for rank in self.ranks:
            rank.device.run()
            rank.cache.poll_tier()
            rank.check()


class _Never:
    def random(self) -> float:
        return 1.0
