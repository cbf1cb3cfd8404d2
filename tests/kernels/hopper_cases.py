"""Launches of the Triton kernels as on an H200: types, constants and tiles are those that the launchers choose.

A case is one line: a name and a call of a launcher, with tensors that have shapes and no memory (``of``, ``fp8`` ...).
compile_for_hopper.py runs them and compiles what they launch. A kernel that a case of ``FEW`` launches is compiled in
every run of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from baton.kernels import reference
from baton.kernels.arguments import (
    ChainPages,
    ChainState,
    DeltaNet,
    ExpertBiases,
    Float8Format,
    HeadNorms,
    Int8Format,
    Int8Rows,
    KnownChains,
    Mamba2,
    Mxfp4Weights,
    NormWeight,
    PackedInts,
    RowMask,
    Scales,
    SimulatedCounts,
    StateRuns,
)
from baton.kernels.attention.current_kv import CurrentKV
from baton.kernels.attention.decode_float8_warp_specialized import decode_float8_warp_specialized
from baton.kernels.attention.decode_plan import DecodePlan, plan_decode
from baton.kernels.attention.decode_warp_specialized import decode_warp_specialized
from baton.kernels.attention.dequantize_pages import dequantize_pages
from baton.kernels.attention.fixed_split_attention import FixedSplitPlan, fixed_split_attention
from baton.kernels.attention.label_scores import label_scores
from baton.kernels.attention.mla_decode import mla_decode
from baton.kernels.attention.mla_prefill import mla_prefill, plan_mla_prefill
from baton.kernels.attention.mla_rope_and_store import mla_rope_and_store
from baton.kernels.attention.mla_verify import mla_verify
from baton.kernels.attention.move_slots import move_slots
from baton.kernels.attention.order_channels import order_channels
from baton.kernels.attention.paged_decode import paged_decode
from baton.kernels.attention.paged_prefill import paged_prefill, plan_prefill
from baton.kernels.attention.per_head_matmul import per_head_matmul
from baton.kernels.attention.rope_and_store import rope_and_store
from baton.kernels.attention.scale_by_sinks import scale_by_sinks
from baton.kernels.attention.select_tokens import select_tokens
from baton.kernels.attention.sparse_decode import sparse_decode
from baton.kernels.attention.sparse_decode_plan import SparseDecodePlan, TokenScores, plan_sparse_decode
from baton.kernels.attention.verify_attention import plan_verify, verify_attention
from baton.kernels.comm.all_reduce import (
    MIN_SLOTS,
    PeerBuffers,
    all_gather,
    all_reduce,
    all_reduce_rmsnorm,
    buffer_values,
    reduce_scatter,
)
from baton.kernels.comm.all_to_all import all_to_all_combine, all_to_all_dispatch, reduce_combined
from baton.kernels.comm.copy_blocks import copy_blocks
from baton.kernels.comm.dispatch_buffers import DispatchLayout, DispatchMemory
from baton.kernels.comm.gather_scatter_norm import reduce_scatter_rmsnorm, rmsnorm_all_gather
from baton.kernels.float8.fp8_block_matmul import block_matmul
from baton.kernels.float8.fp8_matmul import fp8_matmul
from baton.kernels.gemm.batch_invariant_matmul import batch_invariant_matmul
from baton.kernels.gemm.dense_warp_specialized import warp_specialized_matmul
from baton.kernels.gemm.packed_int_matmul import dequantize_ints, packed_int_matmul
from baton.kernels.gemm.small_m_matmul import small_m_matmul
from baton.kernels.gemm.split_k_warp_specialized import split_k_matmul, split_k_partials
from baton.kernels.gguf.packed_matmul import dequantize, packed_matmul
from baton.kernels.gguf_blocks import BLOCKS
from baton.kernels.int8.int8_matmul import int8_matmul
from baton.kernels.moe.moe_experts import moe_experts
from baton.kernels.moe.moe_topk import moe_topk
from baton.kernels.moe.mxfp4_experts import mxfp4_experts
from baton.kernels.moe.packed_int_experts import packed_int_expert_products
from baton.kernels.rowwise.fp8_quantize import quantize_by, quantize_groups, quantize_tokens
from baton.kernels.rowwise.fp8_rmsnorm import fp8_rmsnorm
from baton.kernels.rowwise.gather_rows import gather_rows
from baton.kernels.rowwise.gelu_and_mul import gelu_and_mul
from baton.kernels.rowwise.int8_quantize import quantize_int8
from baton.kernels.rowwise.joined_norms import joined_norms
from baton.kernels.rowwise.rmsnorm import rmsnorm
from baton.kernels.rowwise.silu_and_mul import silu_and_mul
from baton.kernels.rowwise.split_k_rmsnorm import split_k_rmsnorm
from baton.kernels.sampling.argmax import argmax
from baton.kernels.sampling.sample import best_perturbed, perturb, sample
from baton.kernels.speculative.accept_chains import accept_chains
from baton.kernels.speculative.place_chains import place_chains, place_rows
from baton.kernels.state.causal_conv1d import causal_conv1d
from baton.kernels.state.gated_delta_rule import gated_delta_rule
from baton.kernels.state.selective_scan import selective_scan
from baton.kernels.tuning.attention import VerifyTile
from baton.kernels.tuning.gemm import InvariantTile, PersistentTile, SplitKTile, WarpSpecializedTile
from baton.kernels.tuning.moe import Tiles, warp_specialized_tiles

from .h200 import H200, NUM_SMS

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
META = torch.device("meta")
PAGE, PAGES, LAYERS = 16, 64, 4


def of(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def fp32(*shape: int) -> torch.Tensor:
    return of(*shape, dtype=FP32)


def fp8(*shape: int) -> torch.Tensor:
    return of(*shape, dtype=FP8)


def int32(*shape: int) -> torch.Tensor:
    return of(*shape, dtype=torch.int32)


def int64(*shape: int) -> torch.Tensor:
    return of(*shape, dtype=torch.int64)


DELTA = DeltaNet(16, 2, 128, 128, 4)
MAMBA = Mamba2(1, 24, 64, 256, 4)


def runs_of(count: int, rows: int) -> StateRuns:
    """As many runs of equal numbers of rows."""
    begins = np.arange(count) * rows
    bounds = None if rows == 1 else np.stack((begins, begins + rows), 1)
    return StateRuns(int32(count), int32(count), int64(count), int64(count), rows, bounds)


def convolved(count: int, rows: int) -> None:
    tokens, channels = count * rows, DELTA.channels
    memory = fp32(64, 16, DELTA.values)[..., :DELTA.conv_values].unflatten(-1, (channels, 3))
    causal_conv1d(of(tokens, 16, channels), of(16, channels, 4), None, memory, runs_of(count, rows),
                  of(tokens, 16, channels))


def delta_ruled(count: int, rows: int) -> None:
    tokens, memory = count * rows, fp32(64, 16, DELTA.values)[..., DELTA.conv_values:]
    gated_delta_rule(of(tokens, 16, DELTA.channels), fp32(tokens, 32), fp32(tokens, 32), memory, DELTA,
                     runs_of(count, rows), of(tokens, 32, 128))


def scanned(count: int, rows: int) -> None:
    tokens, memory = count * rows, fp32(64, 1, MAMBA.values)[..., MAMBA.conv_values:]
    selective_scan(of(tokens, 1, MAMBA.channels), fp32(tokens, 24), fp32(tokens, 24), fp32(24), memory, MAMBA,
                   runs_of(count, rows), of(tokens, 24, 64))


def plan(requests: int, kv_heads: int, **splits: int | None) -> DecodePlan:
    return plan_decode(int32(requests + 1), int32(requests), PAGE, kv_heads, NUM_SMS, 8192, **splits)


def pool(kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's key and value pages, strided as the engine's pool has them."""
    pages = of(PAGES, LAYERS, 2, kv_heads, PAGE, dim, dtype=dtype)
    return pages[:, 1, 0], pages[:, 1, 1]


