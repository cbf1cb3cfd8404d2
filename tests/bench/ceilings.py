"""What the machine can do at most: memory copy, matrix product, GPU to GPU copy. Each the median of several runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from .device_time import run_seconds


def _seconds(work, repeats: int = 10) -> float:
    for _ in range(3):
        work()
    return statistics.median(run_seconds(work, repeats))


def copy_tb_s(size: int = 4 << 30) -> float:
    """Device-to-device copy, bytes read plus written."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source)) / 1e12


def matmul_tflops(n: int = 8192) -> float:
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    return 2 * n**3 / _seconds(lambda: a @ b) / 1e12


def fp8_matmul_tflops(n: int = 8192) -> float:
    """Of float8_e4m3fn, into bfloat16, with one scale for each matrix."""
    a, b = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(1, device="cuda")
    return 2 * n**3 / _seconds(lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16,
                                                        use_fast_accum=True)) / 1e12


def write_products(path: Path, copy: float, tflops: float, measured: Sequence[object]) -> None:
    """Writes what was measured of products beside the ceilings of the same run."""
    path.write_text(json.dumps({"device": torch.cuda.get_device_name(), "copy_tb_s": copy,
                                "bf16_matmul_tflops": tflops, "measured": measured}, indent=1) + "\n")


def peer_gb_s(size: int = 2 << 30) -> float | None:
    """GPU 0 to GPU 1; None on a machine with one."""
    if torch.cuda.device_count() < 2:
        return None
    source = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    return size / _seconds(lambda: target.copy_(source)) / 1e9


def measure() -> dict[str, float | None]:
    figures = {"copy_tb_s": copy_tb_s(), "bf16_matmul_tflops": matmul_tflops(), "gpu0_gpu1_gb_s": peer_gb_s()}
    torch.cuda.empty_cache()
    return figures


if __name__ == "__main__":
    print(measure())
