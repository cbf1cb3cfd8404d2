"""How tokens are spread over a mixture's experts: counted, recorded on request, and evened out while serving."""

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
from ..layers.moe.eplb_algorithm import unevenness
from ..models.causal_lm import CausalLM

log = logging.getLogger("baton.engine")


def expert_layers(model: CausalLM) -> dict[int, MoE]:
    """The layers whose MLP is a mixture of experts, by their index."""
    return {index: layer.mlp for index, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)}


def connect_experts(config: ServerConfig, spec: ModelSpec, parallel: Parallel, model: CausalLM) -> None:
    """Give the ranks what tokens are sent by, where it is through each other's memory. A collective of all ranks."""
    sent = parallel.tokens.sent
    if sent is None or config.nodes.nnodes > 1 or config.kernels.disable_custom_all_reduce:
        return
    schedule = config.schedule
    prompts, decodes = schedule.largest_prefill(spec.context_length), schedule.max_running_requests
    rows = prompts + decodes if schedule.enable_mixed_chunk else max(prompts, decodes)
    experts = next(iter(expert_layers(model).values())).experts
    sent.connect(rows, spec.hidden_size, experts.spec.top_k, experts.dtype, float8=experts.takes_float8)


class ExpertCounts:
    """Of a model whose layers count (``ExpertShare.counted``). Ranks call ``totals`` together."""

    def __init__(self, model: CausalLM):
        self.layers = expert_layers(model)

    def totals(self) -> np.ndarray:
        """``[layers with experts, experts]`` int64: tokens since the start, of all ranks, and rows that pad a batch.
        Waits for the device."""
        counts = []
        for layer in self.layers.values():
            assert layer.counts is not None
            counts.append(layer.counts)
        joined = torch.stack(counts)
        share = next(iter(self.layers.values())).share
        if share.spreads:  # else every rank has seen all tokens
            share.group.all_reduce(joined)
        return joined.cpu().numpy()


class ExpertRecord:
    """What ``start`` to ``stop`` were computed, for the endpoints of that name. Ranks call each together."""

    def __init__(self, counts: ExpertCounts | None):
        """``counts``: None where the layers do not count."""
        self._counts = counts
        self._begin: np.ndarray | None = None
        self._recorded: np.ndarray | None = None

    def start(self) -> str:
        self._begin, self._recorded = self._totals(), None
        return "Recording the tokens of every expert."

    def stop(self) -> str:
        """Raises InvalidRequest where nothing was started."""
        totals = self._totals()
        if self._begin is None:
            raise InvalidRequest("Nothing is being recorded; call /start_expert_distribution_record first.")
        self._recorded, self._begin = totals - self._begin, None
        return f"Recorded {int(self._recorded.sum())} choices of experts."

    def dump(self, folder: str, *, write: bool) -> str:
        """What was recorded last, as JSON into ``folder``, by the rank that is to ``write``."""
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
    """Moves experts after every ``every`` steps, by the tokens of those steps. Ranks call ``turn`` together."""

    def __init__(self, counts: ExpertCounts, every: int):
        self._counts = counts
        self._every = every
        self._turns = 0
        self._seen = counts.totals()

    def turn(self) -> None:
        """Once a step, before its forward pass."""
        self._turns += 1
        if self._turns < self._every:
            return
        self._turns = 0
        totals = self._counts.totals()
        loads, self._seen = totals - self._seen, totals
        layers = self._counts.layers.values()
        before = np.mean([_uneven(layer, load) for layer, load in zip(layers, loads)])
        moved = sum(layer.rebalance(load) for layer, load in zip(layers, loads) if load.any())
        after = np.mean([_uneven(layer, load) for layer, load in zip(layers, loads)])
        log.info("experts moved here: %d; the busiest rank had %.2f times the mean to do, and has %.2f", moved, before,
                 after)


def _uneven(layer: MoE, load: np.ndarray) -> float:
    assert layer.placement is not None
    return unevenness(load, layer.placement.residents)
