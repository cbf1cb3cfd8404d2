"""Sampling: distributions against their definition, reproducibility, suppression, log-probabilities."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from baton.common.api.sampling import SamplingParams
from baton.common.request.sampling_metadata import RequestedLogprobs
from baton.common.sampling.extras.logprobs import LogprobReport
from baton.common.sampling.gumbel_noise import seeded_exponential
from baton.common.sampling.sampler import Sampler
from baton.kernels.tuning.policy import set_batch_invariant
from baton.tests.helpers.sampling_rows import sampling_row

VOCAB = 40
DRAWS = 20_000
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB, "cpu", seed=0)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def definition(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution, token by token: temperature, top-k, top-p of the rest, min-p."""
    probabilities = (logits / params.temperature).softmax(-1)
    ranked = probabilities.argsort(descending=True).tolist()
    kept = ranked[:params.top_k] if params.top_k > 0 else ranked
    total, nucleus, mass = float(probabilities[kept].sum()), [], 0.0
    for token in kept:
        if nucleus and mass >= params.top_p:
            break
        nucleus.append(token)
        mass += float(probabilities[token]) / total
    kept = [token for token in nucleus if probabilities[token] >= params.min_p * probabilities.max()]
    result = torch.zeros(VOCAB)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("params", [
    SamplingParams(), SamplingParams(temperature=0.4), SamplingParams(top_k=5), SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.2), SamplingParams(top_k=10, top_p=0.6, temperature=2.0, min_p=0.1),
], ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_distribution(sampler, logits, params, seeded):
    rows = [sampling_row(replace(params, seed=row if seeded else None), 9) for row in range(DRAWS)]
    sampled = sampler.sample(logits.repeat(DRAWS, 1), rows)
    seen = torch.bincount(torch.tensor(sampled.token_ids), minlength=VOCAB) / DRAWS
    want = definition(logits, params)
    assert not (seen[want == 0]).any()
    # Five standard deviations of a frequency over so many draws.
    assert ((seen - want).abs() <= 5 * (want * (1 - want) / DRAWS).sqrt() + 1e-9).all()


def test_greedy_and_mixed_rows(sampler, logits):
    rows = [sampling_row(params, 1) for params in (
        GREEDY, SamplingParams(top_k=1), SamplingParams(temperature=1e-30), SamplingParams(top_p=1e-6))]
    best = int(logits.argmax())
    assert sampler.sample(logits.repeat(4, 1), rows).token_ids == [best] * 4
    assert sampler.sample(logits.repeat(2, 1), rows[:2]).token_ids == [best] * 2
    assert sampler.sample(logits[:0].view(0, VOCAB), []).token_ids == []


def test_a_seed_fixes_the_choice_whatever_the_batch(sampler):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    mine = SamplingParams(seed=-(2**63))
    alone = [sampler.sample(logits[:1].clone(), [sampling_row(mine, p)]).token_ids[0] for p in range(40)]
    first, last = sampling_row(SamplingParams(temperature=0.5),
                                   2), sampling_row(SamplingParams(seed=8, top_k=3), 7)
    beside = [Sampler(VOCAB, "cpu", seed=5).sample(logits[[1, 0, 2]],
                                                   [first, sampling_row(mine, p), last]).token_ids[1]
              for p in range(40)]
    assert alone == beside
    assert len(set(alone)) > 8  # positions differ in their noise
    different = [sampler.sample(logits[:1].clone(), [sampling_row(SamplingParams(seed=6), p)]).token_ids[0]
                 for p in range(40)]
    assert different != alone


def test_the_generator_seed_fixes_unseeded_sampling(logits):
    def draw(seed: int) -> list[int]:
        return Sampler(VOCAB, "cpu", seed).sample(logits.repeat(50, 1),
                                                  [sampling_row(SamplingParams(), 0)] * 50).token_ids
    assert draw(1) == draw(1) != draw(2)


def test_seeded_noise_is_exponential_and_never_zero():
    noise = seeded_exponential(torch.arange(300), torch.arange(300) * 7, 5000)
    assert noise.min() > 0 and noise.isfinite().all()
    assert abs(noise.mean() - 1) < 0.005 and abs(noise.var() - 1) < 0.01
    assert abs(torch.corrcoef(noise[:50]).fill_diagonal_(0)).max() < 0.08  # rows are independent


def test_suppressed_tokens_are_not_chosen(sampler, logits):
    ranked = logits.argsort(descending=True).tolist()
    sampled = sampler.sample(logits.repeat(3, 1), [
        sampling_row(GREEDY, 1, suppressed=tuple(ranked[:2])),
        sampling_row(SamplingParams(top_k=2, seed=1), 1, RequestedLogprobs(3), tuple(ranked[:1])),
        sampling_row(GREEDY, 1)])
    assert sampled.token_ids[0] == ranked[2] and sampled.token_ids[1] in ranked[1:3]
    assert sampled.token_ids[2] == ranked[0]
    assert ranked[0] not in [token for token, _ in sampled.logprobs[1].top]


