"""The sampling kernels against the torch backend; collected by test_kernels_interpreted.py and
tests/gpu/kernels/test_kernels.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from baton.common.api.sampling import SamplingParams
from baton.common.request.sampling_metadata import SamplingMetadata
from baton.common.sampling.chain_draft_sampling import ChainDraftSampling
from baton.common.sampling.draft_sampler import CoupledDraftSampler, params_table, perturbed
from baton.common.sampling.fused_sampling import FusedSampling, _Table
from baton.common.sampling.gumbel_noise import MIN_NOISE, seeded_exponential
from baton.common.sampling.sampling_backend import select_sampling_backend
from baton.common.sampling.torch_sampling import TorchSampling
from baton.kernels.sampling import sample as kernel
from baton.tests.kernels.kernel_cases import DEVICE, GPU
from baton.tests.kernels.kernel_cases import pytestmark as pytestmark

CUDA = torch.device(DEVICE)
VOCAB = 128_256 if GPU else 4301  # not a multiple of either kernel's block, and more than one of each


def make_logits(rows: int, kind: str) -> torch.Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 3
    if kind == "ties":  # what a head of 16 bits makes, and coarser
        logits = ((logits * 4).round() / 4).half()
    if kind == "flat":
        logits = logits * 0 + 1.5
    if kind == "peaked":
        logits[:, 17] = 60.0
    if kind == "masked":  # as a grammar does, with few tokens left
        logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.998] = float("-inf")
    if kind == "wide":  # what processors write in place of minus infinity
        logits[:, ::3] = -1e30
    return logits.to(DEVICE)


PARAMS = [
    SamplingParams(), SamplingParams(temperature=0.3), SamplingParams(top_k=1), SamplingParams(temperature=0),
    SamplingParams(top_k=2), SamplingParams(top_k=50), SamplingParams(top_k=4100), SamplingParams(top_k=10**12),
    SamplingParams(top_p=0.9), SamplingParams(top_p=1e-6), SamplingParams(top_p=0.999, temperature=2.5),
    SamplingParams(top_k=40, top_p=0.6), SamplingParams(top_k=3000, top_p=0.95), SamplingParams(min_p=0.05),
    SamplingParams(top_k=20, top_p=0.8, min_p=0.1, temperature=0.7), SamplingParams(temperature=1e-30, top_p=0.5),
    SamplingParams(temperature=100.0, top_k=30, top_p=0.3), SamplingParams(top_k=7, top_p=0.99999),
]


@pytest.mark.parametrize("kind", ["ties", "masked", "wide", *(["random", "flat", "peaked"] if GPU else [])])
def test_seeded_draws_equal_the_plain_path(kind):
    fields = [{name: getattr(p, name) for name in p.__struct_fields__} for p in PARAMS]
    rows = [SamplingMetadata(SamplingParams(**given | {"seed": 7 * i - 50}), 3 + i) for i, given in enumerate(fields)]
    logits = make_logits(len(rows), kind)
    before = logits.clone()
    found = FusedSampling(CUDA, 0)(logits, rows).tolist()
    assert torch.equal(logits, before)
    assert found == TorchSampling(VOCAB, CUDA, 0)(logits, rows).tolist()


def left_by(logits: torch.Tensor, params: list[SamplingParams]) -> list[list[int]]:
    """The tokens that the truncation kernel leaves."""
    count = len(params)
    sent = torch.from_numpy(_Table(params, VOCAB).filled([0] * count, np.random.default_rng(0))).to(DEVICE)
    floors = torch.empty(count, device=DEVICE)
    lasts = torch.empty(count, dtype=torch.int32, device=DEVICE)
    peaks = logits.amax(-1).float()
    kernel._truncate_kernel[(count,)](logits, logits.stride(0), peaks, sent, sent[4:].view(torch.float64),
                                      floors, lasts, count, VOCAB, BLOCK=4096, num_warps=16)
    floors, lasts, tokens = floors[:, None], lasts[:, None], torch.arange(VOCAB, device=DEVICE)
    kept = (logits > floors) | ((logits == floors) & (tokens <= lasts))
    return [row.nonzero()[:, 0].tolist() for row in kept]


@pytest.mark.parametrize("kind", ["random", "flat", *(["ties", "masked"] if GPU else [])])
def test_what_truncation_leaves(kind):
    params = [p for p in PARAMS if not p.greedy and not p.min_p and (p.top_k > 0 or p.top_p < 1)]
    logits = make_logits(len(params), kind)
    plain = TorchSampling(VOCAB, CUDA, 0)
    for row, (one, found) in enumerate(zip(params, left_by(logits, params))):
        scaled = (logits[row:row + 1].double() - logits[row].max()) / one.temperature
        wanted = plain._truncate(scaled, [one]).softmax(-1)[0]
        alive = scaled.softmax(-1)[0].float() > 0  # a token without probability may be left or not
        found = [token for token in found if alive[token]]
        wanted = [token for token in wanted.nonzero()[:, 0].tolist() if alive[token]]
        # Where the sum passes top_p is a matter of rounding: of a large vocabulary, by a few tokens of 10**-7 each.
        assert len(set(found) ^ set(wanted)) <= (0 if one.top_p == 1 else 4 if GPU else 1), (one, len(found))


def test_noise_is_the_hash_of_the_plain_path():
    """Every token of a flat row wins once: by the same noise it is the same token at each position and seed."""
    rows = [SamplingMetadata(SamplingParams(seed=seed), position) for seed in (0, 5, -(2**63), 2**63 - 1)
            for position in (0, 9, 70_000)]
    logits = torch.zeros(len(rows), VOCAB, device=DEVICE)
    seeds = torch.tensor([row.params.seed for row in rows], device=DEVICE)
    noise = seeded_exponential(seeds, torch.tensor([row.position for row in rows], device=DEVICE), VOCAB)
    assert FusedSampling(CUDA, 0)(logits, rows).tolist() == noise.clamp(min=MIN_NOISE).argmin(-1).tolist()


@pytest.mark.parametrize("mapped", [False, True])
def test_drafts_equal_the_plain_path(mapped):
    """Scores by the kernel and in torch, of a reduced vocabulary too; the drafts are the best of them. On a GPU sums of
    probabilities are rounded otherwise: of tokens that are as likely as the last that is left, one may fall out."""
    params = [replace(one, seed=9 * i - 40) for i, one in enumerate(PARAMS)]
    logits = make_logits(len(params), "ties")
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0)).to(DEVICE) if mapped else None
    requests = list(range(len(params)))[::-1]
    table = torch.from_numpy(params_table(params)).to(DEVICE)
    table[0], table[2] = torch.arange(len(params)), 6
    found = kernel.perturb(logits, logits.amax(-1).float(), table, True, ids)
    want = perturbed(logits, table, True, ids)
    alike = found.isfinite() == want.isfinite()
    assert (~alike).sum(-1).max() <= (2 if GPU else 0)
    assert torch.allclose(found[alike], want[alike], rtol=1e-5, atol=1e-4)
    tokens, logprobs = CoupledDraftSampler(params).sample(logits.flip(0), requests, [6] * len(params), 2, ids)
    best, columns = want.flip(0).topk(2)
    columns = columns if ids is None else ids[columns]
    known = best.isfinite()
    assert torch.equal(tokens[known], columns[known])
    assert torch.allclose(logprobs, best - want.flip(0).logsumexp(-1, keepdim=True), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("greedy", [False, True])
def test_positions_on_the_device(greedy):
    """Samples are those with the host's positions, also where the same rows are at others in the next step."""
    params = [replace(one, seed=7 * i - 50, **({"temperature": 0.0} if greedy else {})) for i, one in enumerate(PARAMS)]
    logits, drawing = make_logits(len(params), "ties"), FusedSampling(CUDA, 0)
    rows = [SamplingMetadata(one, 0) for one in params]
    for start in (3, 70_000):
        want = FusedSampling(CUDA, 0)(logits, [SamplingMetadata(one, start + i) for i, one in enumerate(params)])
        positions = torch.arange(start, start + len(params), device=DEVICE)
        assert torch.equal(drawing(logits, rows, positions), want)
    drawing(logits, [SamplingMetadata(SamplingParams(), 0)] * len(params))
    assert torch.equal(drawing(logits, rows, positions), want)
    assert len(set(drawing(logits * 0, [SamplingMetadata(SamplingParams(), 0)] * len(params), positions).tolist())) > 9


