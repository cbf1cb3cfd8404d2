"""With ``batch_invariant`` no choice of the policy depends on the number of rows, tokens or requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import fields, replace

import pytest
import torch

from baton.kernels.tuning import policy as policies
from baton.kernels.tuning.attention import VerifyTile
from baton.kernels.tuning.gemm import InvariantTile, PersistentTile
from baton.kernels.tuning.policy import Policy, policy_of, set_batch_invariant

from .h200 import FACTS, H200

INVARIANT = Policy.load(FACTS, batch_invariant=True)
ROWS = (1, 2, 8, 15, 16, 17, 32, 33, 64, 65, 100, 128, 129, 225, 256, 257, 512, 1023, 1024, 2048, 4096, 8192)
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (3072, 1024), (1024, 2048))
BF16 = torch.bfloat16

Chooser = Callable[[Policy, int], Hashable]
"""All choices of one method for a number of rows."""
ASKED: dict[str, Chooser] = {
    "gemm.invariant": lambda p, rows: tuple(p.gemm.invariant(rows, *s, 2) for s in SHAPES),
    "gemm.invariant_tiles": lambda p, rows: p.gemm.invariant_tiles,
    "gemm.small_m_max_rows": lambda p, rows: tuple(rows <= p.gemm.small_m_max_rows(*s, 2) for s in SHAPES),
    "gemm.is_persistent": lambda p, rows: tuple(p.gemm.is_persistent(*s, 2) for s in SHAPES),
    "gemm.persistent": lambda p, rows: tuple(p.gemm.persistent(rows, *s) for s in SHAPES),
    "gemm.small_m": lambda p, rows: tuple(p.gemm.small_m(rows, *s, BF16) for s in SHAPES),
    "gemm.split_k": lambda p, rows: tuple(p.gemm.split_k(rows, *s, 2) for s in SHAPES),
    "gemm.fused_reduce": lambda p, rows: tuple(p.gemm.fused_reduce(rows, *s, 2) for s in SHAPES),
    "gemm.fuses_activation": lambda p, rows: tuple(p.gemm.fuses_activation(*s, 2) for s in SHAPES),
    "gemm.warp_specialized": lambda p, rows: tuple(p.gemm.warp_specialized(rows, *s, 2) for s in SHAPES),
    "gemm.adds_residual": lambda p, rows: p.gemm.adds_residual(rows),
    "float8.max_rows": lambda p, rows: rows <= p.float8.max_rows,
    "float8.tile": lambda p, rows: tuple(p.float8.tile(by, rows, *s) for by in ("row", "block") for s in SHAPES),
    "attention.decode": lambda p, rows: tuple(p.attention.decode(dim, 2, cache, 8 * rows)
                                              for dim in (64, 128, 256) for cache in (1, 2)),
    "attention.stores_current_kv": lambda p, rows: p.attention.stores_current_kv(128, 2, 2, 8 * rows),
    "attention.decode_splits": lambda p, rows: tuple(p.attention.decode_splits(dim, 2, cache, 8 * rows)
                                                     for dim in (64, 128, 256) for cache in (1, 2)),
    "attention.decode_warp_specialized": lambda p, rows: p.attention.decode_warp_specialized(8 * rows),
    "attention.verifies": lambda p, rows: p.attention.verifies(8),
    "attention.verify": lambda p, rows: tuple(p.attention.verify(4, q_len, dim, 2, 2, 8 * rows)
                                              for q_len in (2, 4, 8) for dim in (64, 128, 256)),
    "attention.fixed_split": lambda p, rows: tuple(p.attention.fixed_split(dim, size, size, rows) for dim in (64, 256)
                                                   for size in (2, 4)),
    "attention.per_head_rows": lambda p, rows: p.attention.per_head_rows(rows),
    "attention.prefill": lambda p, rows: p.attention.prefill(256, 2),
    "attention.mla_prefill": lambda p, rows: p.attention.mla_prefill(2),
    "attention.mla_head_block": lambda p, rows: p.attention.mla_head_block(16, 2),
    "attention.mla_decode": lambda p, rows: p.attention.mla_decode(16, 2),
    "attention.mla_is_narrow": lambda p, rows: p.attention.mla_is_narrow(16, 2),
    "attention.mla_splits": lambda p, rows: p.attention.mla_splits(16, 2),
    "attention.mla_verify": lambda p, rows: tuple(p.attention.mla_verify(heads, rows, 2) for heads in (8, 16, 128)),
    "attention.mla_verify_splits": lambda p, rows: p.attention.mla_verify_splits(VerifyTile(4)),
    "packed_ints.dequantizes": lambda p, rows: p.packed_ints.dequantizes(rows),
    "packed_ints.fetches": lambda p, rows: p.packed_ints.fetches(96 * rows, 1 << 20),
    "packed_ints.tile": lambda p, rows: tuple(p.packed_ints.tile(rows, *s, 128, 2) for s in SHAPES),
    "packed_ints.expert_tile": lambda p, rows: p.packed_ints.expert_tile(rows, 8, 128, 2048, 128, 2),
    "moe.tiles": lambda p, rows: tuple(p.moe.tiles(rows, 128, 2048, 768, 8, BF16, warp) for warp in (False, True)),
}
INDEPENDENT = {"attention.verifies", "attention.mla_verify_splits", "gemm.invariant", "gemm.invariant_tiles",
               "gemm.is_persistent", "gemm.fuses_activation", "attention.prefill",
               "attention.mla_prefill", "attention.mla_head_block", "attention.mla_decode", "attention.mla_is_narrow",
               "attention.mla_splits"}
"""Choices that take no number of rows, or only where the mode is on; listed so that none is forgotten."""
SAME_ORDER = {"gemm.invariant", "attention.fixed_split"}
"""Choices that follow the rows and leave the order of sums as it is, which tests/gpu compares to the last bit."""


@pytest.mark.parametrize("name", ASKED)
def test_a_choice_is_the_same_for_all_rows(name):
    assert (len({ASKED[name](INVARIANT, rows) for rows in ROWS}) > 1) == (name in SAME_ORDER)
    assert (len({ASKED[name](H200, rows) for rows in ROWS}) > 1) == (name not in INDEPENDENT)


def test_every_chooser_is_asked():
    """A new method of a policy needs a line above: its choices, too, must obey."""
    parts = {"gemm", "float8", "attention", "moe", "packed_ints"}
    assert {field.name for field in fields(Policy)} == parts | {"facts", "all_to_all", "batch_invariant"}
    methods = {f"{part}.{name}" for part in parts for name, value in vars(type(getattr(H200, part))).items()
               if not name.startswith("_") and (callable(value) or isinstance(value, property))}
    assert methods == ASKED.keys()
    assert all(isinstance(value, tuple) for value in vars(H200.all_to_all).values())  # numbers, not asked about rows
    for part in parts:
        assert "batch_invariant" in inspect.signature(type(getattr(H200, part))).parameters


def test_splits_of_the_inner_dimension_are_fixed():
    for rows in ROWS:
        for out, width in SHAPES:
            assert INVARIANT.gemm.fused_reduce(rows, out, width, 2) is None
            assert INVARIANT.gemm.split_k(rows, out, width, 2) is None
            assert INVARIANT.float8.tile("row", rows, out, width).splits == 1
            assert INVARIANT.gemm.small_m_max_rows(out, width, 1) == 0


def test_products_of_the_mode_have_the_fastest_of_tiles_with_one_order():
    def of(rows: int, out: int, width: int = 4096) -> object:
        return INVARIANT.gemm.invariant(rows, out, width, 2)

    assert of(1, 4096) == PersistentTile(64, 1, 128, 11) and of(16, 4096) == PersistentTile(64, 1, 128, 10)
    assert of(64, 4096) == PersistentTile(64, 1, 128, 6) and of(128, 4096) == PersistentTile(64, 1, 64, 8)
    assert of(64, 28672) == PersistentTile(128, 1, 128, 4) and of(128, 28672) == INVARIANT.gemm.numbers.split_k.whole
    usual, tall, large, small = INVARIANT.gemm.invariant_tiles
    assert (of(256, 4096), of(256, 6144), of(256, 28672)) == (small, large, usual)
    assert (of(1024, 4096), of(4096, 4096), of(4096, 6144), of(4096, 28672)) == (usual, usual, tall, tall)
    assert of(4096, 4096, 100) == of(1, 4096, 100) == InvariantTile(64, 64, 64, 4, 3)  # TMA reads 16 bytes at least
    ampere = Policy.load(replace(FACTS, runs_gluon=False), batch_invariant=True)
    assert len({ampere.gemm.invariant(rows, 4096, 4096, 2) for rows in ROWS}) == 1
    assert len({INVARIANT.gemm.invariant(rows, 4096, 4096, 4) for rows in ROWS}) == 1


def test_without_triton_there_is_no_tile():
    assert Policy.load(replace(FACTS, runs_triton=False), batch_invariant=True).gemm.invariant(1, 64, 64, 2) is None
    assert H200.gemm.invariant(1, 64, 64, 2) is None


def test_the_switch_is_of_the_process():
    cpu = torch.device("cpu")
    assert not policy_of(cpu).batch_invariant
    try:
        set_batch_invariant(True)
        assert policy_of(cpu).batch_invariant and policy_of(cpu).moe.batch_invariant
    finally:
        set_batch_invariant(False)
    assert not policies.policy_of(cpu).batch_invariant
