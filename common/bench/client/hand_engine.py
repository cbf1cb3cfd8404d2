"""A server's engine in this process, without its front: stepped by hand, and watched."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from ...api.errors import ConfigError
from ...api.messages import Failed, FromEngine, Generate
from ...api.sampling import SamplingParams
from ...config.server import ServerConfig
from ...distributed.parallel import Parallel
from ...engine.rank import EngineParts, build_parts, join_groups, unified_scheduler
from ...engine.unified_scheduler import UnifiedScheduler
from ...engine_client.rank_processes import RankSpec
from ...execution.executor import Executor
from ...runner.cuda_graphs.piecewise_graphs import Recorded


class HandEngine:
    """Steps run as in a server: the same scheduler, overlap, CUDA graphs, sampler and number of threads."""

    def __init__(self, config: ServerConfig, parallel: Parallel | None = None,
                 progress: Callable[[str, float], None] = lambda stage, share: None):
        """Loads the weights and warms up. Raises ConfigError. ``parallel``: this process's place among the ranks of an
        engine, all of which are driven alike."""
        spec = RankSpec(config, 0, 1, "", "", "")
        self._refused: list[Failed] = []
        try:
            self._parts: EngineParts = build_parts(spec, parallel or join_groups(spec), self._take, progress)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"The GPU has too little free memory: {error}") from None
        self._watched = _WatchedExecutor(cast(Executor, self._parts.executor))
        parts = dataclasses.replace(self._parts, executor=cast(Executor, self._watched))
        self._scheduler = cast(UnifiedScheduler, unified_scheduler(parts))
        self._count = 0

    @property
    def device(self) -> torch.device:
        return self._parts.runner.device

    @property
    def dtype(self) -> str:
        return self._parts.runner.layout.dtype

    @property
    def prompt_graphs(self) -> Recorded | None:
        """What is replayed of prompts' steps."""
        return self._parts.runner.prompts.chosen

    @property
    def asynchronous(self) -> bool:
        """Whether the host works while the device does."""
        return self._parts.executor.asynchronous

    @property
    def waited(self) -> float:
        """Seconds that the host has waited for the device's results."""
        return self._watched.waited

    def start(self, batch: int, input_len: int, output_len: int) -> None:
        """So many requests, with prompts that no cache has. Raises ConfigError where the engine has no room for one."""
        vocab = self._parts.runner.spec.vocab_size
        sampling = SamplingParams(temperature=0.0, max_new_tokens=output_len, ignore_eos=True)
        for _ in range(batch):
            self._count += 1
            ids = random.Random(self._count).choices(range(vocab), k=input_len)
            req = self._parts.ledger.accept(Generate(f"bench-{self._count}", ids, sampling), time.monotonic())
            if req is None:
                raise ConfigError(f"{input_len} + {output_len} tokens cannot be run: {self._refused[-1].message}")
            self._scheduler.add(req)

    @property
    def prefilling(self) -> bool:
        """Whether some prompt is not computed yet."""
        return self._scheduler.num_waiting > 0 or bool(self._scheduler.batcher.prefilling)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return self._scheduler.idle

    @property
    def num_decoding(self) -> int:
        return len(self._scheduler.batcher.running)

    def step(self) -> bool:
        """One turn of a server's loop; False where there was nothing to do."""
        busy = self._scheduler.step(time.monotonic())
        self._parts.ledger.flush()
        return busy

    def finish(self) -> None:
        """Run until no request is left, and forget their pages."""
        while self.step():
            pass
        assert self._scheduler.idle and not self._parts.ledger.live
        self._parts.batcher.cache.flush()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self._scheduler.close()
        self._parts.parallel.close()

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Failed):
            self._refused.append(message)


class _WatchedExecutor:
    """An Executor; ``waited``: seconds that its steps' results were waited for."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self.waited = 0.0

    def launch(self, *args: Any, **options: Any) -> Any:
        step = self._executor.launch(*args, **options)
        return dataclasses.replace(step, sampled=cast(Any, _WatchedTokens(step.sampled, self)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class _WatchedTokens:
    """A step's ``Launched``, which is timed while it waits."""

    def __init__(self, launched: Any, watch: _WatchedExecutor):
        self._launched = launched
        self._watch = watch

    def wait(self) -> Any:
        return self._timed(self._launched.wait)

    def token_ids(self) -> Any:
        return self._timed(self._launched.token_ids)

    def _timed(self, wait: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        found = wait()
        self._watch.waited += time.perf_counter() - begin
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launched, name)
