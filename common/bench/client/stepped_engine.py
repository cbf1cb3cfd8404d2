"""A server's engine in this process, without API server: the caller runs and times each step."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch

from ...api.errors import ConfigError
from ...api.messages import Failed, FromEngine, Generate, OutputBatch
from ...api.sampling import SamplingParams
from ...attention.select import choose_backend
from ...config.server import ServerConfig
from ...distributed.parallel import Parallel
from ...engine.rank import EngineParts, build_parts, device_of, join_groups, unified_scheduler
from ...engine.rank_spec import RankSpec
from ...engine.unified_scheduler import UnifiedScheduler
from ...execution.executor import Executor
from ...models.registry import load_model_spec
from ...runner.cuda_graphs.piecewise_graphs import GraphSizes
from ...runner.kv_sizing import resolve_dtype
from ..report.draft_figures import DraftFigures
from .draft_timer import DraftTimer
from .timed_executor import TimedExecutor


def _compiled_first(spec: RankSpec) -> RankSpec:
    """Names the attention backend that ``auto`` is: else a server computes prompts by other kernels while those of the
    backend are compiled."""
    config, model, device = spec.config, load_model_spec(spec.config.model), device_of(spec)
    if config.kernels.attention_backend != "auto" or device.type == "cpu" or model.mla or model.encoder:
        return spec
    name = choose_backend("auto", device, resolve_dtype(config, model, device), model.head_dim, model.scores.softcap)
    kernels = dataclasses.replace(config.kernels, attention_backend=name)
    return dataclasses.replace(spec, config=dataclasses.replace(config, kernels=kernels))


class SteppedEngine:
    """Steps run as in a server: the same scheduler, overlap, CUDA graphs, sampler and number of threads."""

    def __init__(self, config: ServerConfig, parallel: Parallel | None = None,
                 progress: Callable[[str, float], None] = lambda stage, share: None):
        """Loads the weights and warms up; all kernels are compiled then. Raises ConfigError. ``parallel``: this rank's
        groups, where several processes step one engine alike."""
        spec = _compiled_first(RankSpec(config, 0, 1, "", "", ""))
        self._refused: list[Failed] = []
        self._answers: dict[str, list[int]] | None = None  # of ``complete``
        try:
            self._parts: EngineParts = build_parts(spec, parallel or join_groups(spec), self._take, progress)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"The GPU has too little free memory: {error}") from None
        self._timed_executor = TimedExecutor(cast(Executor, self._parts.executor))
        parts = dataclasses.replace(self._parts, executor=cast(Executor, self._timed_executor))
        self._scheduler = cast(UnifiedScheduler, unified_scheduler(parts))
        self._count = 0

    @property
    def device(self) -> torch.device:
        return self._parts.runner.device

    @property
    def rank(self) -> int:
        return self._parts.parallel.world.rank

    @property
    def dtype(self) -> str:
        return self._parts.runner.layout.dtype

    @property
    def prompt_graphs(self) -> GraphSizes | None:
        """The piecewise CUDA graphs of prefill steps; None without."""
        return self._parts.runner.prefill_graphs.selected

    @property
    def asynchronous(self) -> bool:
        """True where the host works while the device computes."""
        return self._parts.executor.asynchronous

    @property
    def waited(self) -> float:
        """Seconds that the host has waited for the device's results."""
        return self._timed_executor.waited

    def start(self, batch: int, input_len: int, output_len: int) -> None:
        """Add ``batch`` requests, with prompts that no cache has. Raises ConfigError where one does not fit."""
        vocab = self._parts.runner.spec.vocab_size
        for _ in range(batch):
            self._add(random.Random(self._count + 1).choices(range(vocab), k=input_len), output_len)

    def _add(self, ids: list[int], output_len: int) -> str:
        """Returns the request's id."""
        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_new_tokens=output_len, ignore_eos=True)
        rid = f"bench-{self._count}"
        req = self._parts.tracker.accept(Generate(rid, ids, sampling), time.monotonic())
        if req is None:
            raise ConfigError(f"{len(ids)} + {output_len} tokens cannot be run: {self._refused[-1].message}")
        self._scheduler.add(req)
        return rid

    def complete(self, prompts: Sequence[list[int]], output_len: int) -> list[list[int]]:
        """The token ids of greedy answers to prompts that run together. Raises ConfigError where one does not fit."""
        made = self._answers = {self._add(ids, output_len): list[int]() for ids in prompts}
        self.finish()
        self._answers = None
        return list(made.values())

    @property
    def prefilling(self) -> bool:
        """True while a prompt is not computed completely."""
        return self._scheduler.num_waiting > 0 or bool(self._scheduler.batcher.prefilling)

    @property
    def idle(self) -> bool:
        """True once all requests have ended."""
        return self._scheduler.idle

    @property
    def num_decoding(self) -> int:
        return len(self._scheduler.batcher.running)

    def step(self) -> bool:
        """One iteration of the engine loop; False where there was nothing to do."""
        busy = self._scheduler.step(time.monotonic())
        self._parts.tracker.flush()
        return busy

    def finish(self) -> None:
        """Run until all requests have ended, then flush the prefix cache."""
        while self.step():
            pass
        assert self._scheduler.idle and not self._parts.tracker.live
        self._parts.batcher.cache.flush()

    @property
    def drafted(self) -> DraftFigures | None:
        """The drafts of all steps so far; None without any."""
        drafting = self._scheduler.batcher.drafting
        if drafting is None:
            return None
        stats = drafting.stats
        return DraftFigures(stats.num_verified + stats.num_accepted, stats.num_verified, stats.num_drafted,
                            stats.num_accepted, stats.histogram,
                            self._parts.config.speculative.simulated_acceptance is not None)

    @property
    def num_generated(self) -> int:
        """Output tokens so far."""
        return int(self._parts.tracker.counters["generation_tokens"])

    @contextlib.contextmanager
    def draft_times(self) -> Iterator[DraftTimer]:
        """Times the parts of the steps with drafts that run while it is open."""
        timer = DraftTimer(self.synchronize)
        with timer.timing(self._parts.runner, self._timed_executor, self._scheduler.batcher.drafting):
            yield timer

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
        elif isinstance(message, OutputBatch) and self._answers is not None:
            for row in message.rows():
                self._answers[row.rid] += row.token_ids
