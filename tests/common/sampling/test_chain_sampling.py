"""Sampling of chain steps, whose positions and drafts are on the device: samples are those of other steps."""

from __future__ import annotations

import pytest
import torch

from baton.common.api.drafts import Drafts
from baton.common.api.sampling import SamplingParams
from baton.common.request.sampling_metadata import SamplingMetadata
from baton.common.sampling.chain_draft_sampling import ChainDraftSampling
from baton.common.sampling.draft_sampler import CoupledDraftSampler
from baton.common.sampling.loose_acceptance import drafts_after, drafts_in_chains
from baton.common.sampling.sampler import Sampler
from baton.common.sampling.torch_sampling import TorchSampling
from baton.kernels.arguments import ChainPages, PlacedChains
from baton.kernels.reference.speculative import place_rows

VOCAB, WIDTH, CPU = 90, 4, torch.device("cpu")
PARAMS = [SamplingParams(**options, seed=seed) for seed, options in enumerate([
    {}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 1},
    {"temperature": 1e-5}, {"temperature": 1.3, "top_k": 40, "top_p": 0.7, "min_p": 0.01}, {"top_k": 10**12}] * 3)]
STARTS = [3 + 5 * i for i in range(len(PARAMS))]
VALID = [i % (WIDTH + 1) for i in range(len(PARAMS))]


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def placed_rows(padding: int = 2) -> PlacedChains:
    """The rows of PARAMS, and of requests that pad the step. Drafts are the second best tokens."""
    count = len(PARAMS) + padding
    pages = ChainPages(torch.arange(count + 1, dtype=torch.int32), torch.arange(count, dtype=torch.int32), 256, 0, 256)
    starts = torch.tensor([*STARTS, *[0] * padding])
    tokens = torch.zeros(count, WIDTH, dtype=torch.int64)
    tokens[:len(PARAMS), 1:] = logits_of(len(PARAMS) * WIDTH).topk(2)[1][:, 1].view(-1, WIDTH)[:, :-1]
    return PlacedChains(place_rows(starts, tokens, pages), torch.tensor([*VALID, *[0] * padding]),
                        (starts[:, None] + torch.arange(WIDTH) + 1).flatten())


def known_rows(placed: PlacedChains) -> list[SamplingMetadata]:
    """The same rows as the host would have them, with the drafts after each."""
    tokens = placed.rows.input_ids.view(-1, WIDTH).tolist()
    drafts = {i: Drafts(tuple(tokens[i][1:valid])) for i, valid in enumerate(VALID) if valid > 1}
    rows = [SamplingMetadata(one, start + 1 + row) for one, start in zip(PARAMS, STARTS) for row in range(WIDTH)]
    return drafts_after(rows, [WIDTH] * len(PARAMS), drafts)


def test_the_torch_backend_takes_positions_on_the_device():
    rows, logits = known_rows(placed_rows()), logits_of(len(PARAMS) * WIDTH)
    positions = torch.tensor([row.position for row in rows])
    later = [SamplingMetadata(row.params, 0) for row in rows]
    sampling = TorchSampling(VOCAB, CPU, 0)
    assert torch.equal(sampling(logits, later, positions), sampling(logits, rows))
    assert not torch.equal(sampling(logits, later), sampling(logits, rows))


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.1, 1.0), (1.0, 0.3), (0.3, 0.5)])
def test_chain_steps_sample_as_others(thresholds):
    """Requests in turn and in other numbers, also where drafts are accepted loosely."""
    placed, sampler = placed_rows(), Sampler(VOCAB, CPU, 0, accept_thresholds=thresholds)
    assert sampler.accepts_loosely == (thresholds != (1.0, 1.0))
    logits, rows = logits_of(len(PARAMS) * WIDTH), known_rows(placed)
    want = torch.tensor(sampler.launch(logits, rows, extra_rows=()).token_ids())
    plain = Sampler(VOCAB, CPU, 0).launch(logits, rows, extra_rows=()).token_ids()
    assert (want.tolist() != plain) == sampler.accepts_loosely
    for count in (len(PARAMS), 5, len(PARAMS)):
        out = torch.zeros(count * WIDTH, dtype=torch.int64)
        sampler.launch_chains(logits[:len(out)], PARAMS[:count], placed, out)
        assert torch.equal(out, want[:len(out)])
    out = torch.zeros(WIDTH, dtype=torch.int64)
    sampler.launch_chains(logits[:WIDTH], PARAMS[2:3], placed, out)  # another request of the same number
    others = [SamplingMetadata(PARAMS[2], row.position, drafts=row.drafts) for row in rows[:WIDTH]]
    assert out.tolist() == sampler.launch(logits[:WIDTH], others, extra_rows=()).token_ids()


def test_drafts_in_chains():
    placed = placed_rows()
    found = drafts_in_chains(placed, len(PARAMS)).tolist()
    assert found == [(*row.drafts, -1)[0] for row in known_rows(placed)]


@pytest.mark.parametrize("mapped", [False, True])
def test_drafts_of_chains_are_those_of_the_draft_sampler(mapped):
    logits = logits_of(len(PARAMS) + 1)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2)) * 2 if mapped else None
    positions = torch.tensor([*STARTS, 0])
    want, _ = CoupledDraftSampler(PARAMS).sample(logits[:-1], range(len(PARAMS)), STARTS, 1, ids)
    sampling = ChainDraftSampling(40, CPU)
    sampling.update(PARAMS[::-1])
    sampling.update(PARAMS)
    drafts = torch.zeros(len(logits), 3, dtype=torch.int64)
    found = sampling(len(logits), False)(logits, positions, drafts[:, 1], ids)
    assert torch.equal(found[:-1], want[:, 0]) and torch.equal(drafts[:, 1], found)
    found = sampling(len(logits), True)(logits, positions, token_ids=ids)
    best = logits.argmax(-1)
    assert torch.equal(found, best if ids is None else ids[best])