def split(rows: int, out: int, tile: SplitKTile, gated: bool = False) -> object:
    return split_k_matmul(of(rows, 4096), of(out, 4096), tile, gated=gated)


def latents(dtype: torch.dtype) -> torch.Tensor:
    return of(PAGES, LAYERS, 1, 1, PAGE, 576, dtype=dtype)[:, 1, 0, 0]


def store_heads(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, norms: bool,
                cache: torch.dtype | None = None, rotated: int | None = None) -> None:
    fused = of(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    parts = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts)
    weights = HeadNorms(of(dim, dtype=dtype), of(dim, dtype=dtype), 1e-6) if norms else None
    scales = (0.5, 0.25) if cache else (1.0, 1.0)
    rope_and_store(q, k, v, *pool(kv_heads, dim, cache or dtype), int64(tokens), int64(tokens),
                   fp32(8192, rotated or dim), int64(tokens), *scales, weights, inputs_ready=True)


def decode_heads(requests: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
                 cache: torch.dtype | None = None, inputs_ready: bool = True, window: int | None = None,
                 sinks: bool = False, stores_current_kv: bool = False, norms: bool = False,
                 softcap: float = 0.0) -> None:
    q, k, v = of(requests, heads + 2 * kv_heads, dim, dtype=dtype).split([heads, kv_heads, kv_heads], 1)
    weights = HeadNorms(of(dim, dtype=dtype), of(dim, dtype=dtype), 1e-6) if norms else None
    current_kv = CurrentKV(k, v, fp32(8192, dim), int64(requests), weights) if stores_current_kv else None
    splits = H200.attention.decode_splits(dim, dtype.itemsize, (cache or dtype).itemsize, requests * kv_heads)
    paged_decode(q, *pool(kv_heads, dim, cache or dtype), int32(requests + 1), int32(requests * 8), int32(requests),
                 dim**-0.5, plan(requests, kv_heads, **splits._asdict(), window=window), v_scale=0.5 if cache else 1.0,
                 inputs_ready=inputs_ready, window=window, sinks=fp32(heads) if sinks else None, current_kv=current_kv,
                 softcap=softcap)