def bitmask_of(tokens):
    """Fills a row the way XGrammar does: one bit a token, 32 a word."""
    def fill(bitmask: torch.Tensor, row: int) -> None:
        assert bitmask.dtype == torch.int32 and bitmask.shape[1] == -(VOCAB // -32)
        words = [0] * bitmask.shape[1]
        for token in tokens:
            words[token // 32] |= 1 << token % 32
        bitmask[row] = torch.tensor(words).to(torch.int32)
    return fill


def test_only_allowed_tokens_are_chosen_and_reported(sampler, logits):
    ranked = logits.argsort(descending=True).tolist()
    allowed = [*ranked[7:12], 31, 32, VOCAB - 1]
    rows = [sampling_row(GREEDY, 1), *(
        sampling_row(SamplingParams(seed=seed, temperature=50.0), 1, RequestedLogprobs(2), (ranked[7],),
                         bitmask_of(allowed))
        for seed in range(400))]
    sampled = sampler.sample(logits.repeat(len(rows), 1), rows)
    assert sampled.token_ids[0] == ranked[0]
    assert set(sampled.token_ids[1:]) == set(allowed) - {ranked[7]}
    kept = (logits[sorted(set(allowed) - {ranked[7]})] / 50).log_softmax(-1)
    assert sampled.logprobs[1].top[0] == (ranked[8], pytest.approx(float(kept.max()), abs=1e-5))


@pytest.mark.parametrize("values", [
    {"temperature": 5e-324}, {"temperature": 1e-40}, {"temperature": 1e-30, "top_k": 3}, {"temperature": 2e-6},
    {"top_p": 5e-324}, {"top_p": 1e-40, "min_p": 1e-40}])
def test_values_that_float32_makes_0_of_choose_the_likeliest(sampler, logits, values):
    rows = [sampling_row(SamplingParams(**values), 1, RequestedLogprobs(1)) for _ in range(4)]
    sampled = sampler.sample(torch.stack([logits.roll(7 * i) * 20 for i in range(4)]), rows)
    assert sampled.token_ids == [int(logits.roll(7 * i).argmax()) for i in range(4)]
    assert all(found.value == found.value for found in sampled.logprobs)  # no NaN


@pytest.mark.parametrize("original", [False, True])
def test_logprobs_are_told_after_temperature_or_before(logits, original):
    sampler = Sampler(VOCAB, "cpu", seed=0, original_logprobs=original)
    rows = [sampling_row(GREEDY, 1, RequestedLogprobs()),
            sampling_row(SamplingParams(temperature=0.2, seed=1), 1, RequestedLogprobs(3, (5, 0, 5))),
            sampling_row(GREEDY, 1),
            sampling_row(SamplingParams(temperature=2e-6), 1, RequestedLogprobs(1))]
    sampled = sampler.sample(logits.repeat(4, 1), rows)
    plain = logits.log_softmax(-1)
    warm = plain if original else (logits / 0.2).log_softmax(-1)
    best = int(logits.argmax())
    assert sampled.logprobs[0] == (pytest.approx(float(plain.max()), abs=1e-5), [], [])
    second = sampled.logprobs[1]
    assert second.value == pytest.approx(float(warm[sampled.token_ids[1]]), abs=1e-4)
    for found, tokens in ((second.top, warm.topk(3).indices.tolist()), (second.of_ids, [5, 0, 5])):
        assert found == [(token, pytest.approx(float(warm[token]), abs=1e-4)) for token in tokens]
    assert sampled.logprobs[2] is None
    assert sampled.logprobs[3].top == [(best, pytest.approx(float(plain[best]) if original else 0.0, abs=1e-5))]


def test_equal_log_probabilities_do_not_depend_on_the_most_that_are_asked_for():
    """Under a batch-invariant policy the smallest ids come first, as many as a row asks for."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0, -1.0, float("-inf")]] * 2)
    set_batch_invariant(True)
    try:
        reports = [LogprobReport(logits[:len(counts)].clone(), torch.zeros(len(counts), dtype=torch.int64),
                                 [RequestedLogprobs(count) for count in counts]).wait() for counts in ((2,), (2, 7))]
    finally:
        set_batch_invariant(False)
    (_, alone), (_, first), (_, second) = (entry for report in reports for entry in report)
    assert alone == first and [token for token, _ in second.top] == [1, 3, 4, 0, 2, 5, 6]
    assert [value for _, value in second.top] == logits[0].log_softmax(-1).sort(descending=True).values.tolist()
