"""Speculative sampling is exact: chi-square tests of the tokens against the model's distribution, over a million draws
each, and the stronger property that each run of tokens is the one that plain decoding samples.

Model and draft are Markov chains of unlike random distributions over few tokens, so that the distribution of whole
runs is known. Measured in the first step, at temperature 1 and 0.7, where the distributions are d = 0.25 and 0.28 apart
in total variation: the first draft of a chain is accepted with probability 0.74 and 0.71, where the bound
(1 - d) / (1 + d) is 0.60 and 0.56, and the greatest possible 1 - d is 0.75 and 0.72; of two drafts in a tree one is
accepted with 0.97 and 0.98.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from baton.common.api.drafts import Drafts
from baton.common.api.sampling import SamplingParams
from baton.common.request.sampling_metadata import SamplingMetadata
from baton.common.sampling.draft_sampler import CoupledDraftSampler
from baton.common.sampling.torch_sampling import TorchSampling
from baton.common.speculative.verify import accepted_rows
from baton.kernels.arguments import ChainPages, ChainState, PlacedChains
from baton.kernels.speculative.accept_chains import accept_chains
from baton.kernels.speculative.place_chains import place_rows
from baton.tests.helpers.chi_square import chi_square_p

VOCAB, LENGTH = 6, 3
REQUESTS = 350_000
START = VOCAB  # the state before the first token


class Chains(NamedTuple):
    """Logits [VOCAB + 1, VOCAB] after each token, and after START, of the model and of the draft."""

    model: torch.Tensor
    draft: torch.Tensor


class Requests:
    """Many requests of one temperature, each with a seed, over ``chains``."""

    def __init__(self, chains: Chains, temperature: float, count: int):
        self.chains = chains
        self.params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(count)]
        self._rows = [[SamplingMetadata(one, position) for one in self.params] for position in range(2 * LENGTH)]
        self._model = TorchSampling(VOCAB, torch.device("cpu"), 0)
        self._draft = CoupledDraftSampler(self.params)

    def sample(self, requests: torch.Tensor, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's tokens [n] after ``states`` [n]."""
        rows = [self._rows[position][request] for request, position in zip(requests.tolist(), positions.tolist())]
        return self._model(self.chains.model[states], rows)

    def draft(self, requests: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        """Drafts [n, count] after ``states`` [n]."""
        return self._draft.sample(self.chains.draft[states], requests, positions, count)[0]


CHAIN = Drafts((0, 0))
TREE = Drafts((0,) * 4, (-1, -1, 0, 1))


def drafted(requests: Requests, index: torch.Tensor, newest: torch.Tensor, positions: torch.Tensor,
            shape: Drafts) -> torch.Tensor:
    """Tokens [n, 1 + k] of the rows of a step: the newest one and drafts of ``shape``, two passes deep."""
    width = 1 if shape.parents is None else 2
    first = requests.draft(index, newest, positions, width)
    repeated = index.repeat_interleave(width)
    second = requests.draft(repeated, first.flatten(), positions.repeat_interleave(width) + 1, 1)
    return torch.cat((newest[:, None], first, second.view(len(index), -1)), -1)


def accepted_in_chains(samples: torch.Tensor, states: torch.Tensor, shape: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens each of n requests gets, and these, of ``samples`` and tokens ``states`` [n, rows]; the device's
    way."""
    count, width = samples.shape
    pages = ChainPages(torch.arange(count + 1, dtype=torch.int32), torch.zeros(count, dtype=torch.int32), 16, 0, 16)
    rows = place_rows(torch.zeros(count, dtype=torch.int64), states, pages)
    state = ChainState.empty(count, width - 1, samples.device)
    placed = PlacedChains(rows, torch.full((count,), width), rows.positions + 1)
    return accept_chains(samples.flatten(), placed, state, pages, width - 1).counts, state.samples


def accepted_in_trees(samples: torch.Tensor, states: torch.Tensor, shape: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of trees of two levels. Some are walked on the host, too."""
    assert shape.parents is not None
    number, path = torch.arange(len(samples)), [torch.zeros(len(samples), dtype=torch.int64)]
    for _ in range(2):
        child = torch.full_like(path[0], -1)
        for row, parent in reversed(list(enumerate(shape.parents, 1))):
            follows = (path[-1] == parent + 1) & (states[:, row] == samples[number, path[-1]])
            child = torch.where(follows, row, child)
        path.append(child)
    rows = torch.stack(path, -1)
    counts, few = (rows >= 0).sum(-1), min(1000, len(samples))
    drafts = {i: Drafts(tuple(tokens), shape.parents) for i, tokens in enumerate(states[:few, 1:].tolist())}
    assert accepted_rows(samples[:few].flatten().tolist(), [states.shape[1]] * few, drafts)[0] == counts[:few].tolist()
    return counts, samples.gather(-1, rows.clamp(min=0))


def speculated(requests: Requests, shape: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
    """The first tokens [n, LENGTH] of all requests, and how many drafts the first step has accepted of each."""
    count = len(requests.params)
    tokens = torch.full((count, 2 * LENGTH), START)
    lengths, first = torch.zeros(count, dtype=torch.int64), None
    depths = torch.tensor([0, 1, 2] if shape.parents is None else [0, 1, 1, 2, 2])
    size = len(depths)
    while len(index := torch.nonzero(lengths < LENGTH)[:, 0]):
        newest = torch.where(lengths[index] > 0, tokens[index, (lengths[index] - 1).clamp(min=0)], START)
        states = drafted(requests, index, newest, lengths[index], shape).flatten()
        samples = requests.sample(index.repeat_interleave(size), states,
                                  (lengths[index][:, None] + depths).flatten())
        accepted = accepted_in_chains if shape.parents is None else accepted_in_trees
        counts, runs = accepted(samples.view(-1, size), states.view(-1, size), shape)
        for step in range(3):
            got = counts > step
            tokens[index[got], lengths[index[got]] + step] = runs[got, step]
        lengths[index] += counts
        first = counts - 1 if first is None else first
    assert first is not None
    return tokens[:, :LENGTH], first


@pytest.fixture(scope="module")
def chains() -> Chains:
    generator = torch.Generator().manual_seed(11)
    model = torch.randn(VOCAB + 1, VOCAB, generator=generator) * 1.5
    return Chains(model, model + torch.randn(VOCAB + 1, VOCAB, generator=generator))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_runs_have_the_distribution_of_the_model(chains, temperature):
    requests = Requests(chains, temperature, REQUESTS)
    p, q = ((logits.double() / temperature).softmax(-1) for logits in chains)
    runs = (p[START][:, None, None] * p[:VOCAB][:, :, None] * p[:VOCAB]).flatten()
    index, state = torch.arange(REQUESTS), torch.full((REQUESTS,), START)
    plain = [state]
    for position in range(LENGTH):
        plain.append(requests.sample(index, plain[-1], torch.full((REQUESTS,), position)))
    distance = float((p[START] - q[START]).abs().sum() / 2)
    for shape in (CHAIN, TREE):
        tokens, accepted = speculated(requests, shape)
        assert torch.equal(tokens, torch.stack(plain[1:], -1))
        seen = torch.bincount(tokens @ torch.tensor([VOCAB**2, VOCAB, 1]), minlength=VOCAB**3)
        assert chi_square_p(seen, runs) > 1e-3
        rate = float((accepted > 0).double().mean())
        assert rate > (1 - distance) / (1 + distance)
        assert shape is TREE or rate < 1 - distance
