"""Host time that KV tiers take from an engine's loop where nothing is used again: on a CPU, without a model.

    python -m baton.tests.bench.tier_steps [--requests 600] [--policy write_through] [--profile]

The scheduler and the caches are the server's, as tier_cost.py runs them: 64 requests of 1,024 tokens at once, 256
tokens of answer each, pools of 150,000 tokens and host memory of twice as many, so that both evict. Copies are prepared
as for the copy engines and end at once. Prints the loop's milliseconds for a request, in steps with prompts and in
those without, and what tiers add to them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...common.api.messages import FromEngine, Generate
from ...common.api.sampling import SamplingParams
from ...common.config.server import ScheduleArgs
from ...common.config.server.tiers import WRITE_POLICIES
from ...common.distributed.tp import TPGroup
from ...common.engine.unified_scheduler import UnifiedScheduler
from ...common.execution.executor import Executor
from ...common.garbage_collector import freeze_collector
from ...common.kvcache.layout import KVLayout
from ...common.kvcache.manager import KVCacheManager
from ...common.kvcache.pool import KVPool
from ...common.kvcache.tiers.base import TierContext
from ...common.kvcache.tiers.host import HostTier
from ...common.kvcache.tiers.page_copies import CompleteCopy, runs
from ...common.request.step_input import StepInput
from ...common.sampling.sampler import Sampler
from ...common.scheduler.batcher import Batcher
from ...common.scheduler.preemption.copy_rates import AgreedRates
from ...common.scheduler.request_tracker import RequestTracker
from ...common.scheduler.tier_loads import TierLoads
from .step_host import PAGE, VOCAB, FreeModel

CLIENTS, INPUT, OUTPUT, POOL_TOKENS, NUM_GROUPS = 64, 1024, 256, 150_000, 2


class FreeCopies:
    """Copies that are prepared as for the copy engines, and cost nothing more."""

    def __init__(self, memory: Any):
        self._memory = memory

    def load(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Any]) -> CompleteCopy:
        return self.store(slots, page_ids, after)

    def store(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Any]) -> CompleteCopy:
        prepared = runs(slots, page_ids[0], self._memory.chunk_of(slots))
        for _ in range(NUM_GROUPS):
            _ = [(each << 20).astype(np.uint64) for each in prepared]
        return CompleteCopy(len(slots))


class Bench:
    def __init__(self, policy: str | None):
        """``policy``: a write policy; None: without tiers."""
        self._ended = 0
        self.tracker = RequestTracker(self._take, eos_ids=frozenset({1}), vocab_size=1 << 31,
                                      max_request_tokens=1 << 20, max_requests=4096, timeout=1e9)
        num_pages = POOL_TOKENS // PAGE
        cache, loads = KVCacheManager(num_pages, PAGE), None
        rates = AgreedRates(50e9, TPGroup())
        if policy is not None:
            layout = KVLayout(groups=(1,), num_kv_heads=1, head_dim=1, page_size=PAGE, dtype="float32")
            context = TierContext(KVPool(layout, num_pages, "cpu"), 2 * num_pages * layout.page_bytes, "-")
            tier = HostTier(context, FreeCopies)  # type: ignore[arg-type]
            cache.attach_tier(tier, WRITE_POLICIES.get(policy)(), shared=False)
            loads = TierLoads(cache, tier, TPGroup(), rates)
        self.batcher = Batcher(cache, ScheduleArgs(chunked_prefill_size=8192, max_running_requests=256), loads=loads,
                               rates=rates)
        executor = Executor(FreeModel(), Sampler(VOCAB, "cpu", 0), None, None)  # type: ignore[arg-type]
        self.scheduler = UnifiedScheduler(self.batcher, executor, self.tracker, overlap=True)
        self._random, self._sent = np.random.default_rng(0), 0
        self._had_prompts = False
        launch = executor.launch

        def note(step: StepInput, *args: Any) -> Any:
            self._had_prompts |= step.num_prefill > 0
            return launch(step, *args)

        executor.launch = note  # type: ignore[method-assign]

    def _take(self, message: FromEngine) -> None:
        """Answers are not read."""

    def run(self, requests: int) -> tuple[float, float]:
        """Milliseconds for each of ``requests`` more, in steps with prompts and in those without."""
        seconds, end = [0.0, 0.0], self._sent + requests
        while self._sent < end or self.tracker.live:
            while self._sent < end and len(self.tracker.live) < CLIENTS:
                self._send()
            self._had_prompts = False
            began = time.thread_time()
            self.scheduler.step(0.0)
            self.tracker.flush()
            seconds[not self._had_prompts] += time.thread_time() - began
        return 1e3 * seconds[0] / requests, 1e3 * seconds[1] / requests

    def _send(self) -> None:
        self._sent += 1
        prompt = self._random.integers(2, VOCAB, INPUT).tolist()
        req = self.tracker.accept(Generate(str(self._sent), prompt, SamplingParams(
            temperature=0.0, max_new_tokens=OUTPUT, ignore_eos=True)), 0.0)
        assert req is not None
        self.scheduler.add(req)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600, help="of each server, after as many that fill it")
    parser.add_argument("--policy", default="write_through", choices=WRITE_POLICIES.names)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    benches = {"off": Bench(None), "on": Bench(args.policy)}
    for bench in benches.values():
        bench.run(args.requests)
    freeze_collector()
    found = {name: np.min([bench.run(args.requests) for _ in range(3)], 0) for name, bench in benches.items()}
    print("| tiers | steps with prompts, ms a request | others |\n|---|---|---|")
    for name, (prompts, others) in found.items():
        print(f"| {name} | {prompts:.3f} | {others:.3f} |")
    print("| added | {:.3f} | {:.3f} |".format(*(found["on"] - found["off"])))
    if args.profile:
        with cProfile.Profile() as profile:
            benches["on"].run(args.requests)
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
