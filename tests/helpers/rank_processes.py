"""The ranks of an engine as processes of a test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from baton.common.distributed.tp import DistBackend, TPGroup

SECONDS = 1200.0 if torch.cuda.is_available() else 240.0
"""For processes of a test; on a GPU they compile, which takes a machine of few cores long."""


def run_ranks(script: Path, size: int, folder: Path, *args: str, seconds: float = SECONDS) -> list[Any]:
    """Run ``script RANK SIZE INIT_METHOD OUT ARGS...`` for each rank at once; returns what each saved in OUT.

    Fails with the words of the first rank that does, whatever the others then wait for.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                   "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    outs = [folder / f"rank{rank}.pt" for rank in range(size)]
    logs = [folder / f"rank{rank}.log" for rank in range(size)]
    ranks = []
    try:
        for rank in range(size):
            command = [sys.executable, str(script), str(rank), str(size), f"file://{folder}/rendezvous",
                       str(outs[rank]), *args]
            with logs[rank].open("w") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + seconds
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            assert time.monotonic() < deadline, f"ranks still run after {seconds:g} s: {codes}"
            time.sleep(0.02)
        for code, log in zip(codes, logs):
            assert not code, log.read_text()[-4000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [torch.load(out) for out in outs]


def place_of(rank: int, device: str) -> tuple[str, DistBackend]:
    """A rank's device and what tensors travel by there: ``cpu``, ``cuda`` (a GPU each) or ``shared`` (GPUs in turn)."""
    if device == "shared":
        return f"cuda:{rank % torch.cuda.device_count()}", "gloo"
    return f"cuda:{rank}" if device == "cuda" else "cpu", "nccl"


def end_rank(everyone: TPGroup) -> None:
    """The last call of a rank's script, as servers' ranks end: destructors of libraries do not all work, and a thread
    of one that outlives its interpreter ends the process with SIGABRT now and then.

    No rank of ``everyone`` ends before all are here: what one has sent may not have been read yet.
    """
    everyone.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
