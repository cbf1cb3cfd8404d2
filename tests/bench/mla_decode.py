"""Latent attention's kernels at DeepSeek-V2-Lite's shape, beside the copy and matrix-product ceilings of the same run.

    python -m baton.tests.bench.mla_decode [--heads 16] [--contexts 1024,8192] [--batches 1,16,64,256]
        [--tiles 32x4x5,32x4x3,64x4x5] [--out FILE.json]

Decode: one layer's kernel over random pages, alone and with the products that absorb W_UK and W_UV, and FlashInfer's
where it is installed, all as CUDA graphs; the floor is each latent read once at the copy's speed. Prefill: a prompt
behind a cached prefix, expansion included; the floor is its arithmetic in the expanded form at the matrix product's
speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...common.attention.mla.base import absorb, values_of
from ...common.attention.mla.triton_backend import MLATritonBackend
from ...common.attention.workspace import AttentionWorkspace
from ...common.config.mla import MLASpec
from ...common.forward.forward_batch import Row, build_forward_batch
from ...common.kvcache.layout import KVLayout
from ...common.kvcache.pool import KVPool
from ...kernels.attention.decode_plan import plan_decode
from ...kernels.attention.mla_decode import mla_decode
from ...kernels.tuning.attention import DecodeTile
from ...kernels.tuning.policy import policy_of
from . import ceilings
from .device_time import captured, run_seconds

MLA = MLASpec(q_lora_rank=None, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128, scale=192**-0.5)
PAGE_SIZE = 16
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "vocab_size": 102400, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707},
    "torch_dtype": "bfloat16", "bos_token_id": 100000, "eos_token_id": 100001,
}


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median device time; the cache of the device is flushed in between, as a model's other layers would."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        work()
    return statistics.median(run_seconds(work, repeats, flush.zero_))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def decode(heads: int, batch: int, context: int, copy_tb_s: float, tile: DecodeTile) -> dict[str, Any]:
    pages_each = -(-context // PAGE_SIZE)
    pool = KVPool(KVLayout((1,), 1, MLA.latent_dim, PAGE_SIZE, "bfloat16", "latent"), batch * pages_each, "cuda")
    pool.groups[0].normal_()
    order = np.random.default_rng(0).permutation(batch * pages_each).reshape(batch, pages_each)
    rows = [Row([0], context - 1, order[b]) for b in range(batch)]
    made = build_forward_batch(rows, PAGE_SIZE, torch.device("cuda"))
    table = (made.kv_indptr, made.kv_indices, made.kv_last_page_len)
    policy = policy_of(made.kv_indptr.device)
    plan = plan_decode(made.kv_indptr, made.kv_last_page_len, PAGE_SIZE,
                       -(-heads // policy.attention.mla_head_block(heads, 2)), policy.facts.num_sms, context,
                       **policy.attention.mla_splits(heads, 2)._asdict())
    q, up, pages = random(batch, heads, MLA.qk_dim), random(heads, 256, 512) * 512**-0.5, pool.latents(0)
    absorbed, q_rope = absorb(q, up, MLA.nope_dim), q[..., MLA.nope_dim:]

    def kernel() -> torch.Tensor:
        return mla_decode(absorbed, q_rope, pages, *table, MLA.scale, plan, tile)

    def layer() -> torch.Tensor:
        latents = mla_decode(absorb(q, up, MLA.nope_dim), q_rope, pages, *table, MLA.scale, plan, tile)
        return values_of(latents, up, MLA.nope_dim)

    theirs = None
    if find_spec("flashinfer"):
        from ...common.attention.mla.flashinfer_backend import MLAFlashInferBackend
        backend = MLAFlashInferBackend(pool, MLA, heads, torch.bfloat16)
        their_plan = backend.plan(made, AttentionWorkspace(torch.device("cuda")))
        inputs = (absorbed.contiguous(), q_rope.contiguous(), pages[..., :512], pages[..., 512:])
        theirs = 1e6 * seconds(captured(lambda: their_plan.wrapper.run(*inputs)))
    floor = batch * context * MLA.latent_dim * 2 / copy_tb_s / 1e12
    found = {"tile": "x".join(map(str, tile[:3])), "batch": batch, "context": context,
             "kernel_us": 1e6 * seconds(captured(kernel)),
             "layer_us": 1e6 * seconds(captured(layer)), "flashinfer_us": theirs, "floor_us": 1e6 * floor}
    return found | {"ratio": found["kernel_us"] / found["floor_us"]}


def prefill(heads: int, new: int, prefix: int, tflops: float) -> dict[str, Any]:
    total = new + prefix
    pool = KVPool(KVLayout((1,), 1, MLA.latent_dim, PAGE_SIZE, "bfloat16", "latent"), -(-total // PAGE_SIZE), "cuda")
    pool.groups[0].normal_()
    batch = build_forward_batch([Row([0] * new, prefix, np.arange(pool.num_pages))], PAGE_SIZE, torch.device("cuda"))
    backend = MLATritonBackend(pool, MLA, heads, torch.bfloat16)
    plan = backend.plan(batch, AttentionWorkspace(torch.device("cuda")))
    q, up = random(new, heads, MLA.qk_dim), random(heads, 256, 512) * 512**-0.5
    latent, k_rope = random(new, MLA.kv_lora_rank), random(new, MLA.rope_dim)
    table = torch.randn(total, MLA.rope_dim, device="cuda")
    took = seconds(lambda: plan.run(0, q, latent, k_rope, up, table))
    pairs = new * (prefix + (new + 1) / 2)
    work = 2 * heads * (pairs * (MLA.qk_dim + MLA.v_dim) + total * MLA.kv_lora_rank * (MLA.nope_dim + MLA.v_dim))
    return {"new": new, "prefix": prefix, "layer_us": 1e6 * took, "tflops": work / took / 1e12,
            "ratio": took * tflops * 1e12 / work}


def _ints(listed: str) -> list[int]:
    return [int(number) for number in listed.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16, help="of one rank; 128 are DeepSeek-V3's on one")
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--tiles", help="TOKENSxWARPSxSTAGES of the decode kernel to compare; without it the default")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    copy, tflops = ceilings.copy_tb_s(), ceilings.matmul_tflops()
    print(f"{args.heads} heads, bfloat16; copy {copy:.2f} TB/s, matrix product {tflops:.0f} TFLOP/s")
    print("| tile | batch | context | kernel us | with absorbing us | FlashInfer us | floor us | kernel / floor |")
    print("|---" * 8 + "|")
    tiles = [policy_of(torch.device("cuda", 0)).attention.mla_decode(args.heads, 2)]
    if args.tiles:
        tiles = [DecodeTile(*map(int, name.split("x"))) for name in args.tiles.split(",")]
    decodes = []
    for tile, context, batch in itertools.product(tiles, _ints(args.contexts), _ints(args.batches)):
        row = decode(args.heads, batch, context, copy, tile)
        decodes.append(row)
        names = ("kernel_us", "layer_us", "flashinfer_us", "floor_us", "ratio")
        figures = " | ".join("-" if row[name] is None else f"{row[name]:.1f}" for name in names)
        print(f"| {row['tile']} | {batch} | {context} | {figures} |", flush=True)
    print("| prefill new | prefix | layer us | TFLOP/s | times floor |\n" + "|---" * 5 + "|")
    prefills = []
    for new, prefix in ((1024, 0), (8192, 0), (8192, 24576), (256, 16384)):
        row = prefill(args.heads, new, prefix, tflops)
        prefills.append(row)
        print(f"| {new} | {prefix} | {row['layer_us']:.0f} | {row['tflops']:.0f} | {row['ratio']:.2f} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"heads": args.heads, "copy_tb_s": copy, "matmul_tflops": tflops,
                                        "decode": decodes, "prefill": prefills}, indent=1))


if __name__ == "__main__":
    main()
