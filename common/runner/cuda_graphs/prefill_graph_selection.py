"""Selects the prefill steps that a rank replays as piecewise CUDA graphs: sizes are selected at start, and captured
then and when memory is resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ...config.model import ModelSpec
from ...config.server import ServerConfig
from ...distributed.parallel import Parallel
from ...distributed.step_rows import StepRows
from ...forward.forward_batch import ForwardBatch
from ...forward.piecewise import PiecewiseStep
from ...models.decoder.causal_lm import CausalLM
from ...weights.loader import Progress
from ..dp_sync import DPStepInfo
from .launch_cost import launch_bound_sizes, launch_ratio
from .piecewise_graphs import GraphRecorder, GraphSizes, PrefillGraphs, Recorder, prefill_graph_sizes
from .try_capture import try_capture


class PrefillGraphSelection:
    """One rank's selection; all ranks of the engine make the same calls."""

    def __init__(self, model: CausalLM, parallel: Parallel):
        self._model = model
        self._parallel = parallel
        self._device = model.device
        self.selected: GraphSizes | None = None
        self.graphs: PrefillGraphs | None = None

    @torch.inference_mode()
    def select(self, config: ServerConfig, spec: ModelSpec) -> None:
        """Selects the sizes that ``capture`` records, on ranks that may: those of the flags, or those at which a step
        is launch-bound."""
        sizes = prefill_graph_sizes(config, spec, self._parallel)
        if not sizes or not self._model.layers:
            return
        if config.kernels.piecewise_cuda_graph_tokens:
            self.selected = GraphSizes(sizes, sizes[-1])
            return

        def trial(size: int, work: Callable[[StepRows], None]) -> float:
            ratio = launch_ratio(partial(work, self._rows_of(size)), self._device)
            return float(self._parallel.world.min_reduce(np.array([1e6 * ratio]))[0]) / 1e6

        selected = GraphSizes(*launch_bound_sizes(self._model, sizes, trial))
        self.selected = selected if selected.sizes else None

    def capture(self, progress: Progress) -> None:
        """Captures what is selected. Without graphs a server is only slower: a kind of model that cannot be captured
        runs eagerly, and a warning says so."""
        selected = self.selected
        if selected is None:
            return
        if not try_capture(lambda: self.record(selected, GraphRecorder(self._device), progress), self._parallel,
                           "Prompts", "its pieces"):
            self.selected = self.graphs = None

    @torch.inference_mode()
    def record(self, selected: GraphSizes, recorder: Recorder, progress: Progress) -> None:
        """Records graphs, which prefill steps replay from now on."""
        self.graphs = PrefillGraphs(
            self._model, selected, self._parallel.dp_size, recorder, self._rows_of,
            lambda fraction: progress("CUDA graphs of prompts", fraction))

    def release(self) -> None:
        """Drops the graphs, which contain addresses."""
        self.graphs = None

    def step_for(self, batch: ForwardBatch, info: DPStepInfo) -> PiecewiseStep | None:
        """Returns the graphs for this rank's ``batch``, None where it runs without; all ranks decide alike. ``info``
        describes the step of several attention groups, and is not read with one."""
        spans_dp = self._parallel.dp_size > 1
        if self.graphs is None or (info.all_decode if spans_dp else batch.is_decode):
            return None
        num_tokens = info.num_tokens if spans_dp else [batch.num_tokens]
        size = self.graphs.size_for(num_tokens)
        return None if size is None else self.graphs.step(size, num_tokens, batch.num_tokens)

    def _rows_of(self, size: int) -> StepRows:
        """Returns the rows of a prefill step with ``size`` tokens of every attention group."""
        return self._parallel.token_exchange.step([size] * self._parallel.dp_size)