@pytest.mark.parametrize("mapped", [False, True])
def test_drafts_of_chains_equal_the_draft_samplers(mapped):
    """In a captured step's tables, of which the last requests are padding, and which other requests have used."""
    params = [replace(one, seed=9 * i - 40) for i, one in enumerate(PARAMS)]
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0)).to(DEVICE) if mapped else None
    logits = make_logits(len(params) + 2, "ties")
    sampling = ChainDraftSampling(40, CUDA)
    sampling.update(params[::-1] * 2)
    sampling.update(params)
    sampler = sampling(len(logits), False)
    for start in (6, 90):
        positions = torch.arange(start, start + len(logits), device=DEVICE)
        want, _ = CoupledDraftSampler(params).sample(logits[:len(params)], range(len(params)),
                                                     positions[:len(params)].tolist(), 1, ids)
        drafts = torch.zeros(len(logits), 3, dtype=torch.int64, device=DEVICE)
        tokens = sampler(logits, positions, drafts[:, 1], ids)
        assert torch.equal(tokens[:len(params)], want[:, 0])
        assert torch.equal(drafts, torch.stack([drafts[:, 0] * 0, tokens, drafts[:, 0] * 0], 1))
        assert torch.equal(sampler(logits, positions, token_ids=ids), tokens)
    sampling.update([SamplingParams(temperature=0.0)] * len(logits))
    best = logits.float().argmax(-1)
    best = best if ids is None else ids[best]
    for greedy in (False, True):
        assert torch.equal(sampling(len(logits), greedy)(logits, positions, drafts[:, 2], ids), best)
        assert torch.equal(drafts[:, 2], best)


