"""The draft sampler: samples drafts with the noise by which the model's own tokens will be sampled.

Where the draft's distribution q were the model's p, draft and sample would be equal; with a total variation distance d
between the two they are with probability (1 - d) / (1 + d) at least, whatever vocabulary the draft has (Daliri, Musco
and Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ...kernels._triton import runs_triton
from ...kernels.sampling import sample as kernel
from ..api.sampling import SamplingParams
from ..distributed.tp import TPGroup
from ..forward.host_copies import upload_joined
from .gumbel_noise import MIN_NOISE, seeded_exponential
from .torch_sampling import mask_excess


class CoupledDraftSampler:
    """Samples drafts for the requests of one step. Under tensor parallelism rank 0 samples, and the others receive its
    tokens.

    A draft's score is its log-probability by temperature and truncation plus its Gumbel noise; a greedy request's has
    no noise. The model samples the token that has the best score by its own probabilities.
    """

    def __init__(self, params: Sequence[SamplingParams], tp: TPGroup | None = None):
        """``params``: of the step's requests; those that sample have a seed."""
        self._tp = tp or TPGroup()
        self._truncates = any((p.top_k > 0 or p.top_p < 1) and not p.greedy for p in params)
        self._table = params_table(params)

    def sample(self, logits: torch.Tensor, requests: Sequence[int], positions: Sequence[int], count: int = 1,
               token_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ``count`` best tokens [n, count] int64 of ``logits`` [n, V] of 16 or 32 bits, all different, and
        the log-probabilities [n, count] float32 that the model samples them.

        ``requests`` [n]: their index in the step; ``positions`` [n]: how many tokens precede the sampled ones.
        ``token_ids`` [V] int64: the vocabulary's id of each column, for a reduced draft vocabulary. The probabilities
        are a softmax of the scores: for greedy requests the draft's own, for others once the noise is known.
        """
        packed = torch.empty((2, len(requests), count), dtype=torch.int64, device=logits.device)
        if self._tp.rank == 0:
            scores = self._scores(logits, requests, positions, token_ids)
            best, columns = scores.topk(count, dim=-1) if count > 1 else scores.max(-1, keepdim=True)
            packed[0] = columns if token_ids is None else token_ids[columns]
            packed[1] = (best - scores.logsumexp(-1, keepdim=True)).double().view(torch.int64)
        tokens, logprobs = self._tp.broadcast(packed)
        return tokens, logprobs.view(torch.float64).float()

    def _scores(self, logits: torch.Tensor, requests: Sequence[int], positions: Sequence[int],
                token_ids: torch.Tensor | None) -> torch.Tensor:
        table = self._table[:, np.asarray(requests)]
        table[0] = np.arange(len(requests))
        table[2] = positions
        params = upload_joined([table.ravel()], torch.int64, logits.device).view(table.shape)
        if runs_triton(logits):
            return kernel.perturb(logits, logits.amax(-1).float(), params, self._truncates, token_ids)
        return perturbed(logits, params, self._truncates, token_ids)


def perturbed(logits: torch.Tensor, params: torch.Tensor, truncates: bool,
              token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Computes what ``kernels.sampling.sample.perturb`` does, of all rows of ``logits`` [n, vocab], in torch."""
    _, seeds, positions, top_k = params[:kernel.INTS]
    temperature, top_p, log_min_p = params[kernel.INTS:].view(torch.float64).float()[:, :, None]
    vocab_size = logits.shape[-1]
    logits = logits.float()
    samples = temperature > 0
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(samples, temperature, 1.0)
    if truncates:
        scaled = mask_excess(scaled, torch.where(top_k > 0, top_k, vocab_size)[:, None], top_p)
    scaled.masked_fill_(scaled < log_min_p, float("-inf"))
    noise = seeded_exponential(seeds, positions, vocab_size, token_ids).clamp_(min=MIN_NOISE)
    return torch.where(samples, scaled - noise.log(), scaled)


def params_table(params: Sequence[SamplingParams]) -> np.ndarray:
    """The parameters in the layout of ``kernels.sampling.sample``; greedy ones truncate nothing, at temperature 0."""
    table = np.zeros((kernel.INTS + kernel.FLOATS, len(params)), np.int64)
    floats = table[kernel.INTS:].view(np.float64)
    floats[1:] = [[1.0], [-math.inf]]
    for column, one in enumerate(params):
        if not one.greedy:
            table[1, column] = one.seed or 0
            table[3, column] = min(max(one.top_k, 0), 2**31 - 1)
            floats[:, column] = (max(one.temperature, 1e-30), one.top_p,
                                 math.log(one.min_p) if one.min_p > 0 else -math.inf)
    return table
