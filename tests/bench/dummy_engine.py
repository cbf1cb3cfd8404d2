"""An engine of a dummy model in this process, as a server on one GPU has it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from ...common.bench.client.stepped_engine import SteppedEngine
from ...common.config.cli import build
from ...common.config.server import ServerConfig
from ...common.distributed.parallel import Parallel
from .relay import LLAMA_8B

Quantization = Literal["fp8", "fp8_per_tensor", "fp8_per_block"] | None
CacheType = Literal["auto", "fp8_e4m3", "fp8_e5m2"]

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "eos_token_id": 151645,
}

TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "eos_token_id": 1,
}
"""Runs on a CPU."""


def make(tokens: int, max_running: int, *, shape: dict[str, Any] = LLAMA_8B, sizes: tuple[int, ...] = (),
         device: str = "cuda", quantization: Quantization = None, kv_cache_dtype: CacheType = "auto",
         parallel: Parallel | None = None,
         model_impl: Literal["auto", "baton", "transformers"] = "auto",
         attention_backend: str = "auto", states: int | None = None) -> SteppedEngine:
    """With a KV pool of ``tokens``, ``states`` of a hybrid model and no prefix cache; ``sizes``: the decode batches to
    capture, () for a server's; ``parallel``: see SteppedEngine."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        return SteppedEngine(build(ServerConfig, {
            "model_path": folder, "dtype": "bfloat16" if device == "cuda" else "float32", "device": device,
            "load_format": "dummy", "quantization": quantization, "model_impl": model_impl, "max_total_tokens": tokens,
            "attention_backend": attention_backend, "max_mamba_cache_size": states,
            "disable_radix_cache": True, "kv_cache_dtype": kv_cache_dtype, "max_running_requests": max_running,
            "cuda_graph_bs": sizes}), parallel)
