"""A small model, one stream: a Qwen3-0.6B-shaped dummy, whose kernels are so short that the host's time shows.

    python -m baton.tests.bench.small_model [--out FILE]

TTFT and TPOT through a unified server, beside the least time that the copy ceiling allows for the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
import tempfile
from pathlib import Path

from . import load
from .relay import dummy_flags, unified

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "eos_token_id": 151645,
}
WEIGHTS = 2 * (151936 * 1024 + 28 * 1024 * (2 * 16 * 128 + 2 * 8 * 128 + 3 * 3072))
"""Bytes that a decode step reads."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch

    from . import ceilings
    copy = ceilings.copy_tb_s()
    torch.cuda.empty_cache()
    rows = []
    with tempfile.TemporaryDirectory() as folder, \
            unified([*dummy_flags(Path(folder), QWEN3_06B), "--disable-radix-cache"], Path(folder)) as url:
        asyncio.run(load.run(url, load.Workload(512, 32, 8, 8)))  # warm-up
        for work in (load.Workload(1024, 256, 4, 1), load.Workload(1024, 256, 256, 64)):
            rows.append({"server": "unified, Qwen3-0.6B shape", **asyncio.run(load.run(url, work))})
    print(load.table(rows))
    print(f"TPOT p50 at one stream {rows[0]['tpot_p50']:.2f} ms; weights at the copy ceiling of {copy:.2f} TB/s "
          f"{WEIGHTS / copy / 1e9:.2f} ms")
    if args.out:
        args.out.write_text(json.dumps({"date": datetime.date.today().isoformat(), "command": " ".join(sys.argv),
                                        "copy_tb_s": copy, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
