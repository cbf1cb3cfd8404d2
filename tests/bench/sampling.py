"""Drawing tokens by itself: microseconds of a step's draws by the fused kernels and by torch, beside a copy.

    python -m baton.tests.bench.sampling [--vocab 128256] [--batches 1,8,64,256] [--out FILE]

Logits are random in bfloat16 (so many are equal), as float32. ``floor`` is the time in which the copy ceiling's rate
would read the logits once. ``host`` is what the launch costs the host. Each the median of 20.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from ...common.api.sampling import SamplingParams
from ...common.request.sampling_metadata import SamplingMetadata
from ...common.sampling.sampling_backend import FusedSampling, SamplingKernels, TorchSampling
from . import ceilings

KINDS = {
    "greedy": SamplingParams(temperature=0.0), "temperature": SamplingParams(temperature=0.7),
    "top_p": SamplingParams(top_p=0.9), "top_k": SamplingParams(top_k=50),
    "both": SamplingParams(temperature=0.7, top_k=50, top_p=0.9), "min_p": SamplingParams(min_p=0.05),
    "seeded": SamplingParams(seed=1, top_p=0.95), "wide top_p": SamplingParams(temperature=2.0, top_p=0.99),
}


def measure(drawing: SamplingKernels, logits: torch.Tensor, rows: list[SamplingMetadata]) -> tuple[float, float]:
    """Seconds on the device and on the host."""
    device, host = [], []
    for _ in range(25):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # about a millisecond: all is launched before the device begins
        start.record()
        begin = time.perf_counter()
        drawing(logits, rows)
        host.append(time.perf_counter() - begin)
        end.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end) / 1e3)
    return statistics.median(device[5:]), statistics.median(host[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--scale", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    copy = ceilings.copy_tb_s() * 1e12
    torch.cuda.empty_cache()
    device = torch.device("cuda")
    drawings: dict[str, SamplingKernels] = {"fused": FusedSampling(device, 0),
                                            "torch": TorchSampling(args.vocab, device, 0)}
    results = []
    print(f"copy ceiling {copy / 1e12:.2f} TB/s, vocabulary {args.vocab}")
    print("| batch | kind | floor us | fused us | torch us | fused host us | torch host us |")
    print("|---|---|---|---|---|---|---|")
    for batch in map(int, args.batches.split(",")):
        logits = (torch.randn(batch, args.vocab, device=device) * args.scale).to(torch.bfloat16).float()
        for kind, params in KINDS.items():
            rows = [SamplingMetadata(params, position) for position in range(batch)]
            found = {name: measure(drawing, logits, rows) for name, drawing in drawings.items()}
            floor = logits.nbytes / copy
            results.append({"batch": batch, "kind": kind, "floor_us": floor * 1e6}
                           | {f"{name}_us": one[0] * 1e6 for name, one in found.items()}
                           | {f"{name}_host_us": one[1] * 1e6 for name, one in found.items()})
            print(f"| {batch} | {kind} | {floor * 1e6:.1f} | {found['fused'][0] * 1e6:.1f} | "
                  f"{found['torch'][0] * 1e6:.1f} | {found['fused'][1] * 1e6:.0f} | {found['torch'][1] * 1e6:.0f} |",
                  flush=True)
    if args.out:
        args.out.write_text(json.dumps({"copy_b_s": copy, "vocab": args.vocab, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
