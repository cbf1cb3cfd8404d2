"""Mixtures of experts over several GPUs: tensor and expert parallelism and data-parallel attention beside each other.

    python -m baton.tests.bench.many_gpus [--models qwen3-30b-a3b,deepseek-v2-lite] [--settings tp,tp+ep,dp+ep]
        [--layers 12] [--gpus 2] [--quantization fp8_per_block] [--out figures.json]

Launches one unified server after the other with dummy weights and asks it through bench_serving's client: prompt tokens
a second of prompts alone, then decode with 1, 32 and 256 requests at once. ``--layers`` cuts the models, so that they
start within seconds; a step's time then goes with the layers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import load, relay
from .mla_decode import V2_LITE

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
         "vocab_size": 512, "eos_token_id": 1}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": QWEN3_30B,
    "deepseek-v2-lite": V2_LITE,
    # For a look at this script on a CPU.
    "small-qwen3-moe": QWEN3_30B | SMALL | {"num_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4,
                                            "num_key_value_heads": 2, "head_dim": 16},
    "small-deepseek": V2_LITE | SMALL | {"n_routed_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4,
                                         "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
                                         "qk_rope_head_dim": 8, "v_head_dim": 16, "rope_scaling": None},
}


def setting_flags(name: str, gpus: int) -> list[str]:
    """Of ``tp``, ``tp+ep``, ``dp`` or ``dp+ep``."""
    parts, count = name.split("+"), str(gpus)
    return ["--tp-size", count, *(["--dp-size", count, "--enable-dp-attention"] if "dp" in parts else []),
            *(["--ep-size", count] if "ep" in parts else [])]


def workloads(quick: bool) -> dict[str, load.Workload]:
    if quick:
        return {"prefill": load.Workload(64, 1, 4, 4), "decode at 2": load.Workload(16, 8, 4, 2)}
    # The last one's answers are long enough for all prompts to be computed before the first ends.
    return {"prefill": load.Workload(4096, 1, 32, 16), "decode at 1": load.Workload(256, 48, 1, 1),
            "decode at 256": load.Workload(2048, 256, 256, 256), "decode at 32": load.Workload(1024, 64, 32, 32)}


def measure(model: str, setting: str, flags: list[str], logs: Path, quick: bool) -> list[dict[str, Any]]:
    began = time.perf_counter()
    with relay.unified(flags, logs) as url:
        started = time.perf_counter() - began
        vocab = 500 if quick else 4000
        asyncio.run(load.run(url, load.Workload(64, 8, 8, 8), vocab=vocab))  # warm-up
        rows = []
        for name, work in workloads(quick).items():
            row = asyncio.run(load.run(url, work, vocab=vocab, seed=len(rows)))
            rows.append({"model": model, "setting": setting, "load": name, "started_s": started, **row})
            print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    figures = [f"{row[name]:,.1f}" for name in ("in_tok_s", "out_tok_s", "ttft_p50", "itl_p50", "itl_p99")]
    failed = f"{row['failed']} {row['first_error'][:60]}" if row["failed"] else "0"
    return "| " + " | ".join([row["model"], row["setting"], row["load"], *figures, failed]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-30b-a3b,deepseek-v2-lite", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--settings", default="tp,tp+ep,dp+ep", help="tp, dp, tp+ep or dp+ep, with commas between")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, help="of the model, in place of all")
    parser.add_argument("--quantization", help="as the servers' flag: fp8, fp8_per_block")
    parser.add_argument("--server-flags", default="", help="further flags of every server, in one word")
    parser.add_argument("--quick", action="store_true", help="few short requests")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server is stopped on the way out
    logs = args.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    print("| model | setting | load | prompt tok/s | output tok/s | TTFT p50 ms | ITL p50 ms | ITL p99 ms | failed |\n"
          + "|---" * 9 + "|", flush=True)
    rows: list[dict[str, Any]] = []
    for model, setting in itertools.product(args.models.split(","), args.settings.split(",")):
        shape = MODELS[model] | ({"num_hidden_layers": args.layers} if args.layers else {})
        with tempfile.TemporaryDirectory() as folder:
            flags = [*relay.dummy_flags(Path(folder), shape), "--disable-radix-cache",
                     *setting_flags(setting, args.gpus), *args.server_flags.split()]
            flags += ["--quantization", args.quantization] if args.quantization else []
            try:
                rows += measure(model, setting, flags, logs, args.quick)
            except AssertionError as error:  # a server that did not start: the others may
                print(f"| {model} | {setting} | failed: {str(error)[-1500:]} |", flush=True)
        if args.out:
            args.out.write_text(json.dumps({"gpus": args.gpus, "layers": args.layers, "quantization":
                                            args.quantization, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
