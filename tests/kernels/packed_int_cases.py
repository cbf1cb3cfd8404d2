"""Products with packed integer weights against their twins, on a GPU or under the interpreter; collected as
kernel_cases.py is."""

from __future__ import annotations

import pytest
import torch

from baton.common.config.moe import MoESpec
from baton.common.config.quantization import choose_quantization
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.tp import TPGroup
from baton.common.layers.moe.experts import Experts
from baton.common.quantization.experts import ExpertByExpert
from baton.common.weights.slots import allocator, finish_loading
from baton.kernels import reference
from baton.kernels.arguments import ExpertBiases, PackedInts
from baton.kernels.gemm.packed_int_matmul import dequantize_ints, packed_int_matmul
from baton.kernels.moe.moe_sum import moe_sum
from baton.kernels.moe.packed_int_experts import packed_int_expert_products
from baton.kernels.rowwise.silu_and_mul import silu_and_mul
from baton.kernels.tuning.split_tile import SplitTile
from baton.tests.helpers.packed_checkpoints import FORMS, quantize
from baton.tests.kernels.kernel_cases import DEVICE, each_dtype, pytestmark, random

__all__ = ["pytestmark"]
KINDS = ["symmetric", "zeros", "sorted", "indexed", *reference.TABLES]
"""With one zero for all, with zeros, with the inputs sorted by their groups, of groups of several sizes, and of indices
of tables."""


def packed(*stack: int, out: int, width: int, bits: int, group: int, kind: str, dtype: torch.dtype,
           seed: int = 0) -> PackedInts:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (*stack, out, width), generator=generator, dtype=torch.uint8)
    scales = torch.rand(*stack, width // group, out, generator=generator) * 0.1 / 2**bits + 0.01 / 2**bits
    zeros = torch.randint(0, 2**bits + 1, scales.shape, generator=generator)
    order = torch.stack([torch.randperm(width, generator=generator) for _ in range(max(1, *stack, 1))])
    groups = torch.randint(0, width // group, order.shape, generator=generator).sort(-1).values
    pairs = torch.stack((order, groups), -2).int().view(*stack, 2, width).contiguous()
    table = kind if kind in reference.TABLES else ""
    words = reference.scale_words(scales, 1 << (bits - 1) if kind == "symmetric" else zeros)
    return PackedInts(reference.pack_ints(values, bits, group).to(DEVICE), words.to(DEVICE),
                      pairs.to(DEVICE) if kind in KINDS[2:4] else None, bits, group, kind == "indexed", table)


def of_expert(weight: PackedInts, expert: int) -> PackedInts:
    return weight._replace(**{name: value[expert] for name, value in weight._asdict().items()
                              if isinstance(value, torch.Tensor)})


@pytest.mark.parametrize("bits,group", [(4, 32), (4, 192), (4, 384), (8, 32)])
def test_packing_has_an_inverse(bits, group):
    values = torch.randint(0, 2**bits, (3, 384), dtype=torch.uint8)
    found = reference.pack_ints(values, bits, group)
    assert found.shape == (3, 384 * bits // 8) and torch.equal(reference.unpack_ints(found, bits, group), values)


def test_words_have_scales_and_zeros():
    """Those of float16 lose nothing; one is written without the other."""
    scales, zeros = torch.randn(3, 5).half().float(), torch.randint(0, 257, (3, 5))
    words = reference.scale_words(scales, zeros)
    reference.put_zeros(words, 0)
    assert torch.equal(words.view(torch.float32), scales)
    reference.put_zeros(words[1:], zeros[1:])
    reference.put_scales(words, 2 * scales)
    assert torch.equal(words & 511, torch.cat((0 * zeros[:1], zeros[1:])).int())
    assert torch.equal((words & ~511).view(torch.float32), 2 * scales)


@each_dtype
@pytest.mark.parametrize("rows,out,width,group,kind,bits", [
    *[(*case, bits) for bits in (4, 8) for case in [
        (1, 64, 128, 128, "zeros"), (17, 40, 96, 32, "zeros"), (3, 72, 192, 64, "sorted"),
        (2, 130, 320, 320, "symmetric"), (2, 24, 96, 32, "indexed")]],
    (5, 72, 192, 64, "nf4", 4), (20, 40, 96, 32, "fp4", 4)])
def test_products_equal_the_twin(rows, out, width, group, bits, kind, dtype, atol, rtol):
    """By the tile that is chosen and with splits, with whole tiles and partial ones."""
    weight = packed(out=out, width=width, bits=bits, group=group, kind=kind, dtype=dtype)
    x, bias = random(rows, width + 16, dtype=dtype)[:, :width], random(out, dtype=dtype, seed=2)
    want = reference.packed_int_matmul(x, weight, bias)
    for tile in (None, SplitTile(16, 32, 64, 3, 4, 3)):
        got = packed_int_matmul(x, weight, bias, tile=tile)
        torch.testing.assert_close(got, want, atol=atol * width**0.5, rtol=rtol)


@each_dtype
@pytest.mark.parametrize("bits,kind,width,group", [(4, "sorted", 288, 32), (4, "indexed", 288, 32),
                                                   (8, "symmetric", 288, 32), (4, "zeros", 384, 128),
                                                   (8, "zeros", 192, 192), (4, "nf4", 192, 64), (4, "fp4", 256, 256)])
def test_dequantized_weights_equal_the_twin(bits, kind, width, group, dtype, atol, rtol):
    weight = packed(out=37, width=width, bits=bits, group=group, kind=kind, dtype=dtype)
    for sort in (True, False):
        want = reference.dequantize_ints(weight, dtype, sort=sort)
        torch.testing.assert_close(dequantize_ints(weight, dtype, sort=sort), want, atol=atol, rtol=rtol)


def test_many_rows_are_multiplied_by_the_library():
    weight = packed(out=40, width=64, bits=4, group=32, kind="sorted", dtype=torch.float32)
    x = random(520, 64, dtype=torch.float32)
    torch.testing.assert_close(packed_int_matmul(x, weight), reference.packed_int_matmul(x, weight), atol=1e-4,
                               rtol=1e-4)
    assert packed_int_matmul(x[:0], weight).shape == (0, 40)


def test_a_row_does_not_depend_on_those_beside_it():
    """Products of one tile add up in one order."""
    weight = packed(out=40, width=256, bits=4, group=128, kind="zeros", dtype=torch.float16)
    x = random(16, 256, dtype=torch.float16)
    assert torch.equal(packed_int_matmul(x, weight)[3:5], packed_int_matmul(x[3:5], weight))


@pytest.mark.parametrize("form", ["awq", "gptq act-order"])
def test_a_layer_of_experts_multiplies_its_stacks(form):
    """Stacks of the checkpoint's tensors, against the linear methods that they consist of."""
    how = FORMS[form]
    stated = choose_quantization({"quantization_config": how.stated}, None)
    layer = Experts("e", MoESpec(num_experts=3, top_k=2, intermediate_size=64, layers=(0,)), 96,
                    ExpertParallel(TPGroup()), allocator(torch.float32, torch.device(DEVICE), stated))
    slots = list(layer.slots())
    for expert in range(3):
        for seed, (part, shape) in enumerate((("gate", (64, 96)), ("up", (64, 96)), ("down", (96, 64)))):
            q = quantize(torch.randn(shape), how.bits, how.group, how.symmetric, how.act_order, seed + expert)
            held = {f"e.{expert}.{part}_proj.{key}": value for key, value in how.write(q).items()}
            for slot in slots:
                if slot.name in held:
                    slot.fill(held[slot.name].to(DEVICE))
    finish_loading(slots)
    x, weights = random(5, 96, dtype=torch.float32), torch.rand(5, 2, device=DEVICE)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]], device=DEVICE)
    want = ExpertByExpert(layer.gate_up, layer.down, 0.0)(x, ids, weights)
    torch.testing.assert_close(layer(x, ids, weights), want, atol=1e-3, rtol=1e-4)


