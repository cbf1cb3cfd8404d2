"""Penalties, bias and the history they look at, against the definition token by token."""

from __future__ import annotations

import random

import pytest
import torch

from baton.common.api.errors import InvalidRequest
from baton.common.api.sampling import SamplingParams
from baton.common.request.logit_bias import LogitBias
from baton.common.request.sampling_metadata import RequestedLogprobs
from baton.common.request.token_buffer import TokenBuffer
from baton.common.request.token_history import TokenHistory
from baton.common.sampling.extras.penalties import Penalties, apply_penalties
from baton.common.sampling.sampler import Sampler
from baton.tests.helpers.sampling_reference import penalized
from baton.tests.helpers.sampling_rows import sampling_row

VOCAB = 50


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(low: float, high: float, none: float) -> float:
        return rng.choice([none, rng.uniform(low, high)])
    return SamplingParams(
        temperature=0, frequency_penalty=maybe(-2, 2, 0), presence_penalty=maybe(-2, 2, 0),
        repetition_penalty=maybe(0.1, 2, 1),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-3, 3) for _ in range(rng.choice([0, 0, 4]))})


def history_of(prompt: list[int], output: list[int]) -> TokenHistory:
    buffer = TokenBuffer(prompt)
    history = TokenHistory(buffer, len(prompt))
    for i, token in enumerate(output):
        buffer.append(token)
        if i % 3 == 0:  # counted as it grows, in steps of one and of several
            history.advance()
    return history


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_batch_against_the_definition(seed):
    rng = random.Random(seed)
    logits = torch.randn(17, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    previous = torch.tensor([rng.randrange(VOCAB) for _ in range(40)])
    rows, want = [], []
    for row in range(len(logits)):
        params = random_params(rng)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 30, 200]))]
        output = [rng.randrange(rng.choice([3, VOCAB])) for _ in range(rng.choice([0, 1, 150]))]
        pending = rng.choice([None, rng.randrange(40)])
        rows.append(sampling_row(params, 1, RequestedLogprobs(VOCAB), pending=pending,
                                     history=history_of(prompt, output) if params.penalizes else None,
                                     bias=LogitBias.of(params.logit_bias) if params.logit_bias else None))
        held = output if pending is None else [*output, int(previous[pending])]
        want.append(penalized(logits[row].tolist(), params, prompt, held))
    sampled = Sampler(VOCAB, "cpu", 0).sample(logits, rows, previous)
    reference = torch.tensor(want)
    assert torch.allclose(logits, reference, atol=1e-5)
    assert sampled.token_ids == reference.argmax(-1).tolist()
    scores = reference.log_softmax(-1)
    for row, found in enumerate(sampled.logprobs):
        assert found.value == pytest.approx(float(scores[row, sampled.token_ids[row]]), abs=1e-4)
        assert dict(found.top) == pytest.approx(dict(enumerate(scores[row].tolist())), abs=1e-4)


def test_a_pending_token_counts_bit_by_bit_as_a_known_one():
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(frequency_penalty=0.37, presence_penalty=0.81, repetition_penalty=1.3)
    for output in ([], [7], [7, 7, 3], [3]):
        logits = torch.randn(3, VOCAB, generator=generator)
        known, pending = logits.clone(), logits.clone()
        apply_penalties(known, [(row, Penalties(params, history_of([4, 7], [*output, 7]))) for row in range(3)], None)
        members = [(row, Penalties(params, history_of([4, 7], output), 1)) for row in range(3)]
        apply_penalties(pending, members, torch.tensor([0, 7]))
        assert torch.equal(known, pending) and not torch.equal(known, logits)


def test_what_is_ruled_out_stays_so():
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(temperature=0, repetition_penalty=0.5, frequency_penalty=-2,
                            logit_bias={4: 100.0, 5: 100.0})

    def fill(bitmask: torch.Tensor, row: int) -> None:
        bitmask[row, 0] = ~(1 << 4)

    row = sampling_row(params, 1, suppressed=(5,), allowed=fill, history=history_of([4, 5], [4, 5, 9]),
                           bias=LogitBias.of(params.logit_bias))
    assert Sampler(VOCAB, "cpu", 0).sample(logits, [row]).token_ids == [9]
    assert logits[0, 4] == logits[0, 5] == -torch.inf and not logits.isnan().any()


@pytest.mark.parametrize("name, value", [
    ("frequency_penalty", 2.1), ("presence_penalty", float("nan")), ("repetition_penalty", 0.0),
    ("repetition_penalty", 2.5), ("logit_bias", {VOCAB: 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 101.0}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0))])
def test_values_out_of_range_name_their_parameter(name, value):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{name: value}).validate(2000 if name == "logit_bias" and len(value) > 1 else VOCAB)
    assert refused.value.param == name and name in refused.value.message and len(refused.value.message) < 400
