"""Decode attention by itself: GB/s of keys and values read, beside the copy ceiling, for batches and contexts.

    python -m baton.tests.bench.paged_decode [--heads 32 --kv-heads 8] [--stored TYPE] [--sweep]
                                            [--out FILE]

One layer of a pool far larger than the L2 cache, scattered pages of 16 tokens, bfloat16 or what
is ``stored``; a CUDA graph of many layers'
runs is replayed, as in a decode step, with the plan made once in it. ``mixed`` are batches whose lengths go from 64
tokens to the context, most of them short. ``--sweep`` also tries other numbers of programs and other tiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch

from ...kernels.attention.decode_plan import plan_decode
from ...kernels.attention.paged_decode import paged_decode
from ...kernels.tuning.attention import DecodeTile
from ...kernels.tuning.policy import policy_of
from . import ceilings
from .device_time import run_seconds

PAGE, DIM = 16, 128
LAYERS, MOST_LAYERS = 8, 64
"""At least so many; more, where a few would fit the L2 cache."""
BEYOND_L2 = 512 << 20
POOL_BYTES = 24 << 30
GRID = [(1, 2048), (8, 2048), (16, 2048), (64, 2048), (256, 2048), (1, 8192), (8, 8192), (16, 8192), (64, 8192),
        (1, 32768), (8, 32768), (16, 32768)]
TILES = [DecodeTile(), DecodeTile(prefetched=0), *(DecodeTile(64, 4, stages) for stages in (2, 3, 4, 5)),
         DecodeTile(64, 2, 3)]
STORED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


class Case:
    """A batch's queries, page tables and one pool of some layers, which are read in turn."""

    def __init__(self, heads: int, kv_heads: int, lengths: list[int], stored: torch.dtype = torch.bfloat16):
        self.heads, self.kv_heads, self.lengths, self.stored = heads, kv_heads, lengths, stored
        counts = [-(-length // PAGE) for length in lengths]
        pages = sum(counts)
        self.layers = min(MOST_LAYERS, max(LAYERS, BEYOND_L2 // self.layer_bytes))
        shape = (pages, self.layers, 2, kv_heads, PAGE, DIM)
        assert np.prod(shape) * stored.itemsize <= POOL_BYTES, "the batch does not fit the pool"
        self.pool = torch.empty(shape, dtype=stored, device="cuda")
        for layer in self.pool.unbind(1):
            layer.copy_(torch.randn(layer.shape, device="cuda", dtype=torch.bfloat16))
        self.q = torch.randn(len(lengths), heads, DIM, device="cuda", dtype=torch.bfloat16)
        table = np.random.default_rng(0).permutation(pages)
        last = [length - (count - 1) * PAGE for length, count in zip(lengths, counts)]
        self.indptr, self.indices, self.last = (
            torch.tensor(x, dtype=torch.int32, device="cuda") for x in (np.cumsum([0, *counts]), table, last))

    @property
    def layer_bytes(self) -> int:
        return sum(self.lengths) * self.kv_heads * DIM * 2 * self.stored.itemsize

    def seconds(self, splits: dict[str, int], tile: DecodeTile | None) -> float:
        """Of one layer, with the kernel and tile that is usual where none is told: a graph of the plan and all layers,
        its replays timed."""
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count

        def step() -> None:
            plan = plan_decode(self.indptr, self.last, PAGE, self.kv_heads, num_sms, 1 << 17, **splits)
            for layer in range(self.layers):
                paged_decode(self.q, self.pool[:, layer, 0], self.pool[:, layer, 1], self.indptr, self.indices,
                             self.last, DIM**-0.5, plan, tile, inputs_ready=layer > 0)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return statistics.median(run_seconds(graph.replay, 12)[2:]) / self.layers


def mixed(batch: int, context: int) -> list[int]:
    """Lengths of which half are below an eighth of the context."""
    shares = np.random.default_rng(batch).random(batch) ** 3
    return [max(64, int(share * context)) for share in shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--stored", choices=STORED, default="bfloat16")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--grid", type=lambda text: [tuple(map(int, case.split("x"))) for case in text.split(",")],
                        help="batches and contexts, as 1x2048,64x2048; without it the usual ones, and mixed lengths")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    copy = ceilings.copy_tb_s() * 1e3
    torch.cuda.empty_cache()
    ways: list[dict[str, int]] = []
    if args.sweep:
        ways = [{"programs_per_sm": programs, "min_tokens": tokens, "max_rounds": rounds} for programs in (2, 3, 4, 8)
                 for tokens in (64, 128, 256) for rounds in (1, 2)]
    stored = getattr(torch, args.stored)
    grid = [(batch, context, "") for batch, context in args.grid or GRID]
    if not args.grid:
        grid += [(64, 16384, "mixed"), (256, 8192, "mixed")]
    rows = []
    print(f"copy ceiling {copy:.0f} GB/s; {args.heads} query heads, {args.kv_heads} KV heads, {args.stored}")
    print("| batch | context | programs an SM | min tokens | max rounds | tile | us a layer | GB/s | of copy |\n"
          + "|---" * 9 + "|")
    for batch, context, kind in grid:
        if batch * context * args.kv_heads * DIM * 2 * stored.itemsize * LAYERS > POOL_BYTES and not kind:
            print(f"| {batch} | {context} | left out: it does not fit the pool |")
            continue
        case = Case(args.heads, args.kv_heads, mixed(batch, context) if kind else [context] * batch,
                    stored)
        chosen = (DIM, 2, stored.itemsize, batch * args.kv_heads)
        swept = [(splits, tile) for tile in TILES for splits in ways]
        for splits, tile in [(policy_of(case.q.device).attention.decode_splits(*chosen)._asdict(), None), *swept]:
            if tile and tile.tokens > splits["min_tokens"]:
                continue
            seconds = case.seconds(splits, tile)
            row = {"batch": batch, "context": context, "kind": kind, **splits,
                   "tile": tuple(tile) if tile else "usual",
                   "us": seconds * 1e6, "gb_s": case.layer_bytes / seconds / 1e9}
            rows.append(row)
            cut = " | ".join(map(str, splits.values()))
            print(f"| {batch} {kind} | {context} | {cut} | {row['tile']} | {row['us']:.1f} | {row['gb_s']:.0f} | "
                  f"{row['gb_s'] / copy:.2f} |", flush=True)
        del case
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps({"copy_gb_s": copy, "heads": args.heads, "kv_heads": args.kv_heads,
                                        "stored": args.stored,
                                        "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
