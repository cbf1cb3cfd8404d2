"""Samples the drafts of chain steps as the draft sampler does, by tables that stay where they are on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels._triton import runs_triton
from ...kernels.sampling import sample as kernel
from ...kernels.sampling.argmax import argmax
from ..api.sampling import SamplingParams
from ..forward.host_copies import upload_joined
from ..speculative.base import ChainSampler
from .draft_sampler import params_table, perturbed


class ChainDraftSampling:
    """The samplers of drafts of captured steps, which read the parameters of the last ``update``. Under tensor
    parallelism each rank samples for itself: all have the same logits, bit by bit."""

    def __init__(self, max_requests: int, device: torch.device):
        table = params_table([SamplingParams(temperature=0.0)] * max_requests)
        table[0] = range(max_requests)
        self._table = torch.from_numpy(table).to(device)
        self._params: list[SamplingParams] = []

    @torch.inference_mode()
    def update(self, params: Sequence[SamplingParams]) -> None:
        """Takes the ``params`` of a step's requests; those that sample have a seed. Waits for nothing."""
        if params == self._params:  # identity is compared first: an unchanged batch costs microseconds
            return
        table = params_table(params)
        self._table[1:, :len(params)] = upload_joined([table[1:].ravel()], torch.int64,
                                                      self._table.device).view(-1, len(params))
        self._params = list(params)

    def __call__(self, size: int, greedy: bool) -> ChainSampler:
        """Returns the sampler of steps of ``size`` requests; ``greedy``: all of them are."""
        return best_token if greedy else PerturbedTokens(self._table[:, :size])


def best_token(logits: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None,
               token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The ChainSampler of greedy requests."""
    return argmax(logits, out, token_ids)[1]


class PerturbedTokens:
    """The ChainSampler of requests of which some may be sampled, with parameters ``table`` [7, B]; see
    ``kernels.sampling.sample``."""

    def __init__(self, table: torch.Tensor):
        self._table = table

    def __call__(self, logits: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None,
                 token_ids: torch.Tensor | None = None) -> torch.Tensor:
        if runs_triton(logits):
            return kernel.best_perturbed(logits, argmax(logits)[0], self._table, positions, out, token_ids)
        table = torch.cat([self._table[:2], positions[None], self._table[3:]])
        return argmax(perturbed(logits, table, True, token_ids), out, token_ids)[1]
