"""Attention of gpt-oss's layers by our kernels: what sinks cost, and what windows save.

    python -m baton.tests.bench.windows

Microseconds of a layer, of decode steps in a CUDA graph of several layers (with the plan, which is made once), and of
one prompt; beside them what decode reads of keys and values, and the copy ceiling.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch

from ...kernels.attention.decode_plan import plan_decode
from ...kernels.attention.paged_decode import paged_decode
from ...kernels.attention.paged_prefill import paged_prefill, plan_prefill
from ...kernels.tuning.policy import policy_of
from . import ceilings
from .device_time import captured, run_seconds

HEADS, KV_HEADS, DIM, PAGE, WINDOW = 64, 8, 64, 16, 128
TOKEN_BYTES = KV_HEADS * DIM * 2 * 2
POOL_BYTES = 1 << 30
DECODES = ((1, 2048), (64, 2048), (64, 8192), (1, 32768))
PROMPT = 8192
CUDA = torch.device("cuda", 0)


class Sequences:
    """Queries, keys, values and scattered pages of sequences of one length, in as many layers as a pool holds."""

    def __init__(self, count: int, length: int, rows: int):
        self.count, self.length = count, length
        each = -(-length // PAGE)
        self.layers = max(4, min(32, POOL_BYTES // (count * each * PAGE * TOKEN_BYTES)))
        self.pool = torch.randn(count * each, self.layers, 2, KV_HEADS, PAGE, DIM, device=CUDA, dtype=torch.bfloat16)
        self.q = torch.randn(rows, HEADS, DIM, device=CUDA, dtype=torch.bfloat16)
        self.table = [torch.tensor(x, dtype=torch.int32, device=CUDA) for x in (
            np.arange(count + 1) * each, np.random.default_rng(0).permutation(count * each),
            [length - (each - 1) * PAGE] * count)]

    def decode(self, window: int | None, sinks: torch.Tensor | None) -> float:
        """Seconds of a layer."""
        policy = policy_of(CUDA)
        splits = policy.attention.decode_splits(DIM, 2, 2, self.count * KV_HEADS)._asdict()

        def step() -> None:
            plan = plan_decode(self.table[0], self.table[2], PAGE, KV_HEADS, policy.facts.num_sms, self.length,
                               **splits, window=window)
            for layer in range(self.layers):
                paged_decode(self.q, self.pool[:, layer, 0], self.pool[:, layer, 1], *self.table, DIM**-0.5, plan,
                             inputs_ready=layer > 0, window=window, sinks=sinks)

        return statistics.median(run_seconds(captured(step), 9)) / self.layers

    def prompt(self, window: int | None, sinks: torch.Tensor | None) -> float:
        rows = np.array([0, self.length], np.int32)
        blocks, on_device = plan_prefill(rows, HEADS // KV_HEADS, CUDA), torch.from_numpy(rows).to(CUDA)

        def work() -> None:
            paged_prefill(self.q, self.pool[:, 0, 0], self.pool[:, 0, 1], blocks, on_device, *self.table, DIM**-0.5,
                          window=window, sinks=sinks)

        return statistics.median(run_seconds(captured(work), 9))


@torch.inference_mode()
def main() -> None:
    print(f"copy {ceilings.copy_tb_s():.2f} TB/s, matmul {ceilings.matmul_tflops():.0f} TFLOP/s")
    print("| | window | sinks | us | TB/s read |\n|---|---|---|---|---|")
    sinks = torch.randn(HEADS, device=CUDA)
    views = ((None, None), (None, sinks), (WINDOW, sinks))
    for count, length in DECODES:
        sequences = Sequences(count, length, count)
        for window, given in views:
            took = sequences.decode(window, given)
            read = count * min(length, window or length) * TOKEN_BYTES / took / 1e12
            print(f"| decode {count} x {length} | {window or '-'} | {'-' if given is None else 'yes'} | "
                  f"{took * 1e6:.1f} | {read:.2f} |", flush=True)
    sequences = Sequences(1, PROMPT, PROMPT)
    for window, given in (*views, (4096, None)):
        print(f"| prompt of {PROMPT} | {window or '-'} | {'-' if given is None else 'yes'} | "
              f"{sequences.prompt(window, given) * 1e6:.0f} | |", flush=True)


if __name__ == "__main__":
    main()
