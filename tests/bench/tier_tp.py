"""Host hits over several ranks: TTFT of a long prompt that is computed, in the GPUs' prefix cache and in host memory.

    python -m baton.tests.bench.tier_tp --out FILE                     # Llama-70B's layers, 16 of them, on two GPUs
    python -m baton.tests.bench.tier_tp --out FILE --shape latents     # 8 layers of DeepSeek-V2-Lite: one copy of both
    python -m baton.tests.bench.tier_tp --out FILE --shape tinychat    # on a CPU: does the bench itself run?

Two prompts are asked in turn, each twice, with a pool for one of them: at first it comes from host memory, then from
the GPUs. Every rank loads its own heads by its own link, so that ``added``, what a host hit takes more than a hit on
the GPUs, is the bytes of one rank by one link's rate. Both hits compute the same tokens: their answers have to be
equal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from ..helpers.harness import Server, post_json
from ..helpers.ports import free_port
from .mla_decode import V2_LITE
from .relay import LLAMA_8B, dummy_flags

LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
                        "max_position_embeddings": 65536}
SHAPES = {"70b": (LLAMA_70B, 16), "latents": (V2_LITE | {"max_position_embeddings": 65536}, 8)}
REST = 64
ANSWER = 4


def ask(server: Server, prompt: list[int]) -> tuple[float, list[int], dict[str, int]]:
    """Milliseconds until a short answer was there, its tokens, and where the prompt's were found."""
    began = time.perf_counter()
    status, body = post_json(server.url + "/generate", {"input_ids": prompt, "sampling_params": {
        "temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}})
    seconds = time.perf_counter() - began
    assert status == 200, body
    return 1e3 * seconds, body["output_ids"], body["meta_info"].get("cached_tokens_details") or {}


def measure(server: Server, tokens: int, turns: int) -> dict[str, object]:
    draw = random.Random(0)
    prompts = [[draw.randrange(5, 4000) for _ in range(tokens + REST)] for _ in range(2)]
    times: dict[str, list[float]] = {"computed": [], "gpu_hit": [], "host_hit": []}
    ask(server, [draw.randrange(5, 4000) for _ in range(tokens + REST)])  # compiles
    wait_for_host_memory(server)
    for prompt in prompts:
        times["computed"].append(ask(server, prompt)[0])
    equal, from_host = True, 0
    for _ in range(turns):
        for prompt in prompts:
            answers = []
            for kind in ("host_hit", "gpu_hit"):
                milliseconds, answer, details = ask(server, prompt)
                times[kind].append(milliseconds)
                answers.append(answer)
                from_host += details.get("host", 0)
            equal &= answers[0] == answers[1]
    found = {name: statistics.median(each) for name, each in times.items()}
    loaded = server.state()["counters"]["tier_bytes_loaded"]
    return {**found, "added": found["host_hit"] - found["gpu_hit"], "tokens_from_host": from_host, "equal": equal,
            "loaded_gb": loaded / 1e9}


def wait_for_host_memory(server: Server) -> None:
    """Wait until all host memory is pinned."""
    before = -1.0
    while (now := server.state()["gauges"].get("hicache_host_total_tokens", 0.0)) > before:
        before = now
        time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=("70b", "latents", "tinychat"), default="70b")
    parser.add_argument("--layers", type=int, help="default: 16 of 70b, 8 of latents")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--server-flags", default="", help="more flags of the server")
    parser.add_argument("--logs", type=Path, default=None)
    args = parser.parse_args()
    logs, tokens = args.logs or Path(tempfile.mkdtemp()), args.tokens
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if args.shape in SHAPES:
            shape, layers = SHAPES[args.shape]
            flags = [*dummy_flags(Path(folder), shape | {"num_hidden_layers": args.layers or layers}), "--hicache-size",
                     "8"]
        else:
            tokens = 480
            flags = ["--model-path", "tinychat", "--device", "cpu", "--hicache-size", "0.05", "--log-level", "warning",
                     "--hicache-load-policy", "always"]
        flags += ["--tp-size", str(args.tp_size), "--enable-hierarchical-cache", "--max-total-tokens",
                  str(tokens + tokens // 4), *args.server_flags.split()]
        server = Server("baton.launch", ["server", *flags], free_port(), logs / "server.log")
        try:
            row = measure(server.start().wait_ready(300), tokens, args.turns)
        finally:
            server.stop(40)
    args.out.write_text(json.dumps({"shape": args.shape, "layers": args.layers, "tokens": tokens, **row}, indent=1))
    print(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in row.items()))


if __name__ == "__main__":
    main()
