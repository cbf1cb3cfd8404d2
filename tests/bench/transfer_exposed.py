"""How much of the KV transfer a user waits for: TTFT, and the part of it that computing did not hide.

    python -m baton.tests.bench.transfer_exposed --out FILE
    python -m baton.tests.bench.transfer_exposed --model tinychat --workloads 256:1:4,512:2:8    # on a CPU

Router, prefill server (GPU 0) and decode server (the last GPU) of a Llama-3-8B-shaped dummy for each setting
``BACKEND:OVERLAP``, values of ``--disaggregation-transfer-backend`` and ``--kv-transfer-overlap``. All servers start at
once; a workload ``TOKENS:CONCURRENCY:REQUESTS`` runs on one setting after the other, alone; with a fourth number,
the ``--chunked-prefill-size``, on the first setting only. The exposed time is the prefill server's metric: seconds
between a prompt's last layer and its last page's arrival, a request's mean.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..helpers.harness import Cluster, post_json
from . import load
from .relay import LLAMA_8B

SETTINGS = "ipc:layers,nixl:layers,ipc:chunk,ipc:prompt"
WORKLOADS = "1024:1:6,4096:1:4,16384:1:2,32768:1:2,1024:32:48,4096:32:32"
CHUNK = 8192
COUNTERS = {"done": "kv_transfers_done", "exposed": "kv_transfer_exposed_seconds", "bytes": "kv_bytes_sent"}


def cluster(folder: Path, flags: list[str], setting: str, gpus: int) -> Cluster:
    """A router and a pair of servers, not started."""
    backend, overlap = setting.split(":")
    logs = folder / setting.replace(":", "-")
    logs.mkdir()
    devices = ["--device", "cuda", "--max-total-tokens", "100000"] if gpus else []
    flags = [*flags, *devices, "--disable-radix-cache", "--disaggregation-transfer-backend", backend]
    on = [["--base-gpu-id", str(gpu)] if gpus else [] for gpu in (0, gpus - 1)]
    return Cluster(logs, flags=flags, prefill_flags=[*on[0], "--kv-transfer-overlap", overlap], decode_flags=on[1])


@contextlib.contextmanager
def started(clusters: list[Cluster]) -> Iterator[None]:
    with ThreadPoolExecutor(len(clusters)) as pool:
        try:
            list(pool.map(Cluster.__enter__, clusters))
            yield
        finally:
            list(pool.map(Cluster._kill, clusters))


def measure(name: str, at: Cluster, work: load.Workload, chunk: int) -> dict[str, float | str]:
    """One row; milliseconds."""
    limits = {"server_args": {"chunked_prefill_size": chunk}}
    status, answer = post_json(at.prefill[0].url + "/set_internal_state", limits)
    assert status == 200, answer
    before = at.prefill[0].state()["counters"]
    row = asyncio.run(load.run(at.url, work))
    after = at.prefill[0].state()["counters"]
    grown = {short: after[key] - before[key] for short, key in COUNTERS.items()}
    exposed = grown["exposed"] / max(1, grown["done"]) * 1e3
    return {"setting": name, "tokens": work.input_tokens, "concurrency": work.concurrency, "chunk": chunk,
            "req_s": row["req_s"], "failed": row["failed"],
            "mib": grown["bytes"] / max(1, grown["done"]) / 2**20, "ttft_p50": row["ttft_p50"],
            "ttft_p99": row["ttft_p99"], "exposed": exposed, "share": exposed / float(row["ttft_p50"])}


def told(row: dict[str, float | str]) -> str:
    return (f"{row['setting']:14}{row['tokens']:>7}{row['concurrency']:>5}{row['chunk']:>7}{row['req_s']:>8.2f}"
            f"{row['failed']:>8}{row['mib']:>9.1f}{row['ttft_p50']:>11.1f}{row['ttft_p99']:>11.1f}"
            f"{row['exposed']:>11.2f}{row['share']:>9.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--model", choices=("llama-8b", "tinychat"), default="llama-8b")
    parser.add_argument("--server-flags", default="", help="more flags of the servers, as in one shell word")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    names, rows = args.settings.split(","), []
    workloads = [tuple(map(int, work.split(":"))) for work in args.workloads.split(",")]
    print(f"{'setting':14}{'tokens':>7}{'c':>5}{'chunk':>7}{'req/s':>8}{'failed':>8}{'MiB':>9}{'TTFT p50':>11}"
          f"{'p99':>11}{'exposed':>11}{'share':>9}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "max_position_embeddings": 40960}))
        model = ["--model-path", str(folder), "--tokenizer-path", "tinychat", "--load-format", "dummy"]
        flags = [*(model if args.model == "llama-8b" else []), *shlex.split(args.server_flags)]
        clusters = {name: cluster(folder, flags, name, gpus) for name in names}
        with started(list(clusters.values())):
            for at in clusters.values():
                asyncio.run(load.run(at.url, load.Workload(workloads[0][0], 1, 2, 1)))  # warm-up
            for tokens, concurrency, requests, *chunk in workloads:
                for name, at in list(clusters.items())[:1 if chunk else None]:
                    work = load.Workload(tokens, 1, requests, concurrency)
                    rows.append(measure(name, at, work, *chunk or [CHUNK]))
                    print(told(rows[-1]), flush=True)
                    if args.out:
                        args.out.write_text(json.dumps({"command": " ".join(sys.argv), "gpus": gpus, "rows": rows}))


if __name__ == "__main__":
    main()
