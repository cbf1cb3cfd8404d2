"""Seconds from a server's command to its first token, with empty kernel caches and with those of the start before.

    python -m baton.tests.bench.start_up [--shape 8b] [--starts 2] [--server-flags "..."] [--out FILE]

Caches of Triton, FlashInfer and torch are in a new folder: the first start finds nothing. Weights are dummies, so a
checkpoint's reading is not part of it (``bench_load``). The parts are the server's own (``--show-time-cost``); of the
time before them, Python's imports are most. ``background``: when FlashInfer's kernels took over, where they were
compiled while the server answered.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tempfile
import time
from pathlib import Path

import torch

from ..helpers.harness import Server
from ..helpers.ports import free_port
from .first_request import seconds
from .relay import LLAMA_8B

STAGE = re.compile(r"starting: (.*) took ([\d.]+) s")
TAKEN_OVER = "they took"


def start(flags: list[str], caches: Path, log: Path, tokens: int, wait: float) -> dict[str, object]:
    """One start: seconds until the first token and of its parts; then a second request's."""
    environment = {"TRITON_CACHE_DIR": str(caches / "triton"), "FLASHINFER_WORKSPACE_BASE": str(caches),
                   "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    began = time.monotonic()
    server = Server("baton.launch", ["server", *flags], free_port(), log, **environment).start()
    try:
        server.wait_ready(300)
        ready = time.monotonic() - began
        first = seconds(server.url, 1, tokens)
        found: dict[str, object] = {"ready_s": ready, "first_token_s": time.monotonic() - began,
                                    "first_request_s": first, "next_request_s": seconds(server.url, 2, tokens)}
        while (compiling := "until FlashInfer's are compiled" in log.read_text()) and (
                TAKEN_OVER not in log.read_text() and time.monotonic() - began < wait):
            time.sleep(0.5)
        if compiling and TAKEN_OVER in log.read_text():
            found["background_s"] = time.monotonic() - began
            found["later_request_s"] = min(seconds(server.url, 3 + each, tokens) for each in range(3))
        return found | {"parts": {stage: float(took) for stage, took in STAGE.findall(log.read_text())}}
    finally:
        server.stop(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=("8b", "tinychat"), default="8b" if on_gpu else "tinychat")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--wait", type=float, default=150.0, help="most seconds for FlashInfer in the background")
    parser.add_argument("--server-flags", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--show-time-cost", *shlex.split(args.server_flags)]
        if args.shape == "8b":
            (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
            flags = ["--model-path", folder, "--tokenizer-path", "tinychat", "--load-format", "dummy", *flags]
        else:
            flags = ["--model-path", "tinychat", *flags]
        for number in range(args.starts):
            log = Path(folder) / f"start-{number}.log"
            rows.append(start(flags, Path(folder) / "caches", log, args.tokens, args.wait))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        device = torch.cuda.get_device_name() if on_gpu else "a CPU"
        args.out.write_text(json.dumps({"device": device, "shape": args.shape, "starts": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
