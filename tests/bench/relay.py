"""Serve a Llama-3-8B-shaped dummy and the shipped chat model on this machine's GPUs and measure.

    python -m baton.tests.bench.relay --out results.json

Runs the unified server on one GPU, then router + prefill + decode on one GPU (shared), and on two where there are two,
each with the same workloads, beside the machine's ceilings. Prints a Markdown table last.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import uvloop

from ..helpers.harness import Server
from ..helpers.ports import free_port, free_ports
from . import load

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "eos_token_id": 128009,
}

WORKLOADS = (
    load.Workload(1024, 128, 4, 1),
    load.Workload(1024, 256, 256, 64),
    load.Workload(1024, 256, 768, 256),
    load.Workload(4096, 1, 128, 32),
    load.Workload(8192, 256, 128, 64),
)
OPEN_LOOP = load.Workload(4096, 256, 200, rate=8.0)


def dummy_flags(folder: Path, shape: dict = LLAMA_8B) -> list[str]:
    (folder / "config.json").write_text(json.dumps(shape))
    # Named, FlashInfer is compiled before a server is ready.
    flashinfer = shutil.which("nvidia-smi") and find_spec("flashinfer") and "kv_lora_rank" not in shape
    return ["--model-path", str(folder), "--tokenizer-path", "tinychat", "--load-format", "dummy",
            "--served-model-name", "dummy", *(["--attention-backend", "flashinfer"] if flashinfer else [])]


@contextmanager
def unified(flags: list[str], logs: Path) -> Iterator[str]:
    server = Server("baton.launch", ["server", *flags], free_port(), logs / "unified.log").start()
    try:
        yield server.wait_ready(300).url
    finally:
        server.stop(40)


@dataclass(frozen=True)
class Relay:
    """A router, and the prefill and the decode server behind it."""

    router: Server
    prefill: Server
    decode: Server


@contextmanager
def relay(flags: list[str], logs: Path, gpus: tuple[int, int], prefill_flags: Sequence[str] = (),
          decode_flags: Sequence[str] = ()) -> Iterator[str]:
    """Yields the router's address of ``relay_servers``."""
    with relay_servers(flags, logs, gpus, prefill_flags, decode_flags) as servers:
        yield servers.router.url


@contextmanager
def relay_servers(flags: list[str], logs: Path, gpus: tuple[int, int], prefill_flags: Sequence[str] = (),
                  decode_flags: Sequence[str] = ()) -> Iterator[Relay]:
    """Router, one prefill and one decode server on the given GPUs."""
    share = ["--mem-fraction-static", "0.42"] if gpus[0] == gpus[1] else []
    ports = free_ports(4)
    prefill = Server("baton.prefill.launch", [*flags, *prefill_flags, *share, "--base-gpu-id", str(gpus[0]),
                     "--disaggregation-bootstrap-port", str(ports[0])], ports[1], logs / "prefill.log")
    decode = Server("baton.decode.launch", [*flags, *decode_flags, *share, "--base-gpu-id", str(gpus[1])],
                    ports[2],
                    logs / "decode.log")
    router = Server("baton.router.launch", ["--pd-disaggregation", "--policy", "round_robin", "--log-level", "warning",
                    "--prefill", prefill.url, str(ports[0]), "--decode", decode.url], ports[3], logs / "router.log")
    parts = [prefill, decode, router]
    try:
        for part in parts:
            part.start()
        for part in parts:
            part.wait_ready(300)
        yield Relay(router, prefill, decode)
        for worker in (prefill, decode):
            worker.assert_clean(10)
        counters = prefill.state()["counters"]
        print(f"KV sent: {counters['kv_bytes_sent'] / 2**30:.2f} GiB in {counters['kv_transfers_done']:.0f} transfers")
    finally:
        for part in reversed(parts):
            if part.process is not None:
                part.stop(40)


def settings(gpus: int) -> dict[str, object]:
    found: dict[str, object] = {"unified, 1 GPU": lambda flags, logs: unified(flags, logs)}
    if gpus < 2:
        found["1P1D, 1 GPU shared"] = lambda flags, logs: relay(flags, logs, (0, 0))
    else:
        found["1P1D, 2 GPUs"] = lambda flags, logs: relay(flags, logs, (0, 1))
    return found


def chat_score(url: str) -> str:
    """The shipped model's exact match, asked through OpenAI's API."""
    run = subprocess.run([sys.executable, "-m", "baton.tests.tinychat.evaluate", "--base-url", url + "/v1", "--count",
                          "240", "--concurrency", "32"], capture_output=True, text=True, timeout=200)
    return (run.stdout.strip().splitlines() or [run.stderr[-300:]])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--skip-chat", action="store_true", help="leave the shipped model's questions out")
    parser.add_argument("--logs", type=Path, default=None)
    parser.add_argument("--workloads", default="0,1,2,3,4", help="which of the list, by index")
    parser.add_argument("--open-loop", action="store_true", help="also 4096/256 at 8 requests a second")
    parser.add_argument("--server-flags", default="", help="more flags of prefill, decode and unified servers")
    parser.add_argument("--only", help="run only the settings whose name has this in it, e.g. 1P1D")
    args = parser.parse_args()
    import torch

    from . import ceilings
    logs = args.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    flags = ["--disable-radix-cache", *args.server_flags.split()]
    report = {"date": datetime.date.today().isoformat(), "command": " ".join(sys.argv), "device":
              f"{gpus} x {torch.cuda.get_device_name(0)}", "ceilings": ceilings.measure(), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, serve in settings(gpus).items():
            if args.only and args.only not in name:
                continue
            with serve([*dummy_flags(Path(folder)), *flags], logs) as url:  # type: ignore[operator]
                uvloop.run(load.run(url, load.Workload(512, 32, 8, 8)))  # warm-up
                chosen = [WORKLOADS[int(i)] for i in args.workloads.split(",")]
                for work in (*chosen, *([OPEN_LOOP] if args.open_loop else [])):
                    report["rows"].append({"server": name, **uvloop.run(load.run(url, work))})
                    print(report["rows"][-1], flush=True)
            args.out.write_text(json.dumps(report, indent=1))
        if not args.skip_chat:
            with relay(["--model-path", "tinychat"], logs, (0, 0) if gpus < 2 else (0, 1)) as url:
                report["tinychat"] = chat_score(url)
    args.out.write_text(json.dumps(report, indent=1))
    print(f"\n{report['device']}, {report['date']}, ceilings {report['ceilings']}\n{load.table(report['rows'])}")
    print("tinychat through 1P1D:", report.get("tinychat"))


if __name__ == "__main__":
    main()