@each_dtype
@pytest.mark.parametrize("bits,kind,biased", [(4, "zeros", True), (4, "sorted", False), (8, "symmetric", False),
                                              (4, "indexed", False), (4, "nf4", False)])
def test_experts_equal_their_linear_layers(bits, kind, biased, dtype, atol, rtol):
    """Gates and ups in one stack, and in two as weights with an order of their own have them."""
    hidden, size, places, tokens = 64, 96, 3, 7
    facts = {"bits": bits, "group": 32, "kind": kind, "dtype": dtype}
    gate_up = [packed(places, out=size, width=hidden, seed=seed, **facts) for seed in (1, 2)]
    if kind not in KINDS[2:4]:
        gate_up = [packed(places, out=2 * size, width=hidden, seed=1, **facts)]
    down = packed(places, out=hidden, width=size, seed=3, **facts)
    biases = ExpertBiases(*(random(places, n, dtype=dtype) for n in (2 * size, hidden))) if biased else None
    x, weights = random(tokens, hidden, dtype=dtype), torch.rand(tokens, 2, device=DEVICE)
    ids = torch.stack([torch.randperm(places + 2)[:2] - 1 for _ in range(tokens)]).to(DEVICE)
    made = packed_int_expert_products(x, gate_up, [down], ids, biases)
    got = torch.empty_like(x)
    moe_sum(made, ids, places, weights, None, got)
    want = torch.zeros(tokens, hidden, device=DEVICE)
    for token, choice in ((ids >= 0) & (ids < places)).nonzero().tolist():
        expert = int(ids[token, choice])
        row = torch.cat([reference.packed_int_matmul(x[token][None], of_expert(part, expert)) for part in gate_up], -1)
        row = silu_and_mul(row if biases is None else row + biases.gate_up[expert])
        row = reference.packed_int_matmul(row, of_expert(down, expert), None if biases is None else biases.down[expert])
        want[token] += row[0].float() * weights[token, choice]
    torch.testing.assert_close(got, want.to(dtype), atol=8 * atol, rtol=4 * rtol)