def sparse_heads(requests: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
                 cache: torch.dtype | None = None, norms: bool = False) -> None:
    q, k, _ = of(requests, heads + 2 * kv_heads, dim, dtype=dtype).split([heads, kv_heads, kv_heads], 1)
    weights = HeadNorms(of(dim, dtype=dtype), of(dim, dtype=dtype), 1e-6) if norms else None
    q, _ = order_channels(q, k, int32(kv_heads, dim), fp32(8192, dim), int64(requests), weights)
    sparse = SparseDecodePlan.empty(requests, META)
    keys, values = pool(kv_heads, dim, cache or dtype)
    table = (int32(requests + 1), int32(requests * 8))
    plan_sparse_decode(table[0], int32(requests), PAGE, 4096, 1 << 20, sparse)
    scores = TokenScores.empty(heads, 1 << 20, META)
    label_scores(q, keys, *table, dim // 4, dim**-0.5, sparse, plan(requests, kv_heads), scores)
    selected = select_tokens(scores, sparse, 256)
    sparse_decode(q, keys, values, *table, selected, sparse.lengths, dim**-0.5, 0.5, of(requests, heads, dim,
                                                                                         dtype=dtype))


def many_heads(requests: int, heads: int, kv_heads: int, dtype: torch.dtype, inputs_ready: bool = True,
               cache: torch.dtype | None = None) -> None:
    splits = H200.attention.decode_splits(128, 2, (cache or dtype).itemsize, requests * kv_heads)._asdict()
    outs = of(requests, heads, 128, dtype=dtype), fp32(requests + 66, heads, 128), fp32(requests + 66, heads)
    compute = decode_float8_warp_specialized if cache else decode_warp_specialized
    compute(of(requests, heads + 2 * kv_heads, 128, dtype=dtype)[:, :heads], *pool(kv_heads, 128, cache or dtype),
            int32(requests + 1), int32(requests * 8), int32(requests), 128**-0.5, plan(requests, kv_heads, **splits),
            1.0, inputs_ready, outs)


def prefill_heads(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
                  cache: torch.dtype | None = None, window: int | None = None, sinks: bool = False,
                  softcap: float = 0.0) -> None:
    q = of(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)[:, :heads * dim].unflatten(-1, (-1, dim))
    blocks = plan_prefill(np.array([0, tokens], np.int32), heads // kv_heads, META)
    paged_prefill(q, *pool(kv_heads, dim, cache or dtype), blocks, int32(2), int32(2), int32(3), int32(1), dim**-0.5,
                  0.5 if cache else 1.0, window, fp32(heads) if sinks else None, softcap)


def chains(requests: int, num_drafts: int, simulated: bool) -> None:
    pages = ChainPages(int32(requests + 1), int32(requests * 8), PAGE, 0, 8192)
    state = ChainState.empty(256, 7, META)
    known = KnownChains(int64(requests), int64(requests, num_drafts + 1), int64(requests))
    placed = place_chains(state, int64(requests), known, int64(requests), pages)
    found = accept_chains(int64(requests * (num_drafts + 1)), placed, state, pages, num_drafts,
                          SimulatedCounts(int64(requests), int64(5)) if simulated else None)
    place_rows(placed.rows.starts, found.sequences, pages)


def verify_heads(requests: int, q_len: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
                 cache: torch.dtype | None = None, masked: bool = False, window: int | None = None,
                 sinks: bool = False, softcap: float = 0.0) -> None:
    q = of(requests * q_len, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    sizes = dim, dtype.itemsize, (cache or dtype).itemsize, requests * kv_heads
    tile, table = H200.attention.verify(heads // kv_heads, q_len, *sizes), (int32(requests + 1), int32(requests))
    planned = plan_verify(int32(requests + 1), *table, PAGE, kv_heads, 132, q_len, 2048, tile,
                          H200.attention.decode_splits(*sizes), window, masked)
    verify_attention(q, *pool(kv_heads, dim, cache or dtype), int32(requests + 1), table[0], int32(requests * 8),
                     table[1], dim**-0.5, planned, tile, 0.5 if cache else 1.0, window, fp32(heads) if sinks else None,
                     RowMask(int64(requests * q_len), int32(requests)) if masked else None, inputs_ready=True,
                     softcap=softcap)


def fixed_split_heads(requests: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, splits: int,
                      cache: torch.dtype | None = None, window: int | None = None, sinks: bool = False,
                      softcap: float = 0.0) -> None:
    """Rows of a decode step where there are ``splits``, else prompts of 32 rows."""
    count, group = requests if splits else 32 * requests, heads // kv_heads
    q = of(count, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    tile = H200.attention.fixed_split(dim, dtype.itemsize, (cache or dtype).itemsize, group * (1 if splits else 32))
    blocks = -(-group * count // tile.rows)
    planned = FixedSplitPlan(int32(blocks), int32(blocks), int32(blocks), splits, tile)
    fixed_split_attention(q, *pool(kv_heads, dim, cache or dtype), planned, int64(count), int32(requests + 1),
                          int32(requests + 1), int32(requests * 8), int32(requests), dim**-0.5, 0.5 if cache else 1.0,
                          window, fp32(heads) if sinks else None, inputs_ready=bool(splits), softcap=softcap)


def store_latents(tokens: int, heads: int, dtype: torch.dtype, cache: torch.dtype | None = None) -> None:
    fused = of(tokens, 576, dtype=dtype)
    mla_rope_and_store(of(tokens, heads, 192, dtype=dtype)[..., 128:], of(tokens, 512, dtype=dtype), fused[:, 512:],
                       latents(cache or dtype), int64(tokens), int64(tokens), fp32(8192, 64), int64(tokens), True,
                       0.5 if cache else 1.0)


def decode_latents(requests: int, heads: int, dtype: torch.dtype, cache: torch.dtype | None = None) -> None:
    q = of(heads, requests, 512, dtype=dtype).transpose(0, 1)
    mla_decode(q, of(requests, heads, 192, dtype=dtype)[..., 128:], latents(cache or dtype), int32(requests + 1),
               int32(requests * 8), int32(requests), 192**-0.5, plan(requests, 1), page_scale=0.5 if cache else 1.0)


def verify_latents(requests: int, q_len: int, heads: int, dtype: torch.dtype, cache: torch.dtype | None = None,
                   masked: bool = False, tile: VerifyTile | None = None) -> None:
    tile = tile or H200.attention.mla_verify(heads, q_len, dtype.itemsize)
    rows, table = int32(requests + 1), (int32(requests + 1), int32(requests))
    planned = plan_verify(rows, *table, PAGE, tile.head_blocks(heads), 132, q_len, 2048, tile,
                          H200.attention.mla_verify_splits(tile), masked=masked)
    mla_verify(of(requests * q_len, heads, 512, dtype=dtype), of(requests * q_len, heads, 192, dtype=dtype)[..., 128:],
               latents(cache or dtype), rows, table[0], int32(requests * 8), table[1], 192**-0.5, planned, tile,
               0.5 if cache else 1.0, RowMask(int64(requests * q_len), int32(requests)) if masked else None)


def prefill_latents(tokens: int, heads: int, dtype: torch.dtype, merges: bool) -> None:
    qo_indptr, kv_indptr = np.array([0, tokens], np.int32), np.array([0, -(-tokens // PAGE)], np.int32)
    (segment,) = plan_mla_prefill(qo_indptr, kv_indptr, np.array([(tokens - 1) % PAGE + 1], np.int32), PAGE, tokens * 2,
                                  META)
    kept = kv_indptr[1] * PAGE
    mla_prefill(of(tokens, heads, 192, dtype=dtype), of(kept, heads, 256, dtype=dtype),
                of(kept, 576, dtype=dtype)[:, 512:], segment, int32(2), 192**-0.5,
                of(tokens, heads, 128, dtype=FP32 if merges else dtype), fp32(tokens, heads) if merges else None)


def experts(tokens: int, places: int, hidden: int, size: int, choices: int, dtype: torch.dtype = BF16,
            scales: Scales | None = None, clamped: bool = False, tiles: Tiles | None = None) -> None:
    weights = dtype if scales is None else FP8
    moe_experts(of(tokens, hidden, dtype=dtype), of(places, 2 * size, hidden, dtype=weights),
                of(places, hidden, size, dtype=weights), int64(tokens, choices), fp32(tokens, choices), scales, tiles,
                biases=ExpertBiases(of(places, 2 * size), of(places, hidden)) if clamped else None,
                limit=7.0 if clamped else 0.0)


def packed_experts(tokens: int, places: int, hidden: int, size: int, choices: int, dtype: torch.dtype = BF16,
                   group: int = 32) -> None:
    gate_up, down = (Mxfp4Weights(of(places, out, -(-width // each // 4) * each * 2, dtype=torch.uint8),
                                  of(places, -(-width // each // 4), out, 4, dtype=torch.uint8), each)
                     for out, width, each in ((2 * size, hidden, 32), (hidden, size, group)))
    mxfp4_experts(of(tokens, hidden, dtype=dtype), gate_up, down, int64(tokens, choices), fp32(tokens, choices),
                  ExpertBiases(of(places, 2 * size), of(places, hidden)), 7.0)


def by_block(places: int, hidden: int, size: int) -> Scales:
    return Scales(fp32(places, -(-2 * size // 128), -(-hidden // 128)),
                  fp32(places, -(-hidden // 128), -(-size // 128)), "block")


def by_row(places: int, hidden: int, size: int) -> Scales:
    return Scales(fp32(places, 2 * size), fp32(places, hidden), "row")


def route(tokens: int, experts: int, dtype: torch.dtype, bias: bool = False, **how: Any) -> None:
    usual = {"top_k": 8, "scoring": "softmax", "renormalize": True, "scaling_factor": 1.0, "num_groups": 1,
             "top_groups": 1, "group_score": "max"}
    moe_topk(of(tokens, experts, dtype=dtype), fp32(experts) if bias else None, SimpleNamespace(**{**usual, **how}))


def float8_norm(rows: int, width: int, form: Float8Format) -> None:
    fp8_rmsnorm(of(rows, width), of(width), 1e-5, form, of(rows, width))


def blocks(rows: int, out: int, width: int, tall: int = 128) -> None:
    block_matmul(fp8(rows, width), fp32(rows, -(-width // 128)), fp8(out, width),
                 fp32(-(-out // tall), -(-width // 128)), (tall, 128), BF16)


def by_rows(rows: int, out: int, width: int) -> None:
    fp8_matmul(fp8(rows, width), fp32(rows, 1), fp8(out, width), fp32(out), "row", BF16)


def int8(*shape: int) -> torch.Tensor:
    return of(*shape, dtype=torch.int8)


def int8_rows(rows: int, out: int, width: int) -> None:
    q = Int8Rows(int8(rows, width), fp32(rows, 1), None, BF16)
    int8_matmul(q, int8(out, width), fp32(out))


def int8_experts(tokens: int, places: int, hidden: int, size: int, choices: int) -> None:
    moe_experts(of(tokens, hidden), int8(places, 2 * size, hidden), int8(places, hidden, size),
                int64(tokens, choices), fp32(tokens, choices), by_row(places, hidden, size))


def few_rows(rows: int, out: int, width: int, float8: bool = False, gated: bool = False,
             tile: PersistentTile | None = None) -> None:
    if float8:
        small_m_matmul(fp8(rows, width), fp8(out, width), x_scale=fp32(rows, 1), scale=fp32(out), dtype=BF16)
    else:
        small_m_matmul(of(rows, width), of(out, width), tile=tile, gated=gated)


def many_rows(rows: int, out: int, width: int, gated: bool = False, dtype: torch.dtype = BF16, tall: int = 192,
              exact: bool = False) -> None:
    tile = WarpSpecializedTile(tall, 3 if tall == 192 else 4, 16)
    warp_specialized_matmul(of(rows, width, dtype=dtype), of(out, width, dtype=dtype), tile, gated=gated, exact=exact)


def drawn(logits: torch.Tensor, truncates: bool) -> None:
    sample(logits, fp32(len(logits)), int64(7, len(logits)), truncates)


def joined(tokens: int) -> None:
    norm = NormWeight(of(4096), 1e-5)
    joined_norms(of(128256, 4096), of(tokens, 4096), norm, norm, int64(tokens))


def drafted_in_chains(requests: int) -> None:
    logits, table, drafts = of(requests, 32000), int64(7, 256)[:, :requests], int64(256, 12)
    best_perturbed(logits, fp32(requests), table, int64(4, requests)[1], drafts[:requests, 5], int64(32000))
    argmax(logits, drafts[:requests, 5], int64(32000))


def drafted(logits: torch.Tensor) -> None:
    perturb(logits, fp32(len(logits)), int64(7, len(logits)), True, int64(logits.shape[1]))


def summed(tokens: int, world: int, dtype: torch.dtype, two_shots: bool) -> None:
    all_reduce(of(tokens, 4096, dtype=dtype), peers(world), two_shots=two_shots)


def summed_and_normed(tokens: int, width: int, world: int, two_shots: bool) -> None:
    all_reduce_rmsnorm(of(tokens, width), of(tokens, width), of(width), 1e-5, peers(world), two_shots=two_shots)


def met(tokens: int, world: int) -> None:
    reduce_scatter(all_gather(of(tokens, 4096), peers(world)), peers(world))


def met_and_normed(tokens: int, width: int, world: int) -> None:
    rows, _ = rmsnorm_all_gather(of(tokens, width), of(tokens, width), of(width), 1e-5, peers(world))
    for more in (None, rows):
        reduce_scatter_rmsnorm(rows, more, of(tokens, width), of(width), 1e-5, peers(world))


def exchanged(tokens: int, width: int, world: int, float8: bool = False, choices: int = 8) -> None:
    layout = DispatchLayout(world, 8192, width, choices, float8)
    peers, most = DispatchMemory(1, layout, of(layout.nbytes, dtype=torch.uint8), int64(world)), tokens + 1
    numbers, rows = int64(tokens, choices), of(tokens, width)
    all_to_all_dispatch(rows, numbers, fp32(tokens, choices), most, 128 // world, peers)
    for positions in (None, int32(world * most * choices)):
        all_to_all_combine(of(20_000, width), positions, most, 128 // world, peers)
    for more in (None, rows):
        reduce_combined(numbers, 128 // world, peers, more)
        reduce_combined(numbers, 128 // world, peers, more, rows, of(width), 1e-5)


def peers(world: int) -> PeerBuffers:
    return PeerBuffers(1, tuple(of(buffer_values(world), dtype=torch.int16) for _ in range(world)), int32(MIN_SLOTS))


def copied(count: int, block_bytes: int) -> None:
    copy_blocks(1 << 40, 1 << 41, int64(2, count), block_bytes)


def gguf_blocks(kind: str, out: int, width: int) -> torch.Tensor:
    return of(out, BLOCKS[kind].row_bytes(width), dtype=torch.uint8)


def gguf_rows(rows: int, kind: str) -> None:
    packed_matmul(of(rows, 4096), gguf_blocks(kind, 4096, 4096), kind, of(rows, 6144)[:, 4096:5120])
def packed_ints(*shape: int, bits: int = 4, group: int = 128, kind: str = "zeros",
                dtype: torch.dtype = BF16) -> PackedInts:
    """A weight [..., out, in]; ``kind`` as in packed_int_cases.py."""
    *stack, out, width = shape
    table = kind if kind in reference.TABLES else ""
    order = int32(*stack, 2, width) if kind in ("sorted", "indexed") else None
    return PackedInts(of(*stack, out, width * bits // 8, dtype=torch.uint8), int32(*stack, width // group, out),
                      order, bits, group, kind == "indexed", table)


def packed_product(rows: int, out: int, width: int, dtype: torch.dtype = BF16, **facts: Any) -> None:
    packed_int_matmul(of(rows, width, dtype=dtype), packed_ints(out, width, dtype=dtype, **facts))


def packed_int_experts(tokens: int, places: int, hidden: int, size: int, choices: int, **facts: Any) -> None:
    packed_int_expert_products(of(tokens, hidden), [packed_ints(places, 2 * size, hidden, **facts)],
                               [packed_ints(places, hidden, size, **facts)], int64(tokens, choices))


CASES: dict[str, Callable[[], object]] = {
    **{f"gguf {kind}, 7 rows": partial(gguf_rows, 7, kind) for kind in BLOCKS},
    **{f"gguf {kind}, dequantized": partial(lambda kind: dequantize(gguf_blocks(kind, 4096, 4096), kind, BF16), kind)
       for kind in BLOCKS},
    # Llama-3-8B: 32 heads over 8, each 128 wide.
    "rmsnorm 4096": lambda: rmsnorm(of(7, 4096), of(4096), 1e-5),
    "rmsnorm 4096, residual": lambda: rmsnorm(of(7, 4096), of(4096), 1e-5, of(7, 4096)),
    "rmsnorm of heads": lambda: rmsnorm(of(7, 5120)[:, :4096].unflatten(-1, (-1, 128)), of(128), 1e-6),
    "rmsnorm 16384": lambda: rmsnorm(of(7, 16384), of(16384), 1e-5, of(7, 16384)),
    "silu_and_mul 14336": lambda: silu_and_mul(of(7, 28672)),
    "silu_and_mul 10944": lambda: silu_and_mul(of(7, 21888)),
    "causal_conv1d Qwen3-Next, decode": lambda: convolved(7, 1),
    "causal_conv1d Qwen3-Next, prompts": lambda: convolved(7, 200),
    "gated_delta_rule Qwen3-Next, decode": lambda: delta_ruled(7, 1),
    "gated_delta_rule Qwen3-Next, prompts": lambda: delta_ruled(7, 200),
    "selective_scan Falcon-H1, decode": lambda: scanned(7, 1),
    "selective_scan Falcon-H1, prompts": lambda: scanned(7, 200),
    "gelu_and_mul Gemma 2 9B": lambda: gelu_and_mul(of(7, 28672), True),
    "gelu_and_mul, exact": lambda: gelu_and_mul(of(7, 28672), False),
    "rmsnorm Gemma 2 9B, weights in float32": lambda: rmsnorm(of(7, 3584), of(3584, dtype=FP32), 1e-6, of(7, 3584)),
    "rope_and_store Llama": lambda: store_heads(7, 32, 8, 128, BF16, False),
    "rope_and_store Llama, one KV head a rank": lambda: store_heads(7, 4, 1, 128, BF16, False),
    "rope_and_store Nemotron, half of a head": lambda: store_heads(7, 48, 8, 128, BF16, False, rotated=64),
    "rope_and_store Qwen3": lambda: store_heads(7, 32, 4, 128, BF16, True),
    "rope_and_store Qwen3, float8": lambda: store_heads(7, 32, 4, 128, BF16, True, FP8),
    "rope_and_store Qwen3, float8 e5m2": lambda: store_heads(7, 32, 4, 128, BF16, True, torch.float8_e5m2),
    "paged_decode Llama": lambda: decode_heads(7, 32, 8, 128, BF16),
    "paged_decode Llama, first layer": lambda: decode_heads(7, 32, 8, 128, BF16, inputs_ready=False),
    "paged_decode Llama, float8": lambda: decode_heads(7, 32, 8, 128, BF16, FP8),
    "paged_decode Llama, float8 e5m2": lambda: decode_heads(7, 32, 8, 128, BF16, torch.float8_e5m2),
    "paged_decode Llama, one KV head a rank": lambda: decode_heads(7, 4, 1, 128, BF16),
    "paged_decode Qwen3": lambda: decode_heads(7, 32, 4, 128, BF16),
    "paged_decode Llama, takes rows in": lambda: decode_heads(7, 32, 8, 128, BF16, stores_current_kv=True),
    "paged_decode Qwen3, takes rows in": lambda: decode_heads(7, 32, 4, 128, BF16, stores_current_kv=True, norms=True),
    "paged_decode Llama, many requests": lambda: many_heads(135, 32, 8, BF16),
    "paged_decode Qwen3, many requests, first layer": lambda: many_heads(135, 32, 4, FP16, False),
    "paged_decode float8 Llama, many requests": lambda: many_heads(135, 32, 8, BF16, cache=FP8),
    "paged_decode float8 Qwen3, many requests, first layer": lambda: many_heads(135, 32, 4, FP16, False, FP8),
    "paged_decode 64 wide": lambda: decode_heads(7, 32, 8, 64, FP16),
    "paged_decode 256 wide": lambda: decode_heads(7, 8, 4, 256, BF16),
    "paged_decode float32": lambda: decode_heads(7, 32, 8, 128, FP32),
    # Gemma 2 9B: 16 heads over 8, each 256 wide, scores below 50.
    "paged_decode Gemma 2": lambda: decode_heads(7, 16, 8, 256, BF16, window=4096, softcap=50.0),
    "paged_decode Gemma 2, takes rows in": lambda: decode_heads(7, 16, 8, 256, BF16, stores_current_kv=True,
                                                                softcap=50.0),
    "paged_prefill Gemma 2": lambda: prefill_heads(40, 16, 8, 256, BF16, window=4096, softcap=50.0),
    "verify_attention Gemma 2": lambda: verify_heads(7, 4, 16, 8, 256, BF16, softcap=50.0),
    "fixed_split Gemma 2, decode": lambda: fixed_split_heads(7, 16, 8, 256, BF16, 4, softcap=50.0),
    "paged_prefill Llama": lambda: prefill_heads(40, 32, 8, 128, BF16),
    "paged_prefill Llama, float8": lambda: prefill_heads(40, 32, 8, 128, BF16, FP8),
    "paged_prefill Qwen3": lambda: prefill_heads(40, 32, 4, 128, BF16),
    "paged_prefill 256 wide": lambda: prefill_heads(40, 8, 4, 256, BF16),
    "paged_prefill float32": lambda: prefill_heads(40, 32, 8, 128, FP32),
    # gpt-oss-20b: 64 heads over 8, each 64 wide, 32 experts of 2880; and Mistral-7B-v0.1's window.
    "sparse_decode Llama": lambda: sparse_heads(7, 32, 8, 128, BF16),
    "sparse_decode Llama, float8": lambda: sparse_heads(7, 32, 8, 128, BF16, FP8),
    "sparse_decode Qwen3": lambda: sparse_heads(7, 32, 4, 128, FP16, norms=True),
    "sparse_decode float32": lambda: sparse_heads(7, 32, 8, 128, FP32),
    "sparse_decode 256 wide": lambda: sparse_heads(7, 8, 4, 256, BF16),
    "paged_decode gpt-oss": lambda: decode_heads(7, 64, 8, 64, BF16, sinks=True),
    "paged_decode gpt-oss, window": lambda: decode_heads(7, 64, 8, 64, BF16, window=128, sinks=True),
    "paged_decode gpt-oss, window, float8": lambda: decode_heads(7, 64, 8, 64, BF16, FP8, window=128, sinks=True),
    "paged_decode Mistral, window": lambda: decode_heads(7, 32, 8, 128, BF16, window=4096),
    "paged_prefill gpt-oss": lambda: prefill_heads(40, 64, 8, 64, BF16, sinks=True),
    "paged_prefill gpt-oss, window": lambda: prefill_heads(40, 64, 8, 64, BF16, window=128, sinks=True),
    "paged_prefill gpt-oss, window, float8": lambda: prefill_heads(40, 64, 8, 64, BF16, FP8, 128, True),
    "paged_prefill Mistral, window": lambda: prefill_heads(40, 32, 8, 128, BF16, window=4096),
    "fixed_split Llama, decode": lambda: fixed_split_heads(7, 32, 8, 128, BF16, 8),
    "fixed_split Llama, prompts": lambda: fixed_split_heads(7, 32, 8, 128, BF16, 0),
    "fixed_split Llama, prompts, float8": lambda: fixed_split_heads(7, 32, 8, 128, BF16, 0, FP8),
    "fixed_split gpt-oss, window": lambda: fixed_split_heads(7, 64, 8, 64, BF16, 16, None, 128, True),
    "fixed_split gpt-oss, prompts, window": lambda: fixed_split_heads(7, 64, 8, 64, BF16, 0, None, 128, True),
    "verify_attention Llama": lambda: verify_heads(7, 4, 32, 8, 128, BF16),
    "verify_attention Llama, 8 rows": lambda: verify_heads(7, 8, 32, 8, 128, BF16),
    "verify_attention Llama, tree": lambda: verify_heads(7, 16, 32, 8, 128, BF16, masked=True),
    "verify_attention Llama, float8": lambda: verify_heads(7, 4, 32, 8, 128, BF16, FP8),
    "verify_attention Qwen3, tree, float8": lambda: verify_heads(7, 8, 32, 4, 128, BF16, FP8, True),
    "verify_attention 256 wide": lambda: verify_heads(7, 4, 8, 4, 256, BF16),
    "verify_attention float32": lambda: verify_heads(7, 4, 32, 8, 128, FP32),
    "verify_attention gpt-oss, window": lambda: verify_heads(7, 4, 64, 8, 64, BF16, window=128, sinks=True),
    "verify_attention gpt-oss, window, tree": lambda: verify_heads(7, 8, 64, 8, 64, BF16, None, True, 128, True),
    "move_slots Llama": lambda: move_slots(of(64, 16, 2, 8, 64, 128), int64(7), int64(7), int64(3), int64(3, 4)),
    "move_slots odd": lambda: move_slots(of(64, 3, 1, 1, 16, 27, dtype=FP8), int64(7), int64(7), int64(3), int64(3, 4)),
    "chains of 3": lambda: chains(7, 3, False),
    "chains without drafts": lambda: chains(7, 0, False),
    "chains of 7, simulated": lambda: chains(7, 7, True),
    "scale_by_sinks": lambda: scale_by_sinks(of(7, 64, 64), fp32(7, 64), fp32(64)),
    "moe_experts gpt-oss, 7 tokens": lambda: experts(7, 32, 2880, 2880, 4, clamped=True),
    "moe_experts gpt-oss, 8192 tokens": lambda: experts(8192, 32, 2880, 2880, 4, clamped=True),
    "mxfp4_experts gpt-oss, 7 tokens": lambda: packed_experts(7, 32, 2880, 2880, 4),
    "mxfp4_experts gpt-oss, a quarter each, 150 tokens": lambda: packed_experts(150, 32, 2880, 720, 4, group=16),
    "mxfp4_experts gpt-oss, 500 tokens": lambda: packed_experts(500, 32, 2880, 2880, 4),
    "mxfp4_experts gpt-oss, 8192 tokens": lambda: packed_experts(8192, 32, 2880, 2880, 4),
    "mxfp4_experts gpt-oss, float16": lambda: packed_experts(7, 32, 2880, 2880, 4, dtype=FP16),
    "packed_int_matmul NF4, 7 rows": lambda: packed_product(7, 4096, 4096, group=64, kind="nf4"),
    "packed_int_matmul FP4, 40 rows, float16": lambda: packed_product(40, 4096, 4096, group=64, kind="fp4", dtype=FP16),
    "dequantize_ints NF4": lambda: dequantize_ints(packed_ints(4096, 4096, group=64, kind="nf4"), BF16),
    "int8_quantize 4096": lambda: quantize_int8(of(7, 4096), Int8Format()),
    "int8_quantize 14336, gated, asymmetric": lambda: quantize_int8(of(7, 28672), Int8Format(True), gated=True),
    "int8_matmul Llama, 7 rows": lambda: int8_rows(7, 6144, 4096),
    "int8_matmul Llama, 100 rows": lambda: int8_rows(100, 6144, 4096),
    "int8_matmul Llama, 4096 rows": lambda: int8_rows(4096, 6144, 4096),
    "moe_experts Qwen3 in int8, 7 tokens": lambda: int8_experts(7, 128, 2048, 768, 8),
    "moe_experts Qwen3 in int8, 8192 tokens": lambda: int8_experts(8192, 128, 2048, 768, 8),
    # DeepSeek-V2-Lite: 16 heads; DeepSeek-V3: 128.
    "mla_rope_and_store V2-Lite": lambda: store_latents(7, 16, BF16),
    "mla_rope_and_store V2-Lite, float8": lambda: store_latents(7, 16, BF16, FP8),
    "mla_decode V2-Lite": lambda: decode_latents(7, 16, BF16),
    "mla_verify V2-Lite": lambda: verify_latents(7, 4, 16, BF16),
    "mla_verify V2-Lite, 2 rows": lambda: verify_latents(7, 2, 16, BF16),
    "mla_verify V2-Lite, tree": lambda: verify_latents(7, 8, 16, BF16, None, True),
    "mla_verify V2-Lite, float8": lambda: verify_latents(7, 4, 16, BF16, FP8),
    "mla_verify V3": lambda: verify_latents(7, 4, 128, BF16),
    "mla_decode V2-Lite, float8": lambda: decode_latents(7, 16, BF16, FP8),
    "mla_decode 32 heads": lambda: decode_latents(7, 32, BF16),
    "mla_decode V3": lambda: decode_latents(7, 128, BF16),
    "mla_decode V3, float8": lambda: decode_latents(7, 128, BF16, FP8),
    "mla_decode float32": lambda: decode_latents(7, 16, FP32),
    "per_head_matmul V2-Lite, absorbed": lambda: per_head_matmul(of(7, 16, 192)[..., :128], of(16, 128, 512)),
    "per_head_matmul V2-Lite, values": lambda: per_head_matmul(of(7, 16, 512), of(16, 128, 512).transpose(1, 2)),
    "per_head_matmul V2-Lite, 100 rows": lambda: per_head_matmul(of(100, 16, 512), of(16, 128, 512).transpose(1, 2)),
    "mla_prefill V2-Lite": lambda: prefill_latents(7, 16, BF16, False),
    "mla_prefill V2-Lite, merges": lambda: prefill_latents(7, 16, BF16, True),
    "mla_prefill float32": lambda: prefill_latents(7, 16, FP32, False),
    # Qwen3-30B-A3B has 128 experts of 768, V2-Lite 64 of 1408; few and many rows an expert take other tiles.
    "moe_topk Qwen3": lambda: route(7, 128, BF16),
    "moe_topk V2-Lite": lambda: route(7, 64, BF16, top_k=6, renormalize=False),
    "moe_topk V3": lambda: route(7, 256, FP32, True, scoring="sigmoid", scaling_factor=2.5, num_groups=8, top_groups=4,
                                 group_score="top2"),
    **{f"packed_int_matmul {rows} rows, {bits} bits, {kind}, groups of {group}":
       lambda r=rows, b=bits, k=kind, g=group: packed_product(r, 4096, 4096, bits=b, kind=k, group=g)
       for rows in (7, 40, 200) for bits in (4, 8)
       for kind, group in (("symmetric", 128), ("zeros", 128), ("zeros", 32), ("sorted", 64), ("indexed", 128))},
    "packed_int_matmul float16": lambda: packed_product(7, 4096, 4096, dtype=FP16),
    "packed_int_matmul float32": lambda: packed_product(7, 4096, 4096, dtype=FP32),
    "packed_int_matmul 8 bits, float16": lambda: packed_product(7, 4096, 4096, dtype=FP16, bits=8),
    "packed_int_matmul whole columns": lambda: packed_product(7, 4096, 14336, group=14336, kind="symmetric"),
    "dequantize_ints 4 bits": lambda: dequantize_ints(packed_ints(4096, 4096), BF16),
    "dequantize_ints 8 bits": lambda: dequantize_ints(packed_ints(4096, 4096, bits=8, kind="symmetric"), BF16),
    "packed experts Qwen3, 7 tokens": lambda: packed_int_experts(7, 128, 2048, 768, 8),
    "packed experts Qwen3, 1000 tokens": lambda: packed_int_experts(1000, 128, 2048, 768, 8, kind="symmetric"),
    "packed experts Qwen3, 8 bits": lambda: packed_int_experts(1000, 128, 2048, 768, 8, bits=8),
    "packed experts Qwen3, sorted": lambda: packed_int_experts(7, 128, 2048, 768, 8, kind="sorted"),
    "moe_experts Qwen3, 7 tokens": lambda: experts(7, 128, 2048, 768, 8),
    "moe_experts Qwen3, 400 tokens": lambda: experts(400, 128, 2048, 768, 8),
    "moe_experts Qwen3, 1000 tokens": lambda: experts(1000, 128, 2048, 768, 8),
    "moe_experts Qwen3, 8192 tokens": lambda: experts(8192, 128, 2048, 768, 8),
    "moe_experts Qwen3, by warp groups": lambda: experts(8192, 128, 2048, 768, 8, tiles=warp_specialized_tiles(BF16)),
    "moe_experts float16, by warp groups": lambda: experts(8192, 128, 2048, 768, 8, FP16,
                                                           tiles=warp_specialized_tiles(FP16)),
    "moe_experts float8, by warp groups": lambda: experts(8192, 128, 2048, 768, 8, BF16, by_block(128, 2048, 768),
                                                          tiles=warp_specialized_tiles(FP8)),
    "moe_experts V2-Lite, 7 tokens": lambda: experts(7, 64, 2048, 1408, 6),
    "moe_experts V2-Lite, 8192 tokens": lambda: experts(8192, 64, 2048, 1408, 6),
    "moe_experts float8 by blocks, 7 tokens": lambda: experts(7, 128, 2048, 768, 8, BF16, by_block(128, 2048, 768)),
    "moe_experts float8 by blocks, 400 tokens": lambda: experts(400, 128, 2048, 768, 8, BF16, by_block(128, 2048, 768)),
    "moe_experts float8 by blocks, 1000 tokens": lambda: experts(1000, 128, 2048, 768, 8, BF16,
                                                                 by_block(128, 2048, 768)),
    "moe_experts float8 by blocks, 8192 tokens": lambda: experts(8192, 128, 2048, 768, 8, BF16,
                                                                 by_block(128, 2048, 768)),
    "moe_experts float8 by rows, 7 tokens": lambda: experts(7, 128, 2048, 768, 8, BF16, by_row(128, 2048, 768)),
    "moe_experts float8 by rows, 8192 tokens": lambda: experts(8192, 128, 2048, 768, 8, BF16, by_row(128, 2048, 768)),
    "moe_experts float8 by rows, V2-Lite, 7 tokens": lambda: experts(7, 64, 2048, 1408, 6, BF16,
                                                                     by_row(64, 2048, 1408)),
    "moe_experts float32, 7 tokens": lambda: experts(7, 64, 2048, 1408, 6, FP32),
    "moe_experts float32, 8192 tokens": lambda: experts(8192, 64, 2048, 1408, 6, FP32),
    "dequantize_pages": lambda: dequantize_pages(*pool(8, 128, FP8), int32(7), BF16, 0.5, 0.25),
    "dequantize_pages, scales of one": lambda: dequantize_pages(*pool(8, 128, FP8), int32(7), BF16),
    "fp8_rmsnorm 4096, a scale a token": lambda: float8_norm(7, 4096, Float8Format(4096)),
    "fp8_rmsnorm 4096, a scale a group": lambda: float8_norm(7, 4096, Float8Format(128)),
    "fp8_rmsnorm 4096, a known scale": lambda: float8_norm(7, 4096, Float8Format(4096, fp32(1))),
    "fp8_rmsnorm 16384": lambda: float8_norm(7, 16384, Float8Format(128)),
    "quantize_tokens 4096": lambda: quantize_tokens(of(7, 4096)),
    "quantize_tokens 14336, gated": lambda: quantize_tokens(of(7, 28672), gated=True),
    "quantize_groups 4096": lambda: quantize_groups(of(7, 4096), 128),
    "quantize_groups 14336, gated": lambda: quantize_groups(of(7, 28672), 128, gated=True),
    "quantize_by 4096": lambda: quantize_by(of(7, 4096), fp32(1)),
    "quantize_by 14336, gated": lambda: quantize_by(of(7, 28672), fp32(1), gated=True),
    "block_matmul 7 rows": lambda: blocks(7, 4096, 4096),
    "block_matmul 7 rows, wide": lambda: blocks(7, 28672, 4096),
    "block_matmul 60 rows": lambda: blocks(60, 4096, 4096),
    "block_matmul 60 rows, wide": lambda: blocks(60, 28672, 4096),
    "block_matmul 500 rows": lambda: blocks(500, 4096, 4096),
    "block_matmul 1000 rows": lambda: blocks(1000, 4096, 4096),
    "block_matmul 100 rows": lambda: blocks(100, 4096, 4096),
    "block_matmul 100 rows, wide": lambda: blocks(100, 28672, 4096),
    "block_matmul 60 rows, deep": lambda: blocks(60, 4096, 14336),
    "block_matmul, last group smaller": lambda: blocks(7, 2048, 10944),
    "block_matmul, blocks of 48 x 128": lambda: blocks(7, 4096, 4096, 48),
    "fp8_matmul 60 rows": lambda: by_rows(60, 4096, 4096),
    "fp8_matmul 60 rows, wide": lambda: by_rows(60, 28672, 4096),
    "fp8_matmul 60 rows, deep": lambda: by_rows(60, 4096, 14336),
    "fp8_matmul 100 rows": lambda: by_rows(100, 4096, 4096),
    "fp8_matmul 100 rows, wide": lambda: by_rows(100, 28672, 4096),
    "warp_specialized_matmul Llama": lambda: many_rows(8192, 4096, 14336),
    "warp_specialized_matmul Llama, gated": lambda: many_rows(8192, 28672, 4096, True),
    "warp_specialized_matmul Llama, gated, 128 rows": lambda: many_rows(1024, 28672, 4096, True, tall=128),
    "warp_specialized_matmul Llama, gated exactly": lambda: many_rows(8192, 28672, 4096, True, exact=True),
    "warp_specialized_matmul float16, gated": lambda: many_rows(8192, 28672, 4096, True, FP16),
    "batch_invariant_matmul": lambda: batch_invariant_matmul(
        of(100, 4096), of(4096, 4096), None, InvariantTile(64, 64, 64, 4, 3)),
    "batch_invariant_matmul float32, bias": lambda: batch_invariant_matmul(
        fp32(100, 1100), fp32(4096, 1100), fp32(4096), InvariantTile(16, 64, 32, 4, 2)),
    "small_m_matmul one row": lambda: few_rows(1, 4096, 4096),
    "small_m_matmul one row, odd width": lambda: few_rows(1, 4096, 1100),
    "small_m_matmul 7 rows": lambda: few_rows(7, 4096, 4096),
    "small_m_matmul 7 rows, wide": lambda: few_rows(7, 28672, 4096),
    "small_m_matmul one row, gated": lambda: few_rows(1, 28672, 4096, gated=True),
    "small_m_matmul 7 rows, gated": lambda: few_rows(7, 28672, 4096, gated=True),
    "small_m_matmul 7 rows, narrow": lambda: few_rows(7, 1024, 2048),
    "small_m_matmul 7 rows, odd width": lambda: few_rows(7, 4096, 4100),
    "small_m_matmul 30 rows": lambda: few_rows(30, 4096, 14336),
    "small_m_matmul 7 rows, persistent": lambda: few_rows(7, 4096, 4096, tile=H200.gemm.persistent(7, 4096, 4096)),
    "small_m_matmul 7 rows, persistent and gated": lambda: few_rows(7, 28672, 4096, gated=True,
                                                                 tile=H200.gemm.persistent(7, 28672, 4096)),
    "small_m_matmul 30 rows, persistent and gated": lambda: few_rows(30, 28672, 4096, gated=True,
                                                                  tile=H200.gemm.persistent(30, 28672, 4096)),
    "small_m_matmul 60 rows, persistent, wide": lambda: few_rows(60, 28672, 4096, gated=True,
                                                                 tile=H200.gemm.persistent(60, 28672, 4096)),
    "small_m_matmul 60 rows, persistent": lambda: few_rows(60, 4096, 14336, tile=H200.gemm.persistent(60, 4096, 14336)),
    "small_m_matmul 7 rows of float8": lambda: few_rows(7, 4096, 4096, True),
    "small_m_matmul 7 rows of float8, wide": lambda: few_rows(7, 28672, 4096, True),
    "small_m_matmul 7 rows of float8, narrow": lambda: few_rows(7, 1024, 2048, True),
    "gather_rows 4096": lambda: gather_rows(of(128256, 4096), int64(7)),
    "gather_rows 4096 of a part": lambda: gather_rows(of(64128, 4096), int64(7), 64128),
    "joined_norms 4096": lambda: joined(7),
    "argmax": lambda: argmax(fp32(7, 128256)),
    "argmax of bfloat16": lambda: argmax(of(7, 128256), int64(7)),
    "sample": lambda: drawn(fp32(7, 128256), False),
    "sample, truncated": lambda: drawn(of(7, 128256), True),
    "drafts of chains": lambda: drafted_in_chains(7),
    "perturb, reduced vocabulary": lambda: drafted(of(7, 32000)),
    "all_reduce of 2, one shot": lambda: summed(7, 2, BF16, False),
    "all_reduce of 8, one shot": lambda: summed(7, 8, BF16, False),
    "all_reduce of 2, two shots": lambda: summed(7, 2, BF16, True),
    "all_reduce of 4, two shots": lambda: summed(7, 4, BF16, True),
    "all_reduce of 8, two shots": lambda: summed(7, 8, BF16, True),
    "all_reduce of 4, float16": lambda: summed(7, 4, FP16, True),
    "all_gather and reduce_scatter of 2": lambda: met(7, 2),
    "all_gather and reduce_scatter of 8": lambda: met(7, 8),
    "all_reduce_rmsnorm 4096 of 2": lambda: summed_and_normed(7, 4096, 2, False),
    "all_reduce_rmsnorm 5120 of 2": lambda: summed_and_normed(7, 5120, 2, False),
    "all_reduce_rmsnorm 2048 of 2, 200 rows": lambda: summed_and_normed(200, 2048, 2, False),
    "all_reduce_rmsnorm 2048 of 2, 512 rows": lambda: summed_and_normed(512, 2048, 2, False),
    "all_reduce of 2, most values": lambda: summed(2 * MIN_SLOTS, 2, BF16, False),
    "all_gather and reduce_scatter of 2, most values": lambda: met(2 * MIN_SLOTS, 2),
    "all_reduce_rmsnorm 8192 of 8": lambda: summed_and_normed(7, 8192, 8, False),
    "all_reduce_rmsnorm 4096 of 4, two shots": lambda: summed_and_normed(7, 4096, 4, True),
    "all_reduce_rmsnorm 8192 of 8, two shots": lambda: summed_and_normed(7, 8192, 8, True),
    "rmsnorm_all_gather and reduce_scatter_rmsnorm 2048 of 2": lambda: met_and_normed(7, 2048, 2),
    "rmsnorm_all_gather and reduce_scatter_rmsnorm 7168 of 2": lambda: met_and_normed(7, 7168, 2),
    "rmsnorm_all_gather and reduce_scatter_rmsnorm 7168 of 8": lambda: met_and_normed(7, 7168, 8),
    "all_to_all 2048 of 2": lambda: exchanged(7, 2048, 2),
    "all_to_all 2048 of 2, float8": lambda: exchanged(7, 2048, 2, True),
    "all_to_all 7168 of 8": lambda: exchanged(7, 7168, 8),
    "all_to_all 7168 of 8, float8": lambda: exchanged(7, 7168, 8, True),
    "copy_blocks 1 MiB": lambda: copied(7, 1 << 20),
    "copy_blocks 4 KiB": lambda: copied(7, 4096),
    "copy_blocks 18 KiB, of latents": lambda: copied(7, 18432),
    "split_k_matmul 256 rows, gated": lambda: split(256, 28672, SplitKTile(256, 64, 64, 4), True),
    "split_k_rmsnorm of 4": lambda: split_k_rmsnorm(fp32(4, 256, 4096), of(4096), 1e-5, of(200, 4096)),
    "split_k_matmul 128 rows": lambda: split(128, 128256, SplitKTile(128, 128, 64, 4)),
    "split_k_partials 256 rows": lambda: split_k_partials(of(256, 4096), of(4096, 4096), SplitKTile(256, 64, 64, 4, 4)),
    "copy_blocks 24 bytes": lambda: copied(7, 24),
    "copy_blocks 9 bytes": lambda: copied(7, 9),
}

FEW = ["causal_conv1d Qwen3-Next, prompts", "gated_delta_rule Qwen3-Next, decode",
       "gated_delta_rule Qwen3-Next, prompts", "selective_scan Falcon-H1, prompts", "gelu_and_mul Gemma 2 9B",
       "int8_quantize 4096", "mxfp4_experts gpt-oss, 7 tokens", "packed_int_matmul NF4, 7 rows",
       "int8_matmul Llama, 7 rows",
       "rmsnorm 4096, residual", "scale_by_sinks", "fp8_rmsnorm 4096, a scale a group", "silu_and_mul 14336",
       "rope_and_store Qwen3, float8", "paged_decode Qwen3", "paged_prefill Llama", "mla_rope_and_store V2-Lite",
       "sparse_decode Llama",
       "paged_decode Llama, many requests", "paged_decode float8 Llama, many requests",
       "verify_attention Llama, 8 rows",
       "fixed_split Llama, decode", "fixed_split Llama, prompts", "move_slots Llama",
       "chains of 3", "chains without drafts", "chains of 7, simulated",
       "mla_decode V2-Lite", "mla_decode V3", "mla_verify V2-Lite", "mla_verify V2-Lite, tree",
       "per_head_matmul V2-Lite, absorbed",
       "mla_prefill V2-Lite, merges",
       "moe_topk Qwen3", "moe_experts Qwen3, by warp groups", "warp_specialized_matmul Llama, gated",
       "moe_experts Qwen3, 7 tokens", "moe_experts float8 by rows, 8192 tokens", "block_matmul 7 rows",
       "packed_int_matmul 7 rows, 4 bits, zeros, groups of 128", "dequantize_ints 4 bits",
       "packed experts Qwen3, 7 tokens", "dequantize_pages", "batch_invariant_matmul",
       "small_m_matmul one row", "small_m_matmul 7 rows of float8",
       "small_m_matmul 7 rows, persistent",
       "split_k_matmul 256 rows, gated", "split_k_partials 256 rows", "split_k_rmsnorm of 4",
       "gather_rows 4096", "gather_rows 4096 of a part", "joined_norms 4096", "argmax of bfloat16",
       "sample, truncated", "perturb, reduced vocabulary", "drafts of chains",
       "all_reduce of 2, one shot", "all_reduce of 2, two shots",
       "all_reduce_rmsnorm 4096 of 2", "all_gather and reduce_scatter of 2",
       "rmsnorm_all_gather and reduce_scatter_rmsnorm 2048 of 2", "all_to_all 2048 of 2", "copy_blocks 4 KiB",
       "gguf Q4_K, 7 rows", "gguf Q6_K, dequantized"]
"""Cases that launch each kernel at least once; test_compiles_for_hopper.py names a missing one."""

OTHER_SIZES: dict[str, Callable[[int], object]] = {
    "gather_rows 4096": lambda n: gather_rows(of(n, 4096), int64(n)),
    "joined_norms 4096": joined,
    "chains of 3": lambda n: chains(n, 3, False),
    "drafts of chains": drafted_in_chains,
    "scale_by_sinks": lambda n: scale_by_sinks(of(n, 64, 64), fp32(n, 64), fp32(64)),
    "sparse_decode Llama": lambda n: sparse_heads(n, 32, 8, 128, BF16),
    "paged_decode gpt-oss, window": lambda n: decode_heads(n, 64, 8, 64, BF16, window=128, sinks=True),
    "paged_prefill gpt-oss, window": lambda n: prefill_heads(n * 32, 64, 8, 64, BF16, window=128, sinks=True),
    "move_slots Llama": lambda n: move_slots(of(64, 16, 2, 8, 64, 128), int64(4 * n), int64(4 * n), int64(n),
                                             int64(n, 4)),
    "fixed_split Llama, prompts": lambda n: fixed_split_heads(n, 32, 8, 128, BF16, 0),
    "verify_attention Llama, 8 rows": lambda n: verify_heads(n, 8, 32, 8, 128, BF16),
    "rmsnorm 4096, residual": lambda n: rmsnorm(of(n, 4096), of(4096), 1e-5, of(n, 4096)),
    "fp8_rmsnorm 4096, a scale a group": lambda n: float8_norm(n, 4096, Float8Format(128)),
    "dequantize_pages": lambda n: dequantize_pages(*pool(8, 128, FP8), int32(n), BF16, 0.5, 0.25),
    "silu_and_mul 14336": lambda n: silu_and_mul(of(n, 28672)),
    "rope_and_store Qwen3, float8": lambda n: store_heads(n, 32, 4, 128, BF16, True, FP8),
    "paged_decode Qwen3": lambda n: decode_heads(n, 32, 4, 128, BF16),
    "paged_decode Llama, many requests": lambda n: many_heads(128 + n, 32, 8, BF16),
    "paged_decode float8 Llama, many requests": lambda n: many_heads(128 + n, 32, 8, BF16, cache=FP8),
    "paged_decode Qwen3, takes rows in": lambda n: decode_heads(n, 32, 4, 128, BF16, stores_current_kv=True,
                                                                norms=True),
    "paged_prefill Llama": lambda n: prefill_heads(n * 32, 32, 8, 128, BF16),
    "mla_rope_and_store V2-Lite": lambda n: store_latents(n, 16, BF16),
    "mla_decode V2-Lite": lambda n: decode_latents(n, 16, BF16),
    "mla_verify V2-Lite": lambda n: verify_latents(n, 4, 16, BF16),
    "per_head_matmul V2-Lite, absorbed": lambda n: per_head_matmul(of(n, 16, 192)[..., :128], of(16, 128, 512)),
    "mla_prefill V2-Lite, merges": lambda n: prefill_latents(n * 128, 16, BF16, True),
    "moe_topk Qwen3": lambda n: route(n, 128, BF16),
    "moe_experts Qwen3, 7 tokens": lambda n: experts(n, 128, 2048, 768, 8),
    "moe_experts Qwen3, by warp groups": lambda n: experts(8192 + n, 128, 2048, 768, 8,
                                                           tiles=warp_specialized_tiles(BF16)),
    "moe_experts float8 by rows, 8192 tokens": lambda n: experts(8192 + n, 128, 2048, 768, 8, BF16,
                                                                 by_row(128, 2048, 768)),
    "block_matmul 7 rows": lambda n: blocks(n, 4096, 4096),
    "warp_specialized_matmul Llama, gated": lambda n: many_rows(8176 + n, 28672, 4096, True),
    "small_m_matmul 7 rows of float8": lambda n: few_rows(n, 4096, 4096, True),
    "split_k_partials 256 rows": lambda n: split_k_partials(of(200 + n, 4096), of(4096, 4096),
                                                            SplitKTile(256, 64, 64, 4, 4)),
    "split_k_rmsnorm of 4": lambda n: split_k_rmsnorm(fp32(4, 256, 4096), of(4096), 1e-5, of(n, 4096)),
    "split_k_matmul 256 rows, gated": lambda n: split(200 + n, 28672, SplitKTile(256, 64, 64, 4), True),
    "argmax": lambda n: argmax(fp32(n, 128256)),
    "argmax of bfloat16": lambda n: argmax(of(n, 128256), int64(n)),
    "sample, truncated": lambda n: drawn(of(n, 128256), True),
    "perturb, reduced vocabulary": lambda n: drafted(of(n, 32000)),
    "all_reduce of 2, one shot": lambda n: summed(n, 2, BF16, False),
    "all_reduce of 2, two shots": lambda n: summed(n, 2, BF16, True),
    "all_reduce_rmsnorm 4096 of 2": lambda n: summed_and_normed(n, 4096, 2, False),
    "all_gather and reduce_scatter of 2": lambda n: met(n, 2),
    "rmsnorm_all_gather and reduce_scatter_rmsnorm 2048 of 2": lambda n: met_and_normed(n, 2048, 2),
    "all_to_all 2048 of 2": lambda n: exchanged(n, 2048, 2),
    "copy_blocks 4 KiB": lambda n: copied(n, 4096),
    "gguf Q4_K, 7 rows": lambda n: gguf_rows(n, "Q4_K"),
}
"""Cases by the size of their batch: ``SIZES`` must not compile another kernel, since requests would wait for it."""
SIZES = (1, 3, 4, 15, 16)

MOST_SPILLED = 512
SPILL_MORE = {"paged_prefill float32": 2048, "mla_prefill float32": 2048}
"""Bytes that a thread may spill, and cases that may spill more: float32 has no tensor cores, and only tests use it."""
