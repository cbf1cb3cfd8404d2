"""A server's engine in this process whose requests only decode: their prompts' KV cache is there, as after a transfer.

A batch of any size begins at once, so that many batches can be measured in the time of one load of the weights.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from typing import Any, cast

import numpy as np
import torch

from ...common.api.errors import AbortRequested
from ...common.api.messages import Generate
from ...common.api.sampling import SamplingParams
from ...common.bench.client.timed_executor import TimedExecutor
from ...common.config.server import ServerConfig
from ...common.engine.rank import EngineParts, build_parts, join_groups
from ...common.engine.rank_spec import RankSpec
from ...common.execution.executor import Executor
from ...common.garbage_collector import freeze_collector
from ...common.kvcache.pool import KVPool


class DecodingEngine:
    """Steps run as in a server: the same scheduler, overlap, CUDA graphs and sampler."""

    def __init__(self, config: ServerConfig):
        """Loads the weights, warms up, and fills the KV pools with noise. Raises ConfigError."""
        self.stages: dict[str, float] = {}
        self._began = time.perf_counter()
        spec = RankSpec(config, 0, 1, "", "", "")
        parts = build_parts(spec, join_groups(spec), lambda message: None, self._progress)
        self._executor = TimedExecutor(cast(Executor, parts.executor))
        self.parts: EngineParts = dataclasses.replace(parts, executor=cast(Executor, self._executor))
        self.scheduler = self.parts.make_unified_scheduler()
        self.runner = self.parts.runner
        for pool in (*self.runner.pools, *([self.runner.draft_pool] if self.runner.draft_pool else [])):
            _fill(pool)
        self._count = 0
        freeze_collector()

    def _progress(self, stage: str, share: float) -> None:
        self.stages[stage] = round(time.perf_counter() - self._began, 1)

    @property
    def drafting(self) -> Any:
        """None without drafts."""
        return self.parts.batcher.drafting

    @property
    def num_generated(self) -> int:
        """Output tokens that the host knows."""
        return int(self.parts.tracker.counters["generation_tokens"])

    @property
    def waited(self) -> float:
        """Seconds that the host has waited for the device's results."""
        return self._executor.waited

    def start(self, batch: int, context: int, output_len: int, **sampling: Any) -> None:
        """Adds ``batch`` requests with prompts of ``context`` tokens, which decode from the next step on."""
        vocab, batcher, tracker = self.runner.spec.vocab_size, self.parts.batcher, self.parts.tracker
        params = SamplingParams(**{"temperature": 0.0, **sampling}, max_new_tokens=output_len, ignore_eos=True)
        for _ in range(batch):
            self._count += 1
            numbers = random.Random(self._count)
            prompt = np.random.default_rng(self._count).integers(0, vocab, context).tolist()
            req = tracker.accept(Generate(f"bench-{self._count}", prompt, params), time.monotonic())
            assert req is not None, "the request does not fit"
            assert batcher.page_budget.reserve(req, context, context), "the KV pool is too small for the batch"
            batcher.add_transferring(req)
            req.num_computed_tokens = context
            batcher.start_decode(req)
            self.scheduler.report(req, req.append_token(numbers.randrange(vocab)), None)

    def step(self) -> None:
        """One iteration of the engine loop."""
        self.scheduler.step(time.monotonic())
        self.parts.tracker.flush()

    def synchronize(self) -> None:
        """Waits for the device, and for the results of the step in flight."""
        self.scheduler.synchronize()
        self.parts.tracker.flush()
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)

    def stop(self) -> None:
        """Ends all requests."""
        self.synchronize()
        for req in list(self.parts.tracker.live.values()):
            self.scheduler.abort(req, AbortRequested("measured"))
            self.parts.tracker.drop(req)
        assert self.scheduler.idle and not self.parts.batcher.cache.num_allocated

    def close(self) -> None:
        """Frees the device's memory."""
        self.runner.release(("weights", "kv_cache"))
        self.parts.parallel.close()
        gc.unfreeze()
        gc.collect()
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()


def _fill(pool: KVPool) -> None:
    """Fills a pool with noise: memory that was never written may have values that are not numbers."""
    for group in pool.groups:
        noise = torch.randn(1 << 20, device=group.device).to(group.dtype).view(-1)
        flat = group.view(-1)
        for begin in range(0, len(flat), len(noise)):
            part = flat[begin:begin + len(noise)]
            part.copy_(noise[:len(part)])
