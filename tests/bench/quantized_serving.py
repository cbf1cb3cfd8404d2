"""What each format of weights makes of a server's two phases: a dummy in this process, as fp8_serving.py measures them.

    python -m baton.tests.bench.quantized_serving [--only WORD] [--out FILE]
    python -m baton.tests.bench.quantized_serving --tiny        # tiny models on a CPU: does the bench itself run?

An 8B shape in bfloat16, int8 weights and activations, integer weights and NF4; and gpt-oss-120b's shape with its
experts in MXFP4 (62 GB: it fits one H200). Also the gigabytes of the weights.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import dummy_engine
from .fp8_serving import FULL, SMALL, TINY, Load, measure
from .relay import LLAMA_8B

GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "torch_dtype": "bfloat16",
    "eos_token_id": 200002, "quantization_config": {"quant_method": "mxfp4"}}
TINY_GPT_OSS = GPT_OSS_120B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
                               "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
                               "num_local_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1}


class Kind(NamedTuple):
    name: str
    quantization: Any = None
    is_gpt_oss: bool = False


KINDS = (Kind("bfloat16"), Kind("w8a8_int8", "w8a8_int8"), Kind("int8wo", "int8wo"), Kind("int4wo-128", "int4wo-128"),
         Kind("bitsandbytes", "bitsandbytes"), Kind("gpt-oss-120b mxfp4", None, True))


def run(kind: Kind, load: Load, tiny: bool, device: str) -> dict[str, Any]:
    shape = (TINY_GPT_OSS if tiny else GPT_OSS_120B) if kind.is_gpt_oss else TINY if tiny else LLAMA_8B
    engine = dummy_engine.make(load.pool, max(load.batches), sizes=load.batches, quantization=kind.quantization,
                               shape=shape, device=device)
    try:
        held = torch.cuda.memory_allocated() / 1e9 if device == "cuda" else 0.0
        return {"weights": kind.name, "allocated_gb": round(held, 1), "figures": measure(engine, load)}
    finally:
        engine.close()
        del engine
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    for kind in KINDS:
        if args.only in kind.name:
            found.append(run(kind, SMALL if args.tiny else FULL, args.tiny, "cpu" if args.tiny else "cuda"))
            print(json.dumps(found[-1]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
