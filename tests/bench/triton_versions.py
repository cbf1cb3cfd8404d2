"""Two versions of Triton over the same kernels on one Hopper GPU: the kernels' tests, then their times in turn.

    python -m baton.tests.bench.triton_versions [--other FOLDER] [--turns 3] [--seconds 420]

FOLDER holds another ``triton`` package for this Python, unpacked, which goes ahead of the installed one; without it the
installed one is tried alone. Each version runs the tests of kernels in Gluon in a process of its own, then each times
the same calls in CUDA graphs, in turn with the other; the table, microseconds of a call's median over all turns, comes
last. Exit status 1 where a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

TESTS = Path(__file__).parent.parent / "gpu" / "kernels"
PYTEST = ["-m", "pytest", "-q", "-W", "ignore", "--maxfail", "4", "-p", "no:cacheprovider", "-o", "addopts=",
          "--import-mode=importlib"]
GLUON = [*(str(TESTS / f"test_{name}_warp_specialized.py") for name in ("decode", "dense", "split_k")),
         f"{TESTS}/test_small_m_matmul.py::test_persistent_products_equal_torch_and_rows_do_not_depend_on_their_number",
         f"{TESTS}/test_moe.py::test_warp_groups_equal_the_twin"]
CALLS, REPEATS = 16, 20


def cases() -> dict[str, Callable[[], object]]:
    """Calls on the GPU by a name: those of kernels in Gluon, then of Triton's own that a decode step spends most in."""
    from ...kernels.gemm.dense_warp_specialized import warp_specialized_matmul
    from ...kernels.gemm.small_m_matmul import small_m_matmul
    from ...kernels.gemm.split_k_warp_specialized import split_k_matmul, split_k_partials
    from ...kernels.moe.moe_experts import moe_experts
    from ...kernels.rowwise.rmsnorm import rmsnorm
    from ...kernels.tuning.gemm import SplitKTile
    from ...kernels.tuning.moe import warp_specialized_tiles
    from ...kernels.tuning.policy import policy_of

    torch.manual_seed(0)
    gemm = policy_of(torch.device("cuda", 0)).gemm
    up, down = of(28672, 4096), of(4096, 4096)
    many, some, few = of(8192, 4096), of(128, 4096), of(8, 4096)
    gate_up, back = of(128, 1536, 2048), of(128, 2048, 768)
    tokens, own = of(8192, 2048), of(8192, 128).float()
    places, weights = own.topk(8).indices, torch.rand(8192, 8, device="cuda")
    return {
        "dense, 8,192 rows, gated": lambda: warp_specialized_matmul(many, up, gemm.numbers.warp_specialized.tall,
                                                                    gated=True),
        "split, 128 rows, gated": lambda: split_k_matmul(some, up, SplitKTile(128, 64, 64, 4), gated=True),
        "split, 128 rows, pieces": lambda: split_k_partials(some, down, SplitKTile(128, 64, 64, 6, 4)),
        "streamed, 8 rows, gated": lambda: small_m_matmul(few, up, gated=True, tile=gemm.persistent(8, 28672, 4096)),
        "experts, 8,192 tokens": lambda: moe_experts(tokens, gate_up, back, places, weights, None,
                                                     warp_specialized_tiles(torch.bfloat16)),
        "attention, 256 of 2,048": attention(256, 2048),
        "attention, 8 of 2,048": attention(8, 2048),
        "attention, 8 of 16,384": attention(8, 16384),
        "experts, 64 tokens": lambda: moe_experts(tokens[:64], gate_up, back, places[:64], weights[:64]),
        "rmsnorm, 8,192 rows": lambda: rmsnorm(many, down[0], 1e-5, many),
    }


def of(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", dtype=torch.bfloat16) * 0.05


def attention(requests: int, length: int) -> Callable[[], object]:
    """Decode attention of Llama-3-8B's heads, as an engine plans it."""
    from ...kernels.attention.decode_plan import plan_decode
    from ...kernels.attention.paged_decode import paged_decode
    from ...kernels.tuning.policy import policy_of

    page, count = 16, length // 16
    pool, q = of(requests * count, 2, 8, page, 128), of(requests, 32, 128)
    ends = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * count
    order = torch.randperm(requests * count, device="cuda").int()
    last = torch.full((requests,), page, device="cuda", dtype=torch.int32)
    policy = policy_of(q.device)
    splits = policy.attention.decode_splits(128, 2, 2, requests * 8)._asdict()
    plan = plan_decode(ends, last, page, 8, policy.facts.num_sms, length, **splits)
    return lambda: paged_decode(q, pool[:, 0], pool[:, 1], ends, order, last, 128**-0.5, plan, inputs_ready=True)


def microseconds() -> dict[str, float]:
    """A call's median by its case, in this process's Triton."""
    from .device_time import captured, run_seconds

    found = {}
    for name, call in cases().items():
        work = captured(lambda call=call: [call() for _ in range(CALLS)])
        work()
        found[name] = statistics.median(run_seconds(work, REPEATS)) / CALLS * 1e6
    return found


def environment(folder: str) -> dict[str, str]:
    ahead = [folder] if folder else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*ahead, *(path for path in sys.path if path)])}


def run(folder: str, argv: list[str], seconds: float) -> tuple[int, str]:
    """Exit status and output of a Python with that Triton."""
    done = subprocess.run([sys.executable, *argv], env=environment(folder), stdout=subprocess.PIPE, timeout=seconds,
                          stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def version_of(folder: str) -> str:
    code, told = run(folder, ["-c", "import triton; print('Triton', triton.__version__)"], 120)
    return told.strip().splitlines()[-1] if code == 0 else f"no Triton in {folder}: {told[-300:]}"


def timed(folders: dict[str, str], turns: int, until: float) -> dict[str, dict[str, float]]:
    """By version and case the median of all turns; no turn begins behind ``until``."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for turn in range(turns):
        for name, folder in folders.items():
            if turn and time.monotonic() > until:
                break
            code, told = run(folder, ["-m", "baton.tests.bench.triton_versions", "--times"], 300)
            if code:
                print(f"{name}, times: {told[-1500:]}", flush=True)
            else:
                found[name].append(json.loads(next(line for line in told.splitlines() if line.startswith("{"))))
    return {name: {case: statistics.median(each[case] for each in rows) for case in rows[0]} if rows else {}
            for name, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", default="", help="a folder with another triton package")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--times", action="store_true", help="time this process's Triton alone, as JSON")
    args = parser.parse_args()
    if args.times:
        print(json.dumps(microseconds()))
        return
    end = time.monotonic() + args.seconds
    folders = {version_of(folder): folder for folder in ("", args.other) if folder == "" or args.other}
    failed = False
    for name, folder in folders.items():
        code, told = run(folder, [*PYTEST, *GLUON], max(60.0, end - time.monotonic()))
        summary = next(line for line in reversed(told.splitlines()) if " in " in line and line[:1].isdigit())
        print(f"{name}, tests of kernels in Gluon: {summary}", flush=True)
        if code:
            failed = True
            print(told[-3000:], flush=True)
    rows = timed(folders, args.turns, end - 60.0)
    print(f"{'us of a call':28}" + "".join(f"{name:>16}" for name in folders))
    for case in next(iter(rows.values())):
        print(f"{case:28}" + "".join(f"{found.get(case, float('nan')):16.1f}" for found in rows.values()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
