"""Attention of verify steps by itself: us a layer and GB/s of keys and values, over tiles, beside plain decode of the
same bytes and FlashInfer's kernels.

    python -m baton.tests.bench.verify_attention [--only heads,latents,tree,peers] [--seconds 150] [--out FILE]

One layer of a pool far larger than the L2 cache, scattered pages of 16 tokens; a CUDA graph of many layers' runs is
replayed, as in a verify step, with the plan made once in it. ``policy`` is the tile that the server takes. Errors are
the largest difference from the reference in float32, of three requests. The peers are compiled meanwhile, each in a
process of its own: FlashInfer's XQA, and its prefill wrapper.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...kernels import reference
from ...kernels.arguments import RowMask
from ...kernels.attention.decode_plan import plan_decode
from ...kernels.attention.mla_decode import mla_decode
from ...kernels.attention.mla_verify import mla_verify
from ...kernels.attention.verify_attention import plan_verify, verify_attention, verify_tile
from ...kernels.tuning.attention import DecodeSplits, VerifyTile
from ...kernels.tuning.policy import policy_of
from . import ceilings
from .device_time import run_seconds
from .paged_decode import DIM, PAGE, Case, mixed

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
GRID = [(1, 2048), (16, 2048), (64, 2048), (128, 2048), (256, 2048), (1, 8192), (16, 8192), (64, 8192)]
WIDTHS = (2, 4, 6, 8)
TILES = [(64, 4, 2), (64, 4, 3), (64, 4, 4), (32, 4, 3), (128, 4, 2), (128, 8, 2)]
SPLITS = [DecodeSplits(2, 128, 2), DecodeSplits(4, 128, 2), DecodeSplits(8, 256, 1)]
LATENT_TILES = [(32, 8, 4, False), (64, 8, 2, False), (64, 4, 2, False), (32, 4, 3, True), (32, 8, 5, True)]
LATENT_SPLITS = [DecodeSplits(1, 64), DecodeSplits(2, 64), DecodeSplits(8, 256)]
RANK, ROPE = 512, 64
Row = dict[str, Any]


class Clock:
    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


def graph_us(step: Callable[[], object], layers: int) -> float:
    """Microseconds a layer of a graph of all."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return statistics.median(run_seconds(graph.replay, 7)[2:]) / layers * 1e6


