"""Expert load: counted, and balanced while serving (EPLB)."""

from __future__ import annotations

import logging

import numpy as np
import torch

from ..config.model import ModelSpec
from ..config.server import ParallelArgs, ServerConfig
from ..distributed.expert_parallel import ExpertParallel
from ..distributed.parallel import Parallel
from ..layers.moe import MoE
from ..layers.moe.eplb_algorithm import imbalance, initial_placement
from ..models.decoder.causal_lm import CausalLM

log = logging.getLogger("baton.engine")

_STEPS_OF_UTILIZATION = 100


def expert_layers(model: CausalLM) -> dict[int, MoE]:
    """Returns the layers whose MLP is a mixture of experts, by their index."""
    return {index: layer.mlp for index, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)}


def connect_experts(config: ServerConfig, spec: ModelSpec, parallel: Parallel, model: CausalLM) -> None:
    """Connects the ranks' all-to-all through symmetric memory, where they use it. A collective of all ranks."""
    all_to_all = parallel.token_exchange.all_to_all
    if all_to_all is None or config.nodes.nnodes > 1 or config.kernels.disable_custom_all_reduce:
        return
    schedule = config.schedule
    prefill_rows, decode_rows = schedule.largest_prefill(spec.context_length), schedule.max_running_requests
    rows = prefill_rows + decode_rows if schedule.enable_mixed_chunk else max(prefill_rows, decode_rows)
    experts = next(iter(expert_layers(model).values())).experts
    all_to_all.connect(rows, spec.hidden_size, experts.spec.top_k, experts.dtype, float8=experts.accepts_float8)


class ExpertCounts:
    """Token counts of a model whose layers count (``ExpertParallel.counts_tokens``). Ranks call ``totals`` together."""

    def __init__(self, model: CausalLM):
        self.layers = expert_layers(model)

    @property
    def share(self) -> ExpertParallel:
        """How the ranks share the experts."""
        return next(iter(self.layers.values())).share

    def totals(self) -> np.ndarray:
        """Returns ``[layers with experts, experts]`` int64: tokens of all ranks since the start, including rows that
        pad a batch. Waits for the device."""
        return self.sum_of_ranks(self.of_rank())

    def of_rank(self) -> torch.Tensor:
        """Returns ``[layers with experts, experts]`` int64, on the device: what this rank has counted."""
        return torch.stack([layer.counts for layer in self.layers.values() if layer.counts is not None])

    def sum_of_ranks(self, counted: torch.Tensor) -> np.ndarray:
        """Returns the ``totals`` of what each rank had ``counted``, which it overwrites."""
        if self.share.uses_all_to_all:  # otherwise every rank has counted all tokens
            self.share.group.all_reduce(counted)
        return counted.cpu().numpy()


class StepCounts:
    """The counts of a rank before each of the last ``size`` steps. Takes ``size`` times the counts of device memory."""

    def __init__(self, counts: ExpertCounts, size: int):
        self._counts = counts
        self._size = size
        self._before: torch.Tensor | None = None
        self._num_steps = 0

    def start(self) -> None:
        """Forgets all steps."""
        if self._before is None:
            now = self._counts.of_rank()
            self._before = now.new_zeros(self._size, *now.shape)
        self._num_steps = 0

    def add(self) -> None:
        """Adds a step, before its forward pass."""
        assert self._before is not None
        self._before[self._num_steps % self._size].copy_(self._counts.of_rank())
        self._num_steps += 1

    def loads(self) -> np.ndarray:
        """Returns ``[steps, layers with experts, experts]`` int64: the tokens of each of the last steps, of all ranks,
        which call it together. Waits for the device."""
        assert self._before is not None
        known = self._before[:self._num_steps]
        if self._num_steps > self._size:
            known = known.roll(-(self._num_steps % self._size), 0)
        counted = torch.cat([known[1:], self._counts.of_rank()[None]]) - known if len(known) else known.clone()
        return self._counts.sum_of_ranks(counted)


