"""The kernels of mixtures of experts against their twins, on a GPU or under the interpreter; collected by
test_kernels_interpreted.py and tests/gpu/kernels/test_moe.py."""

from __future__ import annotations

import pytest
import torch

from baton.common.config.moe import MoESpec
from baton.common.layers.activations import activation_of
from baton.kernels import reference
from baton.kernels.arguments import Scales
from baton.kernels.moe.moe_align import moe_align, num_blocks_of
from baton.kernels.moe.moe_experts import moe_experts
from baton.kernels.moe.moe_topk import moe_topk
from baton.kernels.tuning.moe import Tile, Tiles
from baton.tests.kernels.kernel_cases import DEVICE, each_dtype, pytestmark, random

__all__ = ["pytestmark"]

SMALL = {rows: Tiles(Tile(rows, 16, 16, 2, 4, 2), Tile(rows, 32, 16, 2, 4, 2)) for rows in (16, 32)}


def choices_of(tokens: int, num_places: int, choices: int, outside: int = 0, seed: int = 0) -> torch.Tensor:
    """Distinct experts for each token, of which ``outside`` at either end are not on this rank."""
    generator = torch.Generator().manual_seed(seed)
    all_places = num_places + 2 * outside
    picked = [torch.randperm(all_places, generator=generator)[:choices] for _ in range(tokens)]
    return (torch.stack(picked) - outside).to(DEVICE)


@pytest.mark.parametrize("tokens,num_places,choices,outside,block", [
    (1, 4, 2, 0, 16), (7, 5, 3, 0, 16), (40, 3, 2, 2, 32), (3, 9, 8, 0, 16), (1100, 6, 2, 1, 64),
])
def test_moe_align(tokens, num_places, choices, outside, block):
    """Also with more choices than one program counts, and without any choice on this rank."""
    for places in (choices_of(tokens, num_places, choices, outside),
                   torch.full((tokens, choices), num_places, device=DEVICE)):
        got = moe_align(places, num_places, block)
        rows, place, positions = reference.moe_align(places, num_places, block)
        used = len(place)
        assert used <= len(got.expert_of_block) == num_blocks_of(tokens * choices, num_places, block)
        assert torch.equal(got.expert_of_block[:used], place) and (got.expert_of_block[used:] == -1).all()
        assert torch.equal(got.sorted_choices[:used * block], rows)
        held = positions >= 0
        assert torch.equal(got.positions[held], positions[held])
        assert got.spans is None


@pytest.mark.parametrize("tokens,num_places,choices,outside,tall", [
    (1, 4, 2, 0, 2), (40, 3, 2, 2, 4), (1100, 6, 2, 1, 4), (700, 2, 1, 0, 2),
])
def test_tiles_of_blocks(tokens, num_places, choices, outside, tall):
    """Some experts have fewer blocks than a tile may have, some many."""
    for places in (choices_of(tokens, num_places, choices, outside),
                   torch.full((tokens, choices), num_places, device=DEVICE)):
        got = moe_align(places, num_places, 16, tall)
        want = reference.moe_spans(reference.moe_align(places, num_places, 16)[1], tall)
        used = len(want)
        assert used <= len(got.spans) == num_blocks_of(tokens * choices, num_places, 16 * tall)
        assert torch.equal(got.spans[:used], want)
        assert (got.spans[used:] == torch.tensor([0, 0, -1], device=DEVICE)).all()
        assert got.tile_counter.tolist() == [0]