def int32(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def trees(requests: int, width: int) -> RowMask:
    """Random trees of ``width`` nodes."""
    random, words = np.random.default_rng(0), []
    for _ in range(requests):
        tree = [1]
        for node in range(1, width):
            tree.append(tree[int(random.integers(node))] | 1 << node)
        words += tree
    return RowMask(torch.tensor(words, device="cuda"), int32([width] * requests))


def sampled(case: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Some requests of a case, and a page table of theirs alone."""
    some = sorted({0, len(case.lengths) // 2, len(case.lengths) - 1})
    indptr = case.indptr.tolist()
    pages = [case.indices[indptr[b]:indptr[b + 1]] for b in some]
    return some, [int32(np.cumsum([0, *map(len, pages)])), torch.cat(pages), case.last[some]]


class Heads:
    """Verify steps over a batch's keys and values."""

    def __init__(self, batch: int, context: int, stored: torch.dtype, kind: str = ""):
        self.case = Case(32, 8, mixed(batch, context) if kind else [context] * batch, stored)
        self.batch, self.context, self.kind, self.stored = batch, context, kind, stored
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def q(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.randn(self.batch * width, 32, DIM, device="cuda", dtype=BF16),
                int32(range(0, self.batch * width + 1, width)))

    def step(self, width: int, tile: VerifyTile, splits: DecodeSplits, q: torch.Tensor, rows: torch.Tensor,
             mask: RowMask | None, layers: int | None = None) -> torch.Tensor:
        case = self.case
        table = case.indptr, case.indices, case.last
        plan = plan_verify(rows, case.indptr, case.last, PAGE, 8, self.sms, width, max(case.lengths), tile, splits,
                           masked=mask is not None)
        for layer in range(layers or case.layers):
            out = verify_attention(q, case.pool[:, layer, 0], case.pool[:, layer, 1], rows, *table, DIM**-0.5, plan,
                                   tile, mask=mask, inputs_ready=layer > 0)
        return out

    def expected(self, width: int, q: torch.Tensor, mask: RowMask | None) -> tuple[torch.Tensor, torch.Tensor]:
        some, table = sampled(self.case)
        rows = torch.cat([torch.arange(b * width, (b + 1) * width, device="cuda") for b in some])
        words = (mask.words[rows], mask.counts[some]) if mask else ()
        pages = [self.case.pool[:, 0, i] for i in (0, 1)]
        used = table[1].long()
        values = [x.view(torch.uint8) if x.itemsize == 1 else x for x in pages]  # not every device indexes float8
        return rows, reference.paged_attention(
            q[rows].float(), *(x[used].view(self.stored).float() for x in values),
            int32(range(0, len(rows) + 1, width)), table[0],
            torch.arange(len(used), device="cuda"), table[2], DIM**-0.5, 1.0, None, None, *words)

    def measure(self, width: int, tree: bool, clock: Clock) -> list[Row]:
        """The policy's tile, then others; the last has the smallest time."""
        q, rows = self.q(width)
        mask = trees(self.batch, width) if tree else None
        at, want = self.expected(width, q, mask)
        tile, splits = verify_tile(q, self.case.pool[:, 0, 0], self.batch, width)
        tried, found = [(tile, splits)], []
        few = self.batch <= 16
        tried += [(VerifyTile(tile.rows, *size), cut) for size in TILES for cut in (SPLITS if few else SPLITS[1:2])]
        tried += [(tile._replace(prefetched=ahead), splits) for ahead in (0, 2)] if few else []
        tried += [(tile._replace(rows=4), splits)] if width > 4 else []
        for i, (tile, splits) in enumerate(tried):
            if i and (clock.left < 0 or tile.tokens > splits.min_tokens):
                continue
            try:
                error = (self.step(width, tile, splits, q, rows, mask, 1)[at].float() - want).abs().max().item()
                us = graph_us(lambda t=tile, s=splits: self.step(width, t, s, q, rows, mask), self.case.layers)
            except Exception as failed:  # a tile that does not fit the card's shared memory
                print(f"  {tile} left out: {type(failed).__name__} {str(failed)[:80]}", flush=True)
                continue
            found.append({"what": "tree" if tree else "heads", "batch": self.batch, "context": self.context,
                          "kind": self.kind, "width": width, "stored": str(self.stored)[6:], "tile": list(tile[:5]),
                          "splits": list(splits), "us": us, "gb_s": self.case.layer_bytes / us / 1e3, "error": error})
        return found

    def decode_us(self) -> float:
        """Plain decode of the same keys and values, by the policy's kernel."""
        splits = policy_of(self.case.q.device).attention.decode_splits(DIM, 2, self.stored.itemsize, 8 * self.batch)
        return self.case.seconds(splits._asdict(), None) * 1e6


class Latents:
    """Verify steps over a batch's latents: a program's rows are query rows and heads together."""

    def __init__(self, heads: int, batch: int, context: int):
        self.heads, self.batch, self.context = heads, batch, context
        pages = -(-context // PAGE)
        self.bytes = batch * context * (RANK + ROPE) * 2
        self.layers = min(64, max(4, (256 << 20) // self.bytes))
        self.pool = torch.randn(batch * pages, self.layers, PAGE, RANK + ROPE, device="cuda", dtype=BF16)
        self.lengths = [context] * batch
        self.indptr = int32(range(0, batch * pages + 1, pages))
        self.last = int32([context - (pages - 1) * PAGE] * batch)
        self.indices = int32(np.random.default_rng(0).permutation(batch * pages))
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def rows_as_requests_us(self, width: int) -> float:
        """Each row a request of its own, which reads all latents: plain decode where ``width`` is 1."""
        policy = policy_of(self.pool.device).attention
        q, qr = (torch.randn(self.batch * width, self.heads, n, device="cuda", dtype=BF16) for n in (RANK, ROPE))
        each = len(self.indices) // self.batch
        indices = self.indices.view(self.batch, each).repeat_interleave(width, 0).flatten()
        indptr, last = int32(range(0, len(indices) + 1, each)), self.last.repeat_interleave(width)
        blocks = -(-self.heads // policy.mla_head_block(self.heads, 2))

        def step() -> None:
            plan = plan_decode(indptr, last, PAGE, blocks, self.sms, self.context,
                               **policy.mla_splits(self.heads, 2)._asdict())
            for layer in range(self.layers):
                mla_decode(q, qr, self.pool[:, layer], indptr, indices, last, 192**-0.5, plan)

        return graph_us(step, self.layers)

    def q(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, qr = (torch.randn(self.batch * width, self.heads, n, device="cuda", dtype=BF16) for n in (RANK, ROPE))
        return q, qr, int32(range(0, self.batch * width + 1, width))

    def step(self, width: int, tile: VerifyTile, splits: DecodeSplits, q: torch.Tensor, qr: torch.Tensor,
             rows: torch.Tensor, layers: int | None = None) -> torch.Tensor:
        plan = plan_verify(rows, self.indptr, self.last, PAGE, tile.head_blocks(self.heads), self.sms, width,
                           self.context, tile, splits)
        for layer in range(layers or self.layers):
            out = mla_verify(q, qr, self.pool[:, layer], rows, self.indptr, self.indices, self.last, 192**-0.5, plan,
                             tile)
        return out

    def measure(self, width: int, clock: Clock) -> list[Row]:
        policy = policy_of(self.pool.device).attention
        q, qr, rows = self.q(width)
        some, table = sampled(self)
        at = torch.cat([torch.arange(b * width, (b + 1) * width, device="cuda") for b in some])
        want = reference.mla_attention(q[at].float(), qr[at].float(), self.pool[:, 0],
                                       int32(range(0, len(at) + 1, width)), *table, 192**-0.5)
        usual, found = policy.mla_verify(self.heads, width, 2), []
        tried = [(usual, policy.mla_verify_splits(usual))]
        tried += [(usual._replace(tokens=t, warps=w, stages=s, transposed=across, warp_specialized=False), cut)
                  for t, w, s, across in LATENT_TILES for cut in LATENT_SPLITS]
        if self.heads * width > 32 and self.heads <= 32:
            other = usual._replace(rows=32 // self.heads, stages=5, transposed=True, warp_specialized=False)
            tried += [(other, LATENT_SPLITS[1])]
        for i, (tile, splits) in enumerate(tried):
            if i and clock.left < 0:
                continue
            try:
                error = (self.step(width, tile, splits, q, qr, rows, 1)[at].float() - want).abs().max().item()
                us = graph_us(lambda t=tile, s=splits: self.step(width, t, s, q, qr, rows), self.layers)
            except Exception as failed:  # a tile that does not fit the card's shared memory
                print(f"  {tile} left out: {type(failed).__name__} {str(failed)[:80]}", flush=True)
                continue
            found.append({"what": f"latents {self.heads}", "batch": self.batch, "context": self.context, "kind": "",
                          "width": width, "stored": "bfloat16",
                          "tile": [*tile[:4], "transposed" if tile.transposed else "rows"], "splits": list(splits),
                          "us": us, "gb_s": self.bytes / us / 1e3, "error": error})
        return found


class Peers:
    """FlashInfer's kernels, compiled in the background from the start on."""

    def __init__(self, widths: Iterable[int]):
        jobs = [("xqa", width, stored) for stored in ("bfloat16", "float8_e4m3fn") for width in widths]
        self._builds = {job: subprocess.Popen([sys.executable, "-c", _BUILD, *map(str, job)],
                                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                        for job in [("prefill", 0, "bfloat16"), *jobs]}

    def ready(self, job: tuple[str, int, str], clock: Clock) -> bool:
        build = self._builds[job]
        try:
            build.wait(max(0.0, clock.left))
        except subprocess.TimeoutExpired:
            return False
        if build.returncode:
            print(f"  {job}: {(build.stderr.read() if build.stderr else b'').decode()[-200:]}", flush=True)
        return build.returncode == 0

    def close(self) -> None:
        for build in self._builds.values():
            build.kill()


_BUILD = """
import sys, torch
kind, width, stored = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])
if kind == "xqa":
    from flashinfer.xqa import get_xqa_module
    get_xqa_module(torch.bfloat16, stored, 16, 128, 4, False, torch.bfloat16, width)
else:
    import flashinfer
    scratch = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    i = lambda *x: torch.tensor(x, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "HND", backend="fa2")
    wrapper.plan(i(0, 2), i(0, 1), i(0), i(8), 32, 8, 128, 16, causal=True, q_data_type=torch.bfloat16)
"""


def xqa_us(heads: Heads, width: int) -> tuple[float, float]:
    """``(us a layer, error)`` of FlashInfer's XQA over the same pages, with causal masks among a request's rows."""
    from flashinfer.xqa import xqa
    case = heads.case
    q, _ = heads.q(width)
    at, want = heads.expected(width, q, None)
    tables = case.indices.view(heads.batch, -1)
    lengths = torch.tensor(case.lengths, device="cuda", dtype=torch.int32).view(torch.uint32)[:, None]
    bits = torch.tensor([[(2 << row) - 1, 0] for row in range(width)], dtype=torch.int32, device="cuda")
    mask = bits.to(torch.int16).view(torch.uint16).expand(heads.batch, width, 2).contiguous()
    out = torch.empty(heads.batch, 1, width, 32, DIM, device="cuda", dtype=BF16)
    scratch = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    semaphores = torch.zeros(4 * (8 * heads.batch + 8), dtype=torch.int32, device="cuda").view(torch.uint32)

    def step(layers: int = case.layers) -> torch.Tensor:
        for layer in range(layers):
            xqa(q.view(out.shape), case.pool[:, layer, 0], case.pool[:, layer, 1], tables, lengths, out, scratch,
                semaphores, 8, PAGE, kv_layout="HND", q_seq_len=width, mask=mask)
        return out.view(q.shape)

    error = (step(1)[at].float() - want).abs().max().item()
    return graph_us(step, case.layers), error


def prefill_us(heads: Heads, width: int) -> tuple[float, float]:
    """``(us a layer, error)`` of FlashInfer's prefill kernel over the same pages."""
    import flashinfer
    case = heads.case
    q, rows = heads.q(width)
    at, want = heads.expected(width, q, None)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "HND", backend="fa2")
    wrapper.plan(rows, case.indptr, case.indices, case.last, 32, 8, DIM, PAGE, causal=True, q_data_type=BF16)
    out = torch.empty_like(q)

    def step(layers: int = case.layers) -> torch.Tensor:
        for layer in range(layers):
            wrapper.run(q, (case.pool[:, layer, 0], case.pool[:, layer, 1]), out=out)
        return out

    error = (step(1)[at].float() - want).abs().max().item()
    return graph_us(step, case.layers), error


def line(row: Row, note: str) -> None:
    where = f"{row['batch']}x{row['context']}{row['kind']} w{row['width']} {row['stored'][:8]}"
    print(f"{row['what']:11} {where:26} {note:12} {row['us']:7.1f} us {row['gb_s']:5.0f} GB/s error {row['error']:.4f} "
          f"tile {row['tile']} splits {row['splits']}", flush=True)


def report(found: list[Row], kept: list[Row], decode: float) -> None:
    """Prints the policy's tile and the three fastest, with the share of plain decode's rate."""
    kept += [row | {"decode_us": decode} for row in found]
    if not found:
        return
    line(found[0], f"policy {decode / found[0]['us']:.2f}")
    for row in sorted(found, key=lambda row: row["us"])[:3]:
        line(row, f"best {decode / row['us']:.2f}")
    worst = max(found, key=lambda row: row["error"])
    if worst["error"] > 0.02:
        line(worst, "LARGEST ERR")


def measure_heads(grid: list[tuple[int, int, str]], widths: Iterable[int], tree: bool, stored: torch.dtype,
                  clock: Clock, kept: list[Row]) -> None:
    for batch, context, kind in grid:
        heads = Heads(batch, context, stored, kind)
        decode = heads.decode_us()
        print(f"-- {batch}x{context}{kind} {stored}: plain decode {decode:.1f} us, "
              f"{heads.case.layer_bytes / decode / 1e3:.0f} GB/s; {clock.left:.0f} s left", flush=True)
        for width in widths:
            report(heads.measure(width, tree, clock), kept, decode)
        del heads
        torch.cuda.empty_cache()


def measure_latents(clock: Clock, kept: list[Row]) -> None:
    for heads, batch, context in [(16, 1, 2048), (16, 16, 2048), (16, 64, 2048), (16, 128, 2048), (16, 64, 8192),
                                  (128, 1, 2048), (128, 16, 2048), (128, 64, 2048)]:
        latents = Latents(heads, batch, context)
        decode = latents.rows_as_requests_us(1)
        print(f"-- latents {heads} heads {batch}x{context}: plain decode {decode:.1f} us, "
              f"{latents.bytes / decode / 1e3:.0f} GB/s; {clock.left:.0f} s left", flush=True)
        for width in (2, 4, 8):
            if clock.left > 0:
                print(f"   w{width}: rows as requests {latents.rows_as_requests_us(width):.1f} us", flush=True)
            report(latents.measure(width, clock), kept, decode)
        del latents
        torch.cuda.empty_cache()


def measure_peers(peers: Peers, widths: Iterable[int], clock: Clock, kept: list[Row]) -> None:
    for stored, (batch, context) in [(s, g) for s in (BF16, FP8) for g in GRID if g[0] in (1, 16, 64, 256)]:
        heads = Heads(batch, context, stored)
        for width in widths:
            for name, run in (("xqa", xqa_us), ("prefill", prefill_us)):
                job = (name, width if name == "xqa" else 0, str(stored)[6:])
                if (name == "prefill" and stored is FP8) or not peers.ready(job, clock):
                    continue
                try:
                    us, error = run(heads, width)
                except Exception as failed:
                    print(f"  {name} {batch}x{context} w{width}: {type(failed).__name__} {str(failed)[:200]}")
                    continue
                kept.append({"what": name, "batch": batch, "context": context, "kind": "", "width": width,
                             "stored": str(stored)[6:], "tile": [], "splits": [], "us": us, "error": error,
                             "gb_s": heads.case.layer_bytes / us / 1e3})
                line(kept[-1], "FlashInfer")
        del heads
        torch.cuda.empty_cache()


def warm(share: int, shares: int) -> None:
    """Compiles this process's share of the kernels, which Triton keeps on disk, by tiny steps."""
    jobs = [("heads", stored, width, tile) for stored in (BF16, FP8) for width in (2, 4, 8) for tile in TILES]
    jobs += [("latents", heads, width, tile) for heads in (16, 128) for width in (2, 4, 8) for tile in LATENT_TILES]
    cases: dict[Any, Any] = {}
    for kind, of, width, size in jobs[share::shares]:
        try:
            if kind == "heads":
                case = cases.get(of) or cases.setdefault(of, Heads(1, 512, of))
                q, rows = case.q(width)
                usual = verify_tile(q, case.case.pool[:, 0, 0], 1, width)[0]
                case.step(width, VerifyTile(usual.rows, *size), SPLITS[0], q, rows, None, 2)
            else:
                case = cases.get(of) or cases.setdefault(of, Latents(of, 1, 512))
                usual = policy_of(case.pool.device).attention.mla_verify(of, width, 2)
                case.step(width, usual._replace(tokens=size[0], warps=size[1], stages=size[2], transposed=size[3]),
                          LATENT_SPLITS[1], *case.q(width), 1)
        except Exception as failed:  # measured later, it says so there
            print(type(failed).__name__, file=sys.stderr)


def warm_all(shares: int) -> None:
    begun = time.monotonic()
    builds = [subprocess.Popen([sys.executable, "-m", "baton.tests.bench.verify_attention", "--warm", str(share),
                                str(shares)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
              for share in range(shares)]
    for build in builds:
        try:
            build.wait(max(0.0, 60 - time.monotonic() + begun))
        except subprocess.TimeoutExpired:
            build.kill()
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="heads,latents,tree,peers", help="parts, separated by commas")
    parser.add_argument("--seconds", type=float, default=150, help="after these only policies' tiles are measured")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        warm(*args.warm)
        return
    parts, clock, kept = args.only.split(","), Clock(args.seconds), list[Row]()
    if {"heads", "latents"} & set(parts):
        warm_all(10)
    peers = Peers((4, 8)) if "peers" in parts else None
    print(f"copy ceiling {ceilings.copy_tb_s() * 1e3:.0f} GB/s; 32 query heads, 8 KV heads of {DIM}", flush=True)
    torch.cuda.empty_cache()
    if "heads" in parts:
        usual = [(*case, "") for case in GRID] + [(64, 8192, "mixed")]
        measure_heads(usual, WIDTHS, False, BF16, Clock(clock.left * 0.4), kept)
        measure_heads(usual, WIDTHS, False, FP8, Clock(clock.left * 0.4), kept)
    if "tree" in parts:
        for stored in (BF16, FP8):
            measure_heads([(1, 2048, ""), (16, 2048, ""), (64, 2048, "")], (8,), True, stored,
                          Clock(clock.left * 0.2), kept)
    if "latents" in parts:
        measure_latents(Clock(clock.left * 0.7), kept)
    if peers is not None:
        measure_peers(peers, (4, 8), clock, kept)
        peers.close()
    if args.out:
        args.out.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
