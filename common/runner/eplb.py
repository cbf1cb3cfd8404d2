"""Expert load: counted, recorded on request, and balanced while serving (EPLB)."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import numpy as np
import torch

from ..api.errors import InvalidRequest
from ..config.model import ModelSpec
from ..config.server import ServerConfig
from ..distributed.parallel import Parallel
from ..layers.moe import MoE
from ..layers.moe.eplb_algorithm import imbalance
from ..models.decoder.causal_lm import CausalLM

log = logging.getLogger("baton.engine")


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

    def totals(self) -> np.ndarray:
        """Returns ``[layers with experts, experts]`` int64: tokens of all ranks since the start, including rows that
        pad a batch. Waits for the device."""
        counts = []
        for layer in self.layers.values():
            assert layer.counts is not None
            counts.append(layer.counts)
        joined = torch.stack(counts)
        share = next(iter(self.layers.values())).share
        if share.uses_all_to_all:  # otherwise every rank has counted all tokens
            share.group.all_reduce(joined)
        return joined.cpu().numpy()


class ExpertRecord:
    """The expert distribution between ``start`` and ``stop``, for the endpoints of these names. Ranks call each method
    together."""

    def __init__(self, counts: ExpertCounts | None):
        """``counts``: None where the layers do not count."""
        self._counts = counts
        self._begin: np.ndarray | None = None
        self._recorded: np.ndarray | None = None

    def start(self) -> str:
        self._begin, self._recorded = self._totals(), None
        return "Recording the tokens of every expert."

    def stop(self) -> str:
        """Ends the recording; raises InvalidRequest where none was started."""
        totals = self._totals()
        if self._begin is None:
            raise InvalidRequest("Nothing is being recorded; call /start_expert_distribution_record first.")
        self._recorded, self._begin = totals - self._begin, None
        return f"Recorded {int(self._recorded.sum())} choices of experts."

    def dump(self, folder: str, *, write: bool) -> str:
        """Writes the last recording as JSON into ``folder``, on the rank with ``write``; returns the file's path."""
        totals = self._totals()
        if self._begin is None and self._recorded is None:
            raise InvalidRequest("Nothing was recorded; call /start_expert_distribution_record first.")
        recorded = self._recorded if self._begin is None else totals - self._begin
        assert recorded is not None and self._counts is not None
        file = Path(folder).expanduser() / f"expert_distribution_{time.time_ns()}.json"
        if write:
            content = {"layers": list(self._counts.layers), "logical_count": recorded.tolist()}
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(content) + "\n", encoding="utf-8")
            except OSError as error:
                raise InvalidRequest(f"Cannot write {file}: {error.strerror}.", param="output_dir") from None
        return str(file)

    def _totals(self) -> np.ndarray:
        if self._counts is None:
            raise InvalidRequest("The experts' tokens are not counted: start the server with "
                                 "--expert-distribution-recorder-mode stat.")
        return self._counts.totals()


class ExpertBalancer:
    """Rebalances experts every ``interval_steps`` steps, by the tokens of those steps. Ranks call ``count_step``
    together."""

    def __init__(self, counts: ExpertCounts, interval_steps: int):
        self._counts = counts
        self._interval_steps = interval_steps
        self._num_steps = 0
        self.held = False  # experts stay where they are
        self._last_totals = counts.totals()

    def count_step(self) -> None:
        """Counts a step, before its forward pass; moves experts where the interval is over."""
        self._num_steps += 1
        if self._num_steps < self._interval_steps or self.held:
            return
        self._num_steps = 0
        totals = self._counts.totals()
        loads, self._last_totals = totals - self._last_totals, totals
        layers = self._counts.layers.values()
        before = np.mean([_imbalance(layer, load) for layer, load in zip(layers, loads)])
        moved = sum(layer.rebalance(load) for layer, load in zip(layers, loads) if load.any())
        after = np.mean([_imbalance(layer, load) for layer, load in zip(layers, loads)])
        log.info("experts moved here: %d; the busiest rank had %.2f times the mean to do, and has %.2f", moved, before,
                 after)


def _imbalance(layer: MoE, load: np.ndarray) -> float:
    assert layer.placement is not None
    return imbalance(load, layer.placement.physical_to_logical)
