"""The draft sampler: it drafts what the model would sample, from its own distribution."""

from __future__ import annotations

import pytest
import torch

from baton.common.api.sampling import SamplingParams
from baton.common.request.sampling_metadata import SamplingMetadata
from baton.common.sampling.draft_sampler import CoupledDraftSampler
from baton.common.sampling.torch_sampling import TorchSampling
from baton.tests.helpers.chi_square import chi_square_p

VOCAB = 300
PARAMS = [SamplingParams(**options, seed=seed) for seed, options in enumerate([
    {}, {"temperature": 0.3}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 1},
    {"temperature": 0.0}, {"temperature": 1e-5}, {"temperature": 1.3, "top_k": 40, "top_p": 0.7, "min_p": 0.01},
    {"top_k": 10**12}] * 20)]


def logits_of(seed: int, rows: int = len(PARAMS)) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_equal_distributions_give_equal_tokens():
    logits, requests = logits_of(0), list(range(len(PARAMS)))[::-1]
    positions = [9 + request % 7 for request in requests]
    tokens, logprobs = CoupledDraftSampler(PARAMS).sample(logits, requests, positions)
    rows = [SamplingMetadata(PARAMS[request], position) for request, position in zip(requests, positions)]
    assert tokens[:, 0].tolist() == TorchSampling(VOCAB, torch.device("cpu"), 0)(logits, rows).tolist()
    assert tokens.shape == logprobs.shape == (len(PARAMS), 1) and bool((logprobs <= 0).all())


def test_the_best_tokens_of_a_greedy_request_are_the_likeliest():
    logits = logits_of(1, 1)
    tokens, logprobs = CoupledDraftSampler([SamplingParams(temperature=0)]).sample(logits, [0], [3], 4)
    values, ids = logits.log_softmax(-1).topk(4)
    assert torch.equal(tokens, ids) and torch.allclose(logprobs, values)


def test_a_reduced_vocabulary_drafts_by_the_ids_of_its_tokens():
    """The noise is that of the vocabulary's id: logits of -inf for all other tokens draft the same."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:90]
    reduced = logits_of(3)[:, :90]
    whole = torch.full((len(PARAMS), VOCAB), float("-inf"))
    whole[:, ids] = reduced
    sampler, requests = CoupledDraftSampler(PARAMS), range(len(PARAMS))
    tokens, logprobs = sampler.sample(reduced, requests, [5] * len(PARAMS), 3, ids)
    want, want_logprobs = sampler.sample(whole, requests, [5] * len(PARAMS), 3)
    likely = want_logprobs.isfinite()
    assert bool(likely[:, 0].all()) and torch.equal(tokens[likely], want[likely])
    assert torch.allclose(logprobs[likely], want_logprobs[likely], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_several_drafts_are_drawn_without_replacement(temperature):
    """The first has the draft's distribution, and the second the rest of it."""
    draws = 200_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4)) * 1.5
    sampler = CoupledDraftSampler([SamplingParams(temperature=temperature, seed=seed) for seed in range(draws)])
    first, second = sampler.sample(logits.expand(draws, -1), range(draws), [7] * draws, 2)[0].unbind(-1)
    q = (logits.double() / temperature).softmax(-1)
    assert chi_square_p(torch.bincount(first, minlength=12), q) > 1e-3
    pairs = (q[:, None] * q / (1 - q[:, None])).fill_diagonal_(0)
    assert chi_square_p(torch.bincount(first * 12 + second, minlength=144), pairs.flatten()) > 1e-3


def test_the_log_probability_is_the_chance_of_acceptance():
    """A model whose log-probabilities differ from the draft's by Gumbel noise samples draft i as often as stated."""
    draws = 100_000
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(9, generator=generator)
    sampler = CoupledDraftSampler([SamplingParams(seed=1)])
    tokens, logprobs = sampler.sample(logits[None], [0], [4], 9)
    order = tokens[0].argsort()
    scores = logprobs[0][order]  # the scores, up to a constant
    errors = -torch.empty(draws, 9).exponential_(generator=generator).log()
    seen = torch.bincount((scores + errors).argmax(-1), minlength=9)
    assert chi_square_p(seen, scores.double().exp()) > 1e-3


class FirstRank:
    """A group of two whose first rank's broadcast is recorded, and then received by the second."""

    def __init__(self):
        self.rank, self.size, self.sent = 0, 2, []

    def broadcast(self, tensor):
        if self.rank == 0:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))
        return tensor


def test_ranks_receive_the_first_ones_drafts():
    group = FirstRank()
    sampler = CoupledDraftSampler(PARAMS, group)
    requests, positions = range(len(PARAMS)), [1] * len(PARAMS)
    want = sampler.sample(logits_of(6), requests, positions, 2)
    group.rank = 1
    found = sampler.sample(torch.zeros(len(PARAMS), VOCAB), requests, positions, 2)
    assert not group.sent and all(map(torch.equal, found, want))
