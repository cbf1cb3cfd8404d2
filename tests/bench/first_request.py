"""What a pair's first request costs beside its next ones: the connection of prefill and decode is made when they join.

    python -m baton.tests.bench.first_request [--backends nixl ipc] [--shape 8b]

Starts router, prefill and decode server anew for each transfer backend, on two GPUs where there are two, and sends
prompts of 1,024 token ids one after another, each answered with two tokens: milliseconds from request to answer.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch

from ..helpers.harness import post_json
from .relay import dummy_flags, relay


def seconds(url: str, seed: int, tokens: int) -> float:
    ids = random.Random(seed).choices(range(256, 4000), k=tokens)
    began = time.perf_counter()
    status, answer = post_json(url + "/generate", {
        "input_ids": ids, "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}, 120)
    assert status == 200, answer
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["nixl", "ipc"])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=("8b", "tinychat"), default="8b" if on_gpu else "tinychat")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    gpus = (0, 1) if torch.cuda.device_count() > 1 else (0, 0)
    rows = []
    for backend in args.backends:
        with tempfile.TemporaryDirectory(prefix="baton-first-") as name:
            folder = Path(name)
            flags = dummy_flags(folder) if args.shape == "8b" else ["--model-path", "tinychat"]
            flags += ["--disable-radix-cache", "--disaggregation-transfer-backend", backend]
            with relay(flags, folder, gpus) as url:
                rows.append((backend, [seconds(url, seed, args.tokens) for seed in range(args.requests)]))
    print("| backend | " + " | ".join(f"request {n + 1}" for n in range(args.requests)) + " |")
    print("|---" * (args.requests + 1) + "|")
    for backend, times in rows:
        print(f"| {backend} | " + " | ".join(f"{1e3 * value:.1f}" for value in times) + " |")


if __name__ == "__main__":
    main()
