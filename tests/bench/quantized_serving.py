"""What each format of weights makes of a server's two phases: a dummy in this process, as fp8_serving.py measures them.

    python -m baton.tests.bench.quantized_serving [--only WORD,WORD] [--out FILE]
    python -m baton.tests.bench.quantized_serving --tiny        # tiny models on a CPU: does the bench itself run?

An 8B shape in bfloat16, float8, int8 weights and activations, integer weights and NF4; and gpt-oss's shapes with their
experts in MXFP4 (120b: 63 GB, it fits one H200). A line a format, beside its ``floor``: the bytes that a decode step
reads of weights and KV cache, at the rate of a copy of the same run. Experts are those that so many tokens choose if
each chooses any. ``share`` is the floor's part of what was measured.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import ceilings, dummy_engine
from .fp8_serving import FULL, SMALL, TINY, Load, measure
from .relay import LLAMA_8B

GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "torch_dtype": "bfloat16",
    "eos_token_id": 200002, "quantization_config": {"quant_method": "mxfp4"}}
GPT_OSS_20B = GPT_OSS_120B | {"num_hidden_layers": 24, "num_local_experts": 32}
TINY_GPT_OSS = GPT_OSS_120B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
                               "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
                               "num_local_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1}


class Kind(NamedTuple):
    """``bits`` of a weight in linear layers, or in experts where there are some, with its part of a scale and a
    zero."""

    name: str
    bits: float
    quantization: Any = None
    shape: dict[str, Any] = LLAMA_8B


KINDS = (Kind("bfloat16", 16), Kind("int4wo-128", 4 + 48 / 128, "int4wo-128"),
         Kind("gpt-oss-120b mxfp4", 4.25, None, GPT_OSS_120B), Kind("int8wo", 8, "int8wo"),
         Kind("w8a8_int8", 8, "w8a8_int8"), Kind("bitsandbytes nf4", 4 + 32 / 64, "bitsandbytes"),
         Kind("fp8", 8, "fp8"), Kind("gpt-oss-20b mxfp4", 4.25, None, GPT_OSS_20B))


def step_bytes(kind: Kind, batch: int, context: int) -> float:
    """Bytes that a decode step reads: weights, keys and values."""
    shape = kind.shape
    hidden, layers, kv_heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_key_value_heads"]
    dim = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    attention = hidden * dim * (2 * shape["num_attention_heads"] + 2 * kv_heads)
    mlp, experts = 3 * hidden * shape["intermediate_size"], shape.get("num_local_experts", 0)
    if experts:
        chosen = experts * (1 - (1 - shape["num_experts_per_tok"] / experts) ** batch)
        weights = 2 * attention + chosen * mlp * kind.bits / 8
    else:
        weights = (attention + mlp) * kind.bits / 8
    window = shape.get("sliding_window")  # of every second layer, as gpt-oss has it
    seen = context if window is None else (context + min(context, window)) / 2
    return layers * (weights + batch * seen * 4 * kv_heads * dim) + 2 * hidden * shape["vocab_size"]


def run(kind: Kind, load: Load, tiny: bool, copy_tb_s: float) -> dict[str, Any]:
    device, shape = "cpu" if tiny else "cuda", kind.shape
    if tiny:
        shape = TINY_GPT_OSS if "num_local_experts" in shape else TINY
    engine = dummy_engine.make(load.pool, max(load.batches), sizes=load.batches, quantization=kind.quantization,
                               shape=shape, device=device)
    try:
        held = 0.0 if tiny else torch.cuda.memory_allocated() / 1e9
        figures = measure(engine, load)
    finally:
        engine.close()
        del engine
        gc.collect()
        if not tiny:
            torch.cuda.empty_cache()
    floors = {f"decode_{batch}_ms": step_bytes(kind._replace(shape=shape), batch, load.context) / copy_tb_s / 1e9
              for batch in load.batches}
    return {"weights": kind.name, "allocated_gb": round(held, 1), "figures": figures, "floors": floors}


def line(row: dict[str, Any]) -> str:
    figures, floors = row["figures"], row["floors"]
    steps = "  ".join(f"{name[7:-3]:>2} requests {figures[name]:6.2f} ms (floor {floor:5.2f}, share "
                      f"{floor / figures[name]:.2f})" for name, floor in floors.items())
    return f"{row['weights']:20} {row['allocated_gb']:5.1f} GB  prefill {figures['prefill_tok_s']:7,.0f} tok/s  {steps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", help="parts of names, with commas between them")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    copy = 1.0 if args.tiny else ceilings.copy_tb_s()
    device = "a CPU" if args.tiny else torch.cuda.get_device_name()
    print(f"{device}: copy {copy:.2f} TB/s", flush=True)
    found = []
    for kind in KINDS:
        if any(word in kind.name for word in args.only.split(",")):
            found.append(run(kind, SMALL if args.tiny else FULL, args.tiny, copy))
            print(line(found[-1]), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps({"device": device, "copy_tb_s": copy, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