@each_dtype
@pytest.mark.parametrize("tokens,num_places,choices,outside,hidden,size", [
    (1, 4, 2, 0, 64, 16), (60, 5, 3, 1, 32, 48), (290, 2, 1, 1, 32, 16),
])
@pytest.mark.parametrize("rows", [16, 128])
def test_moe_experts_sorted(tokens, num_places, choices, outside, hidden, size, rows, dtype, atol, rtol):
    """Some of the experts' last blocks of 128 rows are half full, and computed as half blocks."""
    places = choices_of(tokens, num_places, choices, outside)
    weights = torch.rand(places.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x = random(tokens, hidden, dtype=dtype)
    gate_up = random(num_places, 2 * size, hidden, dtype=dtype, seed=2) * 0.2
    down = random(num_places, hidden, size, dtype=dtype, seed=3) * 0.2
    want = reference.moe_experts(x, gate_up, down, places, weights)
    tiles = Tiles(Tile(rows, 32, 16, 2, 4, 2), Tile(rows, 32, 16, 2, 4, 2), sorted=True)
    got = moe_experts(x, gate_up, down, places, weights, tiles=tiles)
    torch.testing.assert_close(got, want, atol=2 * atol, rtol=rtol)


@each_dtype
@pytest.mark.parametrize("block", SMALL)
@pytest.mark.parametrize("tokens,num_places,choices,outside,hidden,size", [
    (1, 4, 2, 0, 32, 16), (19, 5, 3, 1, 40, 24), (50, 2, 1, 1, 16, 40),
])
def test_moe_experts(tokens, num_places, choices, outside, hidden, size, block, dtype, atol, rtol):
    places = choices_of(tokens, num_places, choices, outside)
    weights = torch.rand(places.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x = random(tokens, hidden, dtype=dtype)
    gate_up = random(num_places, 2 * size, hidden, dtype=dtype, seed=2) * 0.2
    down = random(num_places, hidden, size, dtype=dtype, seed=3) * 0.2
    want = reference.moe_experts(x, gate_up, down, places, weights)
    got = moe_experts(x, gate_up, down, places, weights, tiles=SMALL[block])
    torch.testing.assert_close(got, want, atol=2 * atol, rtol=rtol)  # the twin rounds before the activation too


def test_moe_experts_by_default_tiles_and_of_no_tokens():
    places = choices_of(5, 4, 2)
    x, gate_up, down = (random(*shape, dtype=torch.float32) for shape in ((5, 32), (4, 48, 32), (4, 32, 24)))
    weights = torch.rand(places.shape).to(DEVICE)
    want = reference.moe_experts(x, gate_up, down, places, weights)
    torch.testing.assert_close(moe_experts(x, gate_up, down, places, weights), want, atol=1e-3, rtol=1e-4)
    assert moe_experts(x[:0], gate_up, down, places[:0], weights[:0]).shape == (0, 32)


@pytest.mark.parametrize("experts,changes", [
    (8, {"top_k": 2}), (60, {"top_k": 4, "renormalize": False}), (128, {"top_k": 8}),
    (160, {"top_k": 6, "num_groups": 8, "top_groups": 3, "scaling_factor": 16.0, "renormalize": False}),
    (24, {"top_k": 5, "num_groups": 4, "top_groups": 2, "scoring": "sigmoid", "group_score": "top2",
          "correction_bias": True, "scaling_factor": 2.5}),
    (5, {"top_k": 5, "scoring": "sigmoid", "correction_bias": True}),
], ids=str)
def test_moe_topk(experts, changes):
    spec = MoESpec(num_experts=experts, intermediate_size=8, layers=(0,), **changes)
    logits = random(9, experts + 3, dtype=torch.float32)[:, :experts] * 3
    bias = random(experts, dtype=torch.float32, seed=1) if spec.correction_bias else None
    ids, weights = moe_topk(logits, bias, spec)
    want_ids, want_weights = reference.moe_topk(logits, bias, spec)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)
    live = (torch.arange(9, device=DEVICE) % 3 > 0).half()
    placed, weights = moe_topk(logits, bias, spec, live, first=3)
    assert torch.equal(placed, reference.moe_topk(logits, bias, spec, live, 3)[0])
    assert torch.equal(placed, torch.where(live[:, None] > 0, want_ids, -1) - 3), "rows that pad reach no expert"
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("by,hidden,size,in_order", [
    ("block", 128, 128, False), ("block", 200, 256, False), ("row", 48, 40, False), ("block", 256, 128, True),
    ("row", 64, 96, True),
])
def test_moe_experts_in_float8(by, hidden, size, in_order):
    """Both sides round the same values to float8, so that only the order of sums differs."""
    places = choices_of(9, 3, 2, 1)
    weights = torch.rand(places.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x = random(9, hidden, dtype=torch.float16)
    gate_up = random(3, 2 * size, hidden, dtype=torch.float32, seed=2).to(torch.float8_e4m3fn)
    down = random(3, hidden, size, dtype=torch.float32, seed=3).to(torch.float8_e4m3fn)
    blocks = -(-hidden // 128)
    shapes = [(2 * size // 128, blocks), (blocks, size // 128)] if by == "block" else [(2 * size,), (hidden,)]
    generator = torch.Generator().manual_seed(4)
    scales = Scales(*(torch.rand(3, *shape, generator=generator).to(DEVICE) * 0.1 for shape in shapes), by)
    want = reference.moe_experts(x, gate_up, down, places, weights, scales)
    depth = 128 if in_order and by == "block" else 32  # tensor cores take 32 float8 values in depth
    tiles = Tiles(Tile(16, 16, depth, 2, 4, 2), Tile(16, 32, depth, 2, 4, 2), in_order)
    got = moe_experts(x, gate_up, down, places, weights, scales, tiles)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@each_dtype
@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_other_activations(activation, is_sorted, dtype, atol, rtol):
    """Whether or not the tiles are those of sorted rows."""
    activate = activation_of(activation, gated=True)
    places = choices_of(20, 3, 2, 1)
    weights = torch.rand(places.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x = random(20, 32, dtype=dtype)
    gate_up, down = random(3, 96, 32, dtype=dtype, seed=2) * 0.2, random(3, 32, 48, dtype=dtype, seed=3) * 0.2
    want = reference.moe_experts(x, gate_up, down, places, weights, activate=activate)
    tiles = Tiles(Tile(16, 16, 16, 2, 4, 2), Tile(16, 32, 16, 2, 4, 2), sorted=is_sorted)
    got = moe_experts(x, gate_up, down, places, weights, tiles=tiles, activate=activate)
    torch.testing.assert_close(got, want, atol=2 * atol, rtol=rtol)
    assert (got - reference.moe_experts(x, gate_up, down, places, weights)).abs().max() > 10 * atol
