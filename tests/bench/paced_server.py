"""A server whose steps take the time that an H200 took for them, on a CPU: front, scheduler and channel are a server's,
the model costs nothing and each step's tokens are there when its time is over.

    python -m baton.tests.bench.paced_server --model-path FOLDER --tokenizer-path tinychat [any flags of a server]

Costs are those of ``tests/helpers/simulated_server.py``. ``PACE`` (environment) multiplies them, for a machine with
fewer cores than the server's parts.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from typing import Any, cast

from ...common.api.messages import Ready
from ...common.engine.rank_spec import RankSpec
from .traced_server import run

POOL_TOKENS = 400_000


class PacedExecutor:
    """An Executor, whose steps run one behind the other on a device that takes ``milliseconds(batch)`` for each."""

    asynchronous = True

    def __init__(self, executor: Any, milliseconds: Any):
        self._executor = executor
        self._milliseconds = milliseconds
        self._free = 0.0

    def launch(self, batch: Any, after_group: Any = None) -> Any:
        step = self._executor.launch(batch, after_group)
        self._free = max(self._free, time.perf_counter()) + self._milliseconds(batch) / 1e3
        return dataclasses.replace(step, sample=_Tokens(step.sample, self._free))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class _Tokens:
    """A step's tokens, there at ``end``."""

    def __init__(self, sampled: Any, end: float):
        self._sampled = sampled
        self._end = end

    def token_ids(self) -> Any:
        if (rest := self._end - time.perf_counter()) > 0:
            time.sleep(rest)
        return self._sampled.token_ids()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampled, name)


def rank_main(spec: RankSpec) -> None:
    import torch

    from ...common.distributed.parallel import Parallel
    from ...common.engine.control import Control
    from ...common.engine.loop import EngineLoop
    from ...common.engine.rank_channel import RankChannel, Ticker
    from ...common.engine.unified_scheduler import UnifiedScheduler
    from ...common.execution.executor import Executor
    from ...common.garbage_collector import freeze_collector
    from ...common.kvcache.manager import KVCacheManager
    from ...common.sampling.sampler import Sampler
    from ...common.scheduler.batcher import Batcher
    from ...common.scheduler.request_tracker import RequestTracker
    from ..helpers.simulated_server import H200
    from .step_host import PAGE, VOCAB, FreeModel
    from .step_trace import EngineTrace, folder

    torch.set_num_threads(1)
    pace = float(os.environ.get("PACE", "1"))
    channel = RankChannel(spec.rank, spec.to_engine, spec.from_engine)
    cache = KVCacheManager(POOL_TOKENS // PAGE, PAGE, not spec.config.cache.disable_radix_cache)
    tracker = RequestTracker(channel.send, eos_ids=frozenset({1}), vocab_size=1 << 31, max_request_tokens=POOL_TOKENS,
                             max_requests=4096, timeout=600.0)
    batcher = Batcher(cache, spec.config.schedule)
    model = cast(Any, FreeModel())
    executor = PacedExecutor(Executor(model, Sampler(VOCAB, "cpu", 0)), lambda batch: pace * H200.of(batch))
    into = folder()
    trace = None if into is None else EngineTrace(into)
    scheduler = UnifiedScheduler(batcher, cast(Executor, trace.executor(executor) if trace else executor), tracker,
                                 overlap=True)
    if trace is not None:
        trace.watch(scheduler, tracker)
    control = Control(spec.config, Parallel().world, model, batcher)
    channel.send(Ready(POOL_TOKENS, 16384))
    freeze_collector()
    EngineLoop(Ticker(channel, Parallel().tp), tracker, scheduler, cache, control, channel.send).run()
    channel.close()


if __name__ == "__main__":
    sys.exit(run(rank_main, "paced_server"))