def test_rows_without_a_seed_follow_the_distribution():
    steps, rows = (100, 200) if GPU else (2, 150)
    logits = torch.full((1, 64), -20.0, device=DEVICE)
    logits[0, 30:34] = torch.tensor([0.4, 0.3, 0.2, 0.1], device=DEVICE).log()
    drawing, seen = FusedSampling(CUDA, 3), torch.zeros(64)
    for _ in range(steps):
        tokens = drawing(logits.expand(rows, -1), [SamplingMetadata(SamplingParams(min_p=0.01), 0)] * rows)
        seen += torch.bincount(tokens.cpu(), minlength=64)
    want = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert seen.sum() == seen[30:34].sum() == steps * rows
    assert ((seen[30:34] / seen.sum() - want).abs() < 5 * (want * (1 - want) / seen.sum()).sqrt()).all()


def test_rows_that_hold_nothing_to_draw():
    rows = [SamplingMetadata(SamplingParams(seed=1, top_k=5), 0),
            SamplingMetadata(SamplingParams(seed=1, top_p=0.5), 0)]
    logits = torch.full((2, VOCAB), float("-inf"), device=DEVICE)
    assert FusedSampling(CUDA, 0)(logits, rows).tolist() == [0, 0]
    tokens = FusedSampling(CUDA, 0)(logits * float("nan"), rows).tolist()
    assert all(0 <= token < VOCAB for token in tokens)


def test_the_kernels_pass_the_check_at_start():
    assert isinstance(select_sampling_backend("triton", VOCAB, CUDA, 0), FusedSampling)
    from baton.common.sampling.sampling_backend import _self_test
    types = {torch.float32, torch.float16}
    assert _self_test(FusedSampling(CUDA, 0), VOCAB, CUDA, types if GPU else {torch.float16}) is None
    assert "in place of" in str(_self_test(lambda logits, rows: logits.argmax(-1), VOCAB, CUDA, types))
    assert "ValueError: no" in str(_self_test(_refuse, VOCAB, CUDA, types))


def _refuse(logits: torch.Tensor, rows: list[SamplingMetadata]) -> torch.Tensor:
    raise ValueError("no")
