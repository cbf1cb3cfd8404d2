"""Which steps of prompts a rank replays as CUDA graphs: chosen at start, recorded then and when memory comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from ...config.model import ModelSpec
from ...config.server import ServerConfig
from ...distributed.parallel import Parallel
from ...forward.forward_batch import ForwardBatch
from ...models.causal_lm import CausalLM
from ...models.piecewise import PiecewiseStep
from ...weights.loader import Progress
from ..dp_sync import DPStepInfo
from .launch_cost import launch_bound, times_of_launching
from .piecewise_graphs import GraphRecorder, PrefillGraphs, Recorded, Recorder, prompt_sizes

log = logging.getLogger("baton.engine")

Begin = Callable[[DPStepInfo], None]


class PrefillGraphSelection:
    """One rank's; all ranks of the engine make the same calls. ``begin`` is told of a turn before it is computed."""

    def __init__(self, model: CausalLM, parallel: Parallel):
        self._model = model
        self._parallel = parallel
        self._device = model.cos_sin.device
        self.chosen: Recorded | None = None
        self.graphs: PrefillGraphs | None = None

    @torch.inference_mode()
    def choose(self, config: ServerConfig, spec: ModelSpec, begin: Begin) -> None:
        """What ``capture`` records, of ranks that may: sizes that the flags name, or at which a step waits for the
        host."""
        sizes = prompt_sizes(config, spec, self._parallel)
        if not sizes:
            return
        if config.kernels.piecewise_cuda_graph_tokens:
            self.chosen = Recorded(sizes, sizes[-1])
            return

        def trial(size: int, work: Callable[[], None]) -> float:
            begin(self._turn_of(size))
            mine = times_of_launching(work, self._device)
            return float(self._parallel.everyone.min_reduce(np.array([1e6 * mine]))[0]) / 1e6

        found = Recorded(*launch_bound(self._model, sizes, trial))
        self.chosen = found if found.sizes else None

    def capture(self, begin: Begin, progress: Progress) -> None:
        """Record what is chosen. Without it a server is slower only: a kind of model that nobody has captured yet runs
        eagerly, and a sentence in the log says so."""
        if self.chosen is None:
            return
        trouble = None
        try:
            self.record(self.chosen, GraphRecorder(self._device), begin, progress)
        except Exception as error:  # torch tells what a capture must not hold by errors of many kinds
            trouble = f"{type(error).__name__}: {error}"
        if not self._parallel.everyone.all_true(trouble is None):
            log.warning("Prompts run without CUDA graphs: %s.", trouble or "another rank cannot capture its pieces")
            self.chosen = self.graphs = None

    @torch.inference_mode()
    def record(self, wanted: Recorded, recorder: Recorder, begin: Begin, progress: Progress) -> None:
        """Steps of prompts replay what is recorded, from now on."""
        self.graphs = PrefillGraphs(
            self._model, wanted, self._parallel.dp_size, self._parallel.experts.padded, recorder,
            lambda size: begin(self._turn_of(size)), lambda share: progress("CUDA graphs of prompts", share))

    def release(self) -> None:
        """The graphs, which hold addresses."""
        self.graphs = None

    def pieces(self, batch: ForwardBatch, turn: DPStepInfo) -> PiecewiseStep | None:
        """What is recorded of this rank's ``batch`` in a ``turn``, which tells of several attention groups alone; all
        ranks decide alike."""
        together = self._parallel.dp_size > 1
        if self.graphs is None or (turn.steady if together else batch.is_decode):
            return None
        tokens = turn.tokens if together else [batch.num_tokens]
        size = self.graphs.size_for(tokens)
        return None if size is None else self.graphs.step(size, tokens, batch.num_tokens)

    def _turn_of(self, size: int) -> DPStepInfo:
        """So many tokens of every attention group."""
        return DPStepInfo([size] * self._parallel.dp_size, [1] * self._parallel.dp_size)
