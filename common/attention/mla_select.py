"""Choice of the backend of multi-head latent attention, by the flags that choose other backends."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ..api.errors import ConfigError
from ..config.mla import MLASpec
from ..config.server import KernelArgs
from ..kvcache.pool import KVPool
from .mla_base import LatentBackend
from .mla_torch import MLATorchBackend
from .mla_triton import MLATritonBackend
from .select import interpreted
from .split import SplitBackend


def choose_latent_backend(name: str, device: torch.device) -> str:
    """Resolve ``auto``: triton on a GPU, torch on a CPU. Raises ConfigError where the named backend cannot run."""
    if name == "auto":
        return "triton" if device.type == "cuda" and find_spec("triton") else "torch"
    if name == "torch":
        return name
    if name != "triton":
        raise ConfigError(f"--attention-backend {name} has no multi-head latent attention, which this model needs: use "
                          "triton, or leave the flag out.")
    if find_spec(name) is None:
        raise ConfigError(f"--attention-backend {name} needs the package {name}, which is not installed.")
    if device.type != "cuda" and not interpreted():
        raise ConfigError(f"--attention-backend {name} needs a GPU: use torch on a CPU.")
    return name


def choose_latent_decode_backend(args: KernelArgs, device: torch.device) -> str:
    """Raises ConfigError where the named one cannot run, or not under the CUDA graphs that were not disabled."""
    name = args.decode_attention_backend
    chosen = choose_latent_backend(args.attention_backend if name == "auto" else name, device)
    if chosen != "triton" and device.type == "cuda" and not args.disable_cuda_graph:
        raise ConfigError(f"Attention by {chosen} does not decode under CUDA graphs: set --decode-attention-backend "
                          "triton, or --disable-cuda-graph.")
    return chosen


def select_latent_attention(args: KernelArgs, device: torch.device, pool: KVPool, mla: MLASpec,
                            num_heads: int, dtype: str) -> LatentBackend:
    """What the flags ask for: one backend, or one for prompts and one for decode steps. ``dtype`` is the model's."""
    prefill = choose_latent_backend(args.attention_backend, device)
    decode = choose_latent_decode_backend(args, device)
    if prefill == decode:
        return latent_backend(prefill, pool, mla, num_heads, dtype)
    return SplitBackend(latent_backend(prefill, pool, mla, num_heads, dtype),
                        latent_backend(decode, pool, mla, num_heads, dtype))


def latent_backend(name: str, pool: KVPool, mla: MLASpec, num_heads: int, dtype: str) -> LatentBackend:
    """Build the backend of this name; ``num_heads`` counts this rank's heads."""
    if name == "triton":
        return MLATritonBackend(pool, mla, num_heads, getattr(torch, dtype))
    return MLATorchBackend(pool, mla)
