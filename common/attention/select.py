"""Chooses the attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from ..api.errors import ConfigError
from ..config.server import KernelArgs
from ..kvcache.pool import KVPool
from .base import AttentionBackend
from .per_window_backend import PerWindowBackend
from .prefill_decode_backend import PrefillDecodeBackend
from .torch_backend import TorchBackend

_FLASHINFER_DTYPES = ("float16", "bfloat16")
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_FLASHINFER_MIN_WINDOW = 1024
"""With a shorter window a prompt's rows see a few tiles, which our kernel shares among the query heads of a KV head;
FlashInfer's would be compiled for windows, a minute at a server's first start."""


def choose_backend(name: str, device: torch.device, dtype: str, head_dim: int) -> str:
    """Resolve ``auto``: flashinfer on a GPU where it is installed and fits the model, else triton; torch on a CPU.

    Raises ConfigError where the named backend cannot run.
    """
    on_gpu = device.type == "cuda"
    if name == "auto":
        if not on_gpu:
            return "torch"
        if find_spec("flashinfer") and dtype in _FLASHINFER_DTYPES and head_dim in _FLASHINFER_HEAD_DIMS:
            return "flashinfer"
        return "triton" if find_spec("triton") else "torch"
    if name == "torch":
        return name
    if find_spec(name) is None:
        raise ConfigError(f"--attention-backend {name} needs the package {name}, which is not installed.")
    if name == "flashinfer" and dtype not in _FLASHINFER_DTYPES:
        raise ConfigError(f"--attention-backend flashinfer takes --dtype float16 or bfloat16, not {dtype}.")
    if name == "flashinfer" and head_dim not in _FLASHINFER_HEAD_DIMS:
        raise ConfigError(f"--attention-backend flashinfer takes heads of {_FLASHINFER_HEAD_DIMS} values, not "
                          f"{head_dim}: use triton.")
    if not on_gpu and not (name == "triton" and interpreted()):
        raise ConfigError(f"--attention-backend {name} needs a GPU: use torch on a CPU.")
    return name


def interpreted() -> bool:
    from ...kernels._triton import INTERPRETED
    return INTERPRETED


def choose_decode_backend(args: KernelArgs, device: torch.device, dtype: str, head_dim: int) -> str:
    """Choose the backend of decode steps: triton on a GPU where it is installed, which needs no host under CUDA graphs.

    Raises ConfigError where the named one cannot run, or not under the CUDA graphs that were not disabled.
    """
    name = args.decode_attention_backend
    prefill = choose_backend(args.attention_backend, device, dtype, head_dim)
    if name == "auto":
        return "triton" if device.type == "cuda" and prefill != "torch" and find_spec("triton") else prefill
    chosen = choose_backend(name, device, dtype, head_dim)
    if chosen == "torch" and device.type == "cuda" and not args.disable_cuda_graph:
        raise ConfigError("--decode-attention-backend torch does not run under CUDA graphs: use triton or flashinfer, "
                          "or --disable-cuda-graph.")
    return chosen


def select_attention(args: KernelArgs, device: torch.device, pool: KVPool, num_heads: int,
                     dtype: str | None = None, windows: Sequence[int | None] = ()) -> AttentionBackend:
    """Build what the flags ask for: one backend, or one for prompts and one for decode steps; and one or two of these
    for each window, where the pool's layers have several.

    ``dtype`` is the model's, where the pool's is another. ``windows`` has each layer's; it is empty where all layers
    see all tokens."""
    dtype = dtype or pool.layout.dtype
    prefill = choose_backend(args.attention_backend, device, dtype, pool.layout.head_dim)
    decode = choose_decode_backend(args, device, dtype, pool.layout.head_dim)

    def of_window(window: int | None) -> AttentionBackend:
        made = [select_backend(name, device, pool, num_heads, dtype, window)
                for name in dict.fromkeys((prefill, decode))]
        return made[0] if len(made) == 1 else PrefillDecodeBackend(*made)

    kinds = list(dict.fromkeys(windows)) or [None]
    if len(kinds) == 1:
        return of_window(kinds[0])
    return PerWindowBackend({window: of_window(window) for window in kinds}, windows)


def select_backend(name: str, device: torch.device, pool: KVPool, num_heads: int,
                   dtype: str | None = None, window: int | None = None) -> AttentionBackend:
    """Build the backend that ``name`` (the flag's value) resolves to, for layers with this ``window``; ``num_heads``
    counts this rank's query heads. ``dtype`` as in ``select_attention``."""
    dtype = dtype or pool.layout.dtype
    chosen = choose_backend(name, device, dtype, pool.layout.head_dim)
    if chosen == "flashinfer" and (window is None or window >= _FLASHINFER_MIN_WINDOW):
        from .flashinfer_backend import FlashInferBackend
        return FlashInferBackend(pool, num_heads, getattr(torch, dtype), window)
    if chosen != "torch":
        from .triton_backend import TritonBackend
        return TritonBackend(pool, num_heads, window)
    return TorchBackend(pool, window)
