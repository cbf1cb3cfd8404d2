"""Decode attention of one layer, dense and with double sparsity: microseconds, and those of the sparse parts.

    python -m baton.tests.bench.double_sparsity [--heads 32 --kv-heads 8] [--grid 64x16384,1x131072]
                                                [--channels 32 --tokens 256 --threshold 4096] [--out FILE]

Random keys and values in bfloat16 in scattered pages of 16 tokens, more of them than the L2 cache holds; the whole of
a backend's layer, rope and store included, as CUDA graphs. 256x4096 is below the threshold: it shows what sparsity
costs where nothing is sparse.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ...common.attention.base import AttentionBackend
from ...common.attention.double_sparsity_backend import DoubleSparsityBackend, SparseStep, Sparsity
from ...common.attention.triton_backend import TritonBackend
from ...common.attention.workspace import AttentionWorkspace
from ...common.forward.forward_batch import Row, build_forward_batch
from ...common.kvcache.layout import KVLayout
from ...common.kvcache.pool import KVPool
from ...kernels.attention.label_scores import label_scores
from ...kernels.attention.order_channels import order_channels
from ...kernels.attention.select_tokens import select_tokens
from ...kernels.attention.sparse_decode import sparse_decode
from ...kernels.attention.sparse_decode_plan import SparseDecodePlan, TokenScores
from .device_time import captured, run_seconds

PAGE, DIM, LAYERS, LONGEST = 16, 128, 2, 1 << 17
GRID = [(64, 16384), (16, 16384), (256, 8192), (8, 65536), (1, 131072), (256, 4096)]


class Case:
    """A decode step of ``batch`` requests of ``context`` tokens."""

    def __init__(self, batch: int, context: int, heads: int, kv_heads: int):
        device, pages = torch.device("cuda"), batch * -(-context // PAGE)
        self.heads = heads
        self.pool = KVPool(KVLayout((LAYERS,), kv_heads, DIM, PAGE, "bfloat16"), pages + 1, device)
        for part in self.pool.groups[0].split(1 << 12):
            part.normal_()
        ids = np.random.default_rng(0).permutation(pages).reshape(batch, -1)
        self.batch = build_forward_batch([Row([1], context - 1, own) for own in ids], PAGE, device)
        fused = torch.randn(batch, heads + 2 * kv_heads, DIM, device=device).bfloat16()
        self.q, self.k, self.v = fused.split([heads, kv_heads, kv_heads], 1)
        self.cos_sin = torch.randn(LONGEST, DIM, device=device)
        self.channels = torch.randn(LAYERS, kv_heads, DIM, device=device).argsort(-1).int()

    def dense(self) -> TritonBackend:
        return TritonBackend(self.pool, self.heads)

    def sparse(self, sparsity: Sparsity) -> DoubleSparsityBackend:
        return DoubleSparsityBackend(self.dense(), self.pool, self.heads, self.channels, sparsity)

    def microseconds(self, backend: AttentionBackend) -> float:
        """Of a layer."""
        workspace = AttentionWorkspace(torch.device("cuda"))

        def step() -> None:
            plan = backend.plan(self.batch, workspace, max_length=LONGEST)
            for layer in range(LAYERS):
                plan.run(layer, self.q, self.k, self.v, self.cos_sin)

        return _timed(step) / LAYERS

    def parts(self, backend: DoubleSparsityBackend) -> dict[str, float]:
        """Microseconds of each of the kernels of a sparse layer."""
        sparsity, batch = backend.sparsity, self.batch
        assert sparsity is not None
        requests = SparseDecodePlan.empty(batch.num_reqs, self.q.device)
        scores = TokenScores.empty(self.heads, backend.capacity, self.q.device)
        step = SparseStep(requests, scores, LONGEST)
        backend.plan_step(batch, step)
        assert step.splits is not None
        q, _ = order_channels(self.q, self.k, self.channels[0], self.cos_sin, batch.positions)
        keys, values = self.pool.layer(0)
        table, out = (batch.kv_indptr, batch.kv_indices), torch.empty_like(q)
        label_scores(q, keys, *table, sparsity.num_channels, 0.1, requests, step.splits, scores)
        selected = select_tokens(scores, requests, sparsity.num_tokens)
        splits = step.splits
        return {name: _timed(work) for name, work in {
            "order": lambda: order_channels(self.q, self.k, self.channels[0], self.cos_sin, batch.positions),
            "scores": lambda: label_scores(q, keys, *table, sparsity.num_channels, 0.1, requests, splits, scores),
            "select": lambda: select_tokens(scores, requests, sparsity.num_tokens),
            "attend": lambda: sparse_decode(q, keys, values, *table, selected, requests.lengths, 0.1, 1.0, out),
        }.items()}


def _timed(work: Callable[[], object]) -> float:
    return 1e6 * statistics.median(run_seconds(captured(work), 12)[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--grid", type=lambda text: [tuple(map(int, case.split("x"))) for case in text.split(",")],
                        default=GRID)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threshold", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sparsity = Sparsity(args.channels, args.tokens, args.threshold)
    rows = []
    print(f"{args.heads} query heads, {args.kv_heads} KV heads, {torch.cuda.get_device_name()}; us a layer")
    print("| batch | context | dense | sparse | times as fast | order | scores | select | attend |")
    print("|---" * 9 + "|")
    for batch, context in args.grid:
        case = Case(batch, context, args.heads, args.kv_heads)
        backend = case.sparse(sparsity)
        dense, sparse, parts = case.microseconds(case.dense()), case.microseconds(backend), case.parts(backend)
        rows.append({"batch": batch, "context": context, "dense_us": dense, "sparse_us": sparse, **parts})
        print(f"| {batch} | {context} | {dense:.0f} | {sparse:.0f} | {dense / sparse:.2f} | "
              + " | ".join(f"{part:.0f}" for part in parts.values()) + " |", flush=True)
        del case, backend
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), **vars(args) | {"out": None},
                                        "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
