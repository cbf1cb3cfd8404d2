"""Chooses the backends of multi-head latent attention, by the same flags as other backends."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ...api.errors import ConfigError
from ...config.mla import MLASpec
from ...config.server import KernelArgs
from ...config.server.kernels import LATENT_BACKENDS
from ...kvcache.pool import KVPool
from ..prefill_decode_backend import PrefillDecodeBackend
from .base import LatentBackend


def choose_latent_backend(name: str, device: torch.device) -> str:
    """Choose the backend of prompts. ``auto`` is triton on a GPU, torch on a CPU. Raises ConfigError where the named
    backend cannot run."""
    if name == "auto":
        return "triton" if device.type == "cuda" and find_spec("triton") else "torch"
    if not LATENT_BACKENDS.get(name).takes_prompts:
        raise ConfigError(f"--attention-backend {name} is not for prompts of a model with multi-head latent "
                          f"attention: leave the flag out, or set --decode-attention-backend {name}.")
    _check_installed(name)
    LATENT_BACKENDS.get(name).check(device)
    return name


def choose_latent_decode_backend(args: KernelArgs, device: torch.device, mla: MLASpec, dtype: str,
                                 stored: str) -> str:
    """Choose the backend of decode steps, for a model in ``dtype`` whose latents are ``stored`` in another or the same.

    Raises ConfigError where the named one cannot run, or not under the CUDA graphs that were not disabled.
    """
    name = args.decode_attention_backend
    if name != "auto" and not LATENT_BACKENDS.get(name).takes_prompts:
        _check_installed(name, "decode-")
        chosen = name
    else:
        chosen = choose_latent_backend(args.attention_backend if name == "auto" else name, device)
    backend = LATENT_BACKENDS.get(chosen)
    backend.check_decode(device, mla, dtype, stored)
    if not backend.captures and device.type == "cuda" and not args.disable_cuda_graph:
        raise ConfigError(f"Attention by {chosen} does not decode under CUDA graphs: set --decode-attention-backend "
                          "triton, or --disable-cuda-graph.")
    return chosen


def _check_installed(name: str, steps: str = "") -> None:
    for module in LATENT_BACKENDS.needs_of(name):
        if find_spec(module) is None:
            raise ConfigError(f"--{steps}attention-backend {name} needs the package {module}, which is not installed.")


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
    return LATENT_BACKENDS.get(name).make(pool, mla, num_heads, getattr(torch, dtype))
