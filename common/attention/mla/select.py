"""Chooses the backends of multi-head latent attention, by the same flags as other backends."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ...api.errors import ConfigError
from ...config.mla import MLASpec
from ...config.server import KernelArgs
from ...kvcache.pool import KVPool
from ..prefill_decode_backend import PrefillDecodeBackend
from ..select import interpreted
from .base import LatentBackend
from .torch_backend import MLATorchBackend
from .triton_backend import MLATritonBackend


def choose_latent_backend(name: str, device: torch.device) -> str:
    """Choose the backend of prompts. ``auto`` is triton on a GPU, torch on a CPU. Raises ConfigError where the named
    backend cannot run."""
    if name == "auto":
        return "triton" if device.type == "cuda" and find_spec("triton") else "torch"
    if name == "torch":
        return name
    if name == "flashinfer":
        raise ConfigError("--attention-backend flashinfer is not for prompts of a model with multi-head latent "
                          "attention: leave the flag out, or set --decode-attention-backend flashinfer.")
    if find_spec(name) is None:
        raise ConfigError(f"--attention-backend {name} needs the package {name}, which is not installed.")
    if device.type != "cuda" and not interpreted():
        raise ConfigError(f"--attention-backend {name} needs a GPU: use torch on a CPU.")
    return name


def choose_latent_decode_backend(args: KernelArgs, device: torch.device, mla: MLASpec, dtype: str,
                                 stored: str) -> str:
    """Choose the backend of decode steps, for a model in ``dtype`` whose latents are ``stored`` in another or the same.

    Raises ConfigError where the named one cannot run, or not under the CUDA graphs that were not disabled.
    """
    name = args.decode_attention_backend
    if name == "flashinfer":
        _check_flashinfer(device, mla, dtype, stored)
        return name
    chosen = choose_latent_backend(args.attention_backend if name == "auto" else name, device)
    if chosen != "triton" and device.type == "cuda" and not args.disable_cuda_graph:
        raise ConfigError(f"Attention by {chosen} does not decode under CUDA graphs: set --decode-attention-backend "
                          "triton, or --disable-cuda-graph.")
    return chosen


def _check_flashinfer(device: torch.device, mla: MLASpec, dtype: str, stored: str) -> None:
    if find_spec("flashinfer") is None:
        raise ConfigError("--decode-attention-backend flashinfer needs the package flashinfer, which is not installed.")
    why = None
    if device.type != "cuda":
        why = "needs a GPU"
    elif (mla.kv_lora_rank, mla.rope_dim) != (512, 64):
        why = f"takes latents of 512 + 64 values, not {mla.kv_lora_rank} + {mla.rope_dim}"
    elif dtype not in ("bfloat16", "float16") or stored != dtype:
        why = f"takes latents in bfloat16 or float16, as the model's, not {stored} in a model in {dtype}"
    if why is not None:
        raise ConfigError(f"--decode-attention-backend flashinfer {why}: leave the flag out.")


def select_latent_attention(args: KernelArgs, device: torch.device, pool: KVPool, mla: MLASpec,
                            num_heads: int, dtype: str) -> LatentBackend:
    """Build what the flags ask for: one backend, or one for prompts and one for decode steps. ``dtype`` is the model's.
    """
    prefill = choose_latent_backend(args.attention_backend, device)
    decode = choose_latent_decode_backend(args, device, mla, dtype, pool.layout.dtype)
    if prefill == decode:
        return latent_backend(prefill, pool, mla, num_heads, dtype)
    return PrefillDecodeBackend(latent_backend(prefill, pool, mla, num_heads, dtype),
                        latent_backend(decode, pool, mla, num_heads, dtype))


def latent_backend(name: str, pool: KVPool, mla: MLASpec, num_heads: int, dtype: str) -> LatentBackend:
    """Build the backend of this name; ``num_heads`` counts this rank's heads."""
    if name == "flashinfer":
        from .flashinfer_backend import MLAFlashInferBackend
        return MLAFlashInferBackend(pool, mla, num_heads, getattr(torch, dtype))
    if name == "triton":
        return MLATritonBackend(pool, mla, num_heads, getattr(torch, dtype))
    return MLATorchBackend(pool, mla)
