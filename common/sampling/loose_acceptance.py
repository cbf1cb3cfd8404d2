"""Loose acceptance: takes drafts that are likely enough in place of the tokens that were sampled. It is not lossless.

The rules are those of SGLang's ``--speculative-accept-threshold-single`` and ``-acc``: a draft is accepted where the
model gives it at least the first probability; and of the drafts after one token, some one is accepted with their joint
probability divided by the second, 1 at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from msgspec.structs import replace

from ...kernels.arguments import PlacedChains
from ..api.drafts import Drafts
from ..forward.host_copies import upload
from ..request.sampling_metadata import SamplingMetadata
from .gumbel_noise import seeded_exponential
from .sampling_backend import SamplingKernels
from .torch_sampling import TorchSampling


class LooseSampling:
    """Samples by ``kernels``, then takes drafts of the rows that have some, by thresholds ``single`` and ``acc``.
    Greedy rows keep their samples.

    A row whose sample is one of its drafts keeps it, so that thresholds of 1 change nothing. Random numbers are hashes
    of the row's seed and position.
    """

    def __init__(self, kernels: SamplingKernels, reference: TorchSampling, single: float, acc: float):
        self._kernels = kernels
        self._reference = reference
        self._single = single
        self._acc = acc

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata],
                 positions: torch.Tensor | None = None, drafts: torch.Tensor | None = None) -> torch.Tensor:
        """Does as ``kernels``; ``drafts`` [R] int64 on the device, -1 in rows without, are the rows' where given."""
        tokens = self._kernels(logits, rows, positions)
        drafted = [row for row, metadata in enumerate(rows)
                   if (metadata.drafts or drafts is not None) and not metadata.params.greedy]
        if drafted:
            index, chosen = upload(drafted, torch.int64, logits.device), [rows[row] for row in drafted]
            if positions is None:
                positions = upload([row.position for row in rows], torch.int64, logits.device)
            own = _uploaded_drafts(chosen, logits.device) if drafts is None else drafts[index, None]
            probabilities = self._reference.probabilities(logits[index].float(), [row.params for row in chosen])
            coin = self._uniform(chosen, positions[index], probabilities.shape[-1])
            tokens[index] = self._loosened(probabilities, tokens[index], own, coin)
        return tokens

    def _loosened(self, probabilities: torch.Tensor, tokens: torch.Tensor, drafts: torch.Tensor,
                  coin: torch.Tensor) -> torch.Tensor:
        """Returns ``tokens`` [n], or some of ``drafts`` [n, m] in place of them, by ``coin`` [n]; ``probabilities``
        [n, vocab] are the model's."""
        width = drafts.shape[1]
        p = torch.where(drafts >= 0, probabilities.gather(-1, drafts.clamp(min=0)), 0.0)
        likely = (p >= self._single) & (drafts >= 0)
        first = drafts.gather(-1, likely.int().argmax(-1, keepdim=True))[:, 0]
        sums = p.cumsum(-1)
        total = sums[:, -1].clamp(max=1.0)
        # The sample is none of the drafts with probability 1 - total: so often, this share of them takes one.
        share = ((total / self._acc).clamp(max=1.0) - total) / (1 - total).clamp(min=1e-9)
        by_chance = drafts.gather(-1, (sums <= (coin / share.clamp(min=1e-9) * total)[:, None]).sum(-1, keepdim=True)
                                  .clamp(max=width - 1))[:, 0]
        loose = torch.where(likely.any(-1), first, torch.where(coin < share, by_chance, tokens))
        return torch.where((drafts == tokens[:, None]).any(-1), tokens, loose)

    def _uniform(self, rows: Sequence[SamplingMetadata], positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Returns a number in (0, 1) for each row: the hash of an id that no token has."""
        seeds = upload([row.params.seed or 0 for row in rows], torch.int64, positions.device)
        beyond = upload([vocab_size], torch.int64, positions.device)
        return seeded_exponential(seeds, positions, 1, beyond)[:, 0].neg().exp()


def _uploaded_drafts(rows: Sequence[SamplingMetadata], device: torch.device) -> torch.Tensor:
    """Returns the drafts [n, m] int64 after each row, -1 where one has fewer."""
    width = max(len(row.drafts) for row in rows)
    return upload([[*row.drafts, *[-1] * (width - len(row.drafts))] for row in rows], torch.int64, device)


def drafts_in_chains(placed: PlacedChains, num_reqs: int) -> torch.Tensor:
    """Returns the draft [rows] int64 after each row of the first requests of a step of chains; -1 where none follows.
    """
    ids, valid = (column[:num_reqs] for column in (placed.rows.input_ids.view(len(placed.valid), -1), placed.valid))
    columns = torch.arange(1, ids.shape[1], device=ids.device)
    drafts = torch.full_like(ids, -1)
    drafts[:, :-1] = torch.where(columns < valid[:, None], ids[:, 1:], -1)
    return drafts.flatten()


def drafts_after(metadata: Sequence[SamplingMetadata], sizes: Sequence[int],
                 drafts: Mapping[int, Drafts]) -> list[SamplingMetadata]:
    """Returns ``metadata`` with the drafts after each row; ``sizes[b]`` rows are request b's."""
    found = list(metadata)
    begins = [0, *accumulate(sizes)]
    for request, drafted in drafts.items():
        children: dict[int, list[int]] = {}
        for token, parent in zip(drafted.tokens, drafted.parents or range(-1, len(drafted) - 1)):
            children.setdefault(begins[request] + 1 + parent, []).append(token)
        for row, tokens in children.items():
            found[row] = replace(found[row], drafts=tuple(tokens))
    return found
