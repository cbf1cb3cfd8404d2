"""Decode steps of an 8B-shaped dummy model over several GPUs of one host, beside one of them.

    python -m baton.tests.bench.decode_tp [--ranks 2] [--context 1024] [--batches 1,64] [--out FILE]

Mean milliseconds of a step in the running loop, CUDA graphs and overlap on: on one GPU, over the ranks with all sums by
NCCL, and with small sums through the peers' memory, which norm as well. It starts its ranks itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing

from ...common.distributed.parallel import Parallel
from ...common.distributed.peer_all_reduce import connect_all
from ...common.distributed.tp import TPGroup, init_tp
from . import dummy_engine
from .decode_step import measure
from .relay import LLAMA_8B

WAYS = ("one GPU", "NCCL", "peers' memory")


def steps_of(parallel: Parallel, batches: list[int], context: int) -> list[float]:
    """Of each batch size."""
    device = parallel.device.type
    engine = dummy_engine.make((context + 64) * max(batches) + 1024, max(batches), sizes=tuple(batches), device=device,
                               shape=LLAMA_8B if device == "cuda" else dummy_engine.TINY, parallel=parallel)
    found = [measure(engine, batch, context)["step_ms"] for batch in batches]
    engine.finish()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found


def rank_main(rank: int, size: int, batches: list[int], context: int, tiny: bool, folder: str) -> None:
    device = "cpu" if tiny else f"cuda:{rank}"
    group = init_tp(rank, size, f"file://{folder}/rendezvous", device, timeout=240)
    parallel = Parallel(group)
    found: dict[str, list[float]] = {}
    for way in WAYS:
        if way == "one GPU":
            if rank == 0:
                found[way] = steps_of(Parallel(TPGroup(device=group.device)), batches, context)
            group.barrier()
            continue
        if way == "peers' memory":
            connect_all(parallel)
            if group.symm_comm is None:
                continue
        found[way] = steps_of(parallel, batches, context)
        if rank == 0:
            print(way, [f"{ms:.2f} ms" for ms in found[way]], flush=True)
    if rank == 0:
        (Path(folder) / "steps.json").write_text(json.dumps(found))
    group.barrier()
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=min(torch.cuda.device_count(), 8) or 2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--tiny", action="store_true", help="a small model over gloo on a CPU, to try the program")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if torch.cuda.device_count() < args.ranks and not args.tiny:
        sys.exit(f"This needs {args.ranks} GPUs.")
    batches = [int(batch) for batch in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (args.ranks, batches, args.context, args.tiny, folder),
                                    nprocs=args.ranks)
        found = json.loads((Path(folder) / "steps.json").read_text())
    print(f"{args.ranks} ranks, context {args.context}, ms a decode step (and its speed beside one GPU's)")
    print(f"| batch | {' | '.join(WAYS)} |\n|{'---|' * (len(WAYS) + 1)}")
    for i, batch in enumerate(batches):
        cells = [f"{found[way][i]:.2f} ({found['one GPU'][i] / found[way][i]:.2f}x)" if way in found else "-"
                 for way in WAYS]
        print(f"| {batch} | {' | '.join(cells)} |")
    if args.out:
        args.out.write_text(json.dumps({"ranks": args.ranks, "context": args.context, "batches": batches,
                                        "step_ms": found}, indent=1))


if __name__ == "__main__":
    main()