class ExpertUtilization:
    """Measures how evenly ranks are used, over every so many steps. Ranks call ``count_step`` together."""

    def __init__(self, counts: ExpertCounts, num_steps: int = _STEPS_OF_UTILIZATION):
        self._counts = counts
        self._interval_steps = num_steps
        self._num_steps = 0
        self._last_totals = counts.totals()
        self.gauges: dict[str, float] = {"expert_utilization": 1.0}

    def count_step(self) -> None:
        """Counts a step, before its forward pass."""
        self._num_steps += 1
        if self._num_steps < self._interval_steps:
            return
        self._num_steps = 0
        totals = self._counts.totals()
        loads, self._last_totals = totals - self._last_totals, totals
        found = [1 / _imbalance(layer, load) for layer, load in zip(self._counts.layers.values(), loads) if load.any()]
        if found:
            self.gauges = {"expert_utilization": float(np.mean(found))}


class ExpertBalancer:
    """Rebalances experts every so many steps, by the tokens of these steps, unless ranks are used well enough already.
    Ranks call ``count_step`` together."""

    def __init__(self, counts: ExpertCounts, args: ParallelArgs):
        self._counts = counts
        self._args = args
        self._num_steps = 0
        self.held = False  # experts stay where they are
        self._last_totals = counts.totals()
        self._steps: StepCounts | None = None
        if args.balances_steps:
            self._steps = StepCounts(counts, args.eplb_steps)
            self._steps.start()
        self._due: list[tuple[MoE, np.ndarray]] = []
        self._num_moved = 0

    def count_step(self) -> None:
        """Counts a step, before its forward pass; moves experts where the interval is over."""
        self._num_steps += 1
        if self.held:
            return
        if self._due:
            self._move_next()
        elif self._num_steps >= self._args.eplb_rebalance_num_iterations:
            self._num_steps = 0
            self._begin()
        if self._steps is not None:
            self._steps.add()

    def _loads(self) -> np.ndarray:
        """Returns the loads ``[steps, layers, experts]`` since the last call, of all steps as one where the algorithm
        does not tell them apart."""
        if self._steps is not None:
            loads = self._steps.loads()
            self._steps.start()
        else:
            totals = self._counts.totals()
            loads = (totals - self._last_totals)[None]
            self._last_totals = totals
        return loads

    def _begin(self) -> None:
        loads = self._loads().swapaxes(0, 1)
        layers = [(layer, load) for layer, load in zip(self._counts.layers.values(), loads) if load.any()]
        factors = [_imbalance(layer, load.sum(0)) for layer, load in layers]
        utilization = float(np.mean([1 / factor for factor in factors])) if factors else 1.0
        if utilization > self._args.eplb_min_rebalancing_utilization_threshold:
            log.info("experts stay: ranks have %.2f of the busiest one's tokens to do in the mean", utilization)
            return
        self._due, self._num_moved = layers, 0
        log.info("experts of %d layers are placed anew: the busiest rank had %.2f times the mean to do", len(layers),
                 np.mean(factors) if factors else 1.0)
        if layers:
            self._move_next()

    def _move_next(self) -> None:
        """Moves the experts of the next layers."""
        count = self._args.eplb_rebalance_layers_per_chunk or len(self._due)
        now, self._due = self._due[:count], self._due[count:]
        self._num_moved += sum(layer.rebalance(load) for layer, load in now)
        log.info("experts moved here: %d; of these layers the busiest rank has %.2f times the mean to do",
                 self._num_moved, np.mean([_imbalance(layer, load.sum(0)) for layer, load in now]))


def _imbalance(layer: MoE, load: np.ndarray) -> float:
    if layer.placement is not None:
        return imbalance(load, layer.placement.physical_to_logical)
    share = layer.share
    return imbalance(load, initial_placement(len(load), share.ep_size, len(load) // share.ep_size))
