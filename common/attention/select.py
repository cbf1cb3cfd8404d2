"""Chooses the attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from ...kernels.tuning.policy import policy_of
from ..api.errors import ConfigError
from ..config.scores import PLAIN_SCORES, Scores
from ..config.server import KernelArgs
from ..config.server.kernels import ATTENTION_BACKENDS
from ..config.window import AttentionChunk
from ..kvcache.pool import KVPool
from .base import AttentionBackend, AttentionFacts, CompilesKernels
from .chunked_backend import ChunkedBackend
from .per_layer_backend import LayerPlace, PerLayerBackend
from .prefill_decode_backend import PrefillDecodeBackend

_BY_PREFERENCE = ("flashinfer", "triton")
"""The backends that ``auto`` tries on a GPU; else it is torch."""


def choose_backend(name: str, device: torch.device, dtype: str, head_dim: int, softcap: float = 0.0) -> str:
    """Resolve ``auto``: flashinfer on a GPU where it is installed and fits the model, else triton; torch on a CPU.

    Under a batch-invariant policy it is never flashinfer, whose sums have another order in batches of another size.
    Raises ConfigError where the named backend cannot run.
    """
    facts = AttentionFacts(device, dtype, head_dim, softcap)
    invariant = policy_of(device).batch_invariant
    if name == "auto":
        tried = _BY_PREFERENCE if device.type == "cuda" else ()
        return next((each for each in tried if _runs(each, facts) and not (invariant and each == "flashinfer")),
                    "torch")
    _check(name, facts)
    if invariant and name == "torch" and device.type == "cuda":
        raise ConfigError("--enable-deterministic-inference on a GPU needs the attention backend triton: leave "
                          "--attention-backend and --decode-attention-backend at auto.")
    return name


def _check(name: str, facts: AttentionFacts) -> None:
    """Raises ConfigError where the backend cannot run."""
    for module in ATTENTION_BACKENDS.needs_of(name):
        if find_spec(module) is None:
            raise ConfigError(f"--attention-backend {name} needs the package {module}, which is not installed.")
    ATTENTION_BACKENDS.get(name).check(facts)


def _runs(name: str, facts: AttentionFacts) -> bool:
    try:
        _check(name, facts)
    except ConfigError:
        return False
    return True


def choose_decode_backend(args: KernelArgs, device: torch.device, dtype: str, head_dim: int,
                          softcap: float = 0.0) -> str:
    """Choose the backend of decode steps: triton on a GPU where it is installed, which needs no host under CUDA graphs.

    Raises ConfigError where the named one cannot run, or not under the CUDA graphs that were not disabled.
    """
    name = args.decode_attention_backend
    prefill = choose_backend(args.attention_backend, device, dtype, head_dim, softcap)
    if name == "auto":
        return "triton" if device.type == "cuda" and prefill != "torch" and find_spec("triton") else prefill
    chosen = choose_backend(name, device, dtype, head_dim, softcap)
    if not ATTENTION_BACKENDS.get(chosen).captures and device.type == "cuda" and not args.disable_cuda_graph:
        raise ConfigError(f"--decode-attention-backend {chosen} does not run under CUDA graphs: use triton or "
                          "flashinfer, or --disable-cuda-graph.")
    return chosen


def select_attention(args: KernelArgs, device: torch.device, pool: KVPool, num_heads: int,
                     dtype: str | None = None, windows: Sequence[int | None] = (),
                     scores: Scores = PLAIN_SCORES) -> AttentionBackend:
    """Build what the flags ask for: one backend, or one for prompts and one for decode steps; and one or two of these
    for each window, where the pool's layers have several.

    ``dtype`` is the model's, where the pool's is another. ``windows`` has each layer's; it is empty where all layers
    see all tokens. ``scores`` are those of all layers."""
    dtype = dtype or pool.layout.dtype
    facts = device, dtype, pool.layout.head_dim, scores.softcap
    prefill = choose_backend(args.attention_backend, *facts)
    decode = choose_decode_backend(args, *facts)

    def of_window(window: int | None) -> AttentionBackend:
        if isinstance(window, AttentionChunk):
            name = "triton" if device.type == "cuda" and prefill != "torch" else prefill
            return ChunkedBackend(select_backend(name, device, pool, num_heads, dtype, None, scores), window,
                                  pool.layout.page_size, on_device=name == "triton")
        made = [select_backend(name, device, pool, num_heads, dtype, window, scores)
                for name in dict.fromkeys((prefill, decode))]
        if args.attention_backend == "auto" and isinstance(made[0], CompilesKernels):
            made[0].compile_meanwhile()
        return made[0] if len(made) == 1 else PrefillDecodeBackend(*made)

    kinds = list(dict.fromkeys(windows)) or [None]
    if len(kinds) == 1:
        return of_window(kinds[0])
    return PerLayerBackend(list(map(of_window, kinds)), [0] * len(kinds),
                           [LayerPlace(kinds.index(window), layer) for layer, window in enumerate(windows)])


def select_backend(name: str, device: torch.device, pool: KVPool, num_heads: int,
                   dtype: str | None = None, window: int | None = None,
                   scores: Scores = PLAIN_SCORES) -> AttentionBackend:
    """Build the backend that ``name`` (the flag's value) resolves to, for layers with this ``window`` and ``scores``;
    ``num_heads`` counts this rank's query heads. ``dtype`` as in ``select_attention``."""
    dtype = dtype or pool.layout.dtype
    chosen = choose_backend(name, device, dtype, pool.layout.head_dim, scores.softcap)
    return ATTENTION_BACKENDS.get(chosen).make(pool, num_heads, getattr(torch, dtype), window, scores)
