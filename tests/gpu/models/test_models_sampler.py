"""The sampler on a GPU: a seeded choice is the CPU's, and truncation leaves what the definition leaves."""

from __future__ import annotations

import pytest
import torch

from baton.common.api.sampling import SamplingParams
from baton.common.request.logit_bias import LogitBias
from baton.common.request.sampling_metadata import RequestedLogprobs
from baton.common.request.token_buffer import TokenBuffer
from baton.common.request.token_history import TokenHistory
from baton.common.sampling.sampler import Sampler
from baton.tests.helpers.sampling_rows import sampling_row

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 32_000


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_seeded_choice_equals_the_cpus(backend):
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    rows = [sampling_row(SamplingParams(seed=row, top_p=0.9 if row % 2 else 1.0, top_k=50 if row % 3 else -1), row,
                             RequestedLogprobs(2)) for row in range(64)]
    chosen = [Sampler(VOCAB, device, 0, backend=by).sample(logits.to(device, copy=True), rows)
              for device, by in (("cpu", "torch"), ("cuda", backend))]
    assert chosen[0].token_ids == chosen[1].token_ids
    cpu, cuda = ([found.value for found in one.logprobs] for one in chosen)
    assert cpu == pytest.approx(cuda, abs=1e-4)


def test_adjusted_logits_equal_the_cpus():
    """Penalties with a pending token, bias and suppression; no row of the first batch has any output yet."""
    generator = torch.Generator().manual_seed(2)
    previous = torch.randint(0, 50, (64,), generator=generator)
    params = SamplingParams(temperature=0, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.3)
    for length in (0, 300):
        outputs = torch.randint(0, 400, (64, length), generator=generator).tolist()
        logits = torch.randn(64, VOCAB, generator=generator) * 3
        adjusted = []
        for device in ("cpu", "cuda"):
            rows = []
            for row, output in enumerate(outputs):
                history = TokenHistory(TokenBuffer([row, 7, *output]), 2)
                rows.append(sampling_row(params, 1, suppressed=(3,) if row % 2 else (), history=history,
                                             pending=row if row % 3 else None, bias=LogitBias.of({5: 2.0, 90: -100.0})))
            mine = logits.to(device, copy=True)
            Sampler(VOCAB, device, 0).sample(mine, rows, previous.to(device))
            adjusted.append(mine.cpu())
        assert torch.allclose(*adjusted, atol=1e-5) and not torch.equal(adjusted[0], logits)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_unseeded_frequencies(backend):
    logits = torch.full((1, VOCAB), -20.0, device="cuda")
    logits[0, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1], device="cuda").log()
    draws = 20_000
    sampler = Sampler(VOCAB, "cuda", 0, backend=backend)
    tokens = [token for _ in range(10) for token in sampler.sample(
        logits.repeat(draws // 10, 1), [sampling_row(SamplingParams(top_k=4), 0)] * (draws // 10)).token_ids]
    seen = torch.bincount(torch.tensor(tokens), minlength=VOCAB) / draws
    want = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert seen[4:].sum() == 0
    assert ((seen[:4] - want).abs() < 5 * (want * (1 - want) / draws).sqrt()).all()
