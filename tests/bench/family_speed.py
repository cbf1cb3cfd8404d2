"""Speed of families with layers that Llama lacks: dummies of their real widths with a few layers, in this process.

    python -m baton.tests.bench.family_speed [--only WORD] [--out FILE]
    python -m baton.tests.bench.family_speed --tiny       # small ones on a CPU: does the bench itself run?

Milliseconds of a prompt of 8,192 tokens and of decode steps of 1 and 64 requests; ``floor_ms``: what reading all
weights takes, of which a step of a mixture of experts reads fewer.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from ...common.bench.one_batch import once
from . import ceilings, dummy_engine

_BASE: dict[str, Any] = {"torch_dtype": "bfloat16", "max_position_embeddings": 16384, "eos_token_id": 1}
_LINEAR = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
           "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
           "linear_value_head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama 3 8B": {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
                   "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "Gemma 3 12B": {"architectures": ["Gemma3ForCausalLM"], "hidden_size": 3840, "intermediate_size": 15360,
                    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
                    "vocab_size": 262208, "sliding_window": 1024, "sliding_window_pattern": 6},
    "Qwen3.5 9B": {"architectures": ["Qwen3_5ForCausalLM"], **_LINEAR, "hidden_size": 4096, "num_key_value_heads": 4,
                   "intermediate_size": 12288, "vocab_size": 248320},
    "Qwen3-Next": {"architectures": ["Qwen3NextForCausalLM"], **_LINEAR, "hidden_size": 2048,
                   "intermediate_size": 5632, "vocab_size": 151936, "num_experts": 512, "num_experts_per_tok": 10,
                   "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "Falcon-H1 34B": {"architectures": ["FalconH1ForCausalLM"], "hidden_size": 5120, "intermediate_size": 21504,
                      "num_hidden_layers": 8, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
                      "vocab_size": 261120, "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128,
                      "mamba_n_groups": 2, "mamba_d_state": 256, "max_position_embeddings": 16384},
}
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
         "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}


def measure(shape: dict[str, Any], prompt: int, batches: tuple[int, ...], device: str) -> dict[str, float]:
    engine = dummy_engine.make(
        (prompt + 64) * 2 + max(batches) * 1200, max(batches), sizes=batches, device=device,
        states=4 * max(batches) + 8, shape={**_BASE, **shape},
        attention_backend="triton" if device == "cuda" else "torch")
    try:
        figures = {"weights_gb": torch.cuda.memory_allocated() / 1e9 if device == "cuda" else 0.0}
        once(engine, 1, prompt, 2)  # compiles
        figures["prompt_ms"] = 1e3 * min(once(engine, 1, prompt, 2).prefill for _ in range(3))
        for batch in batches:
            figures[f"decode_{batch}_ms"] = 1e3 * statistics.median(once(engine, batch, prompt // 8, 30).steps[5:])
        return figures
    finally:
        engine.close()
        del engine
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    copy = 0.0 if args.tiny else ceilings.copy_tb_s()
    rows = {}
    for name, shape in SHAPES.items():
        if args.only not in name:
            continue
        if args.tiny:
            shape = shape | {key: value for key, value in _TINY.items() if key in shape}
        figures = measure(shape, 64 if args.tiny else 8192, (1, 2) if args.tiny else (1, 64),
                                       "cpu" if args.tiny else "cuda")
        figures["floor_ms"] = figures["weights_gb"] / copy if copy else 0.0
        rows[name] = figures
        print(f"{name:14} {shape['num_hidden_layers']} layers  "
              + "  ".join(f"{key} {value:.2f}" for key, value in figures.items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"copy_tb_s": copy, "families": rows}, indent=1))


if __name__ == "__main__":
    main()
