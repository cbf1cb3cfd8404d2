"""Preflight checks: report in the first second what would fail after the weights are loaded."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any, cast

from ..api.errors import ConfigError
from ..config.addresses import check_free
from ..config.checkpoint import check_removable, resolve_pooling
from ..config.draft_kind import check_draft
from ..config.draft_model import draft_args, naming_draft
from ..config.hybrid import check_hybrid
from ..config.model import ModelSpec
from ..config.packages import is_installed
from ..config.server import CacheArgs, ServerConfig
from ..config.server.disaggregation import TRANSFER_BACKENDS
from ..config.server.kernels import ATTENTION_CHOICES, SAMPLING_CHOICES
from ..config.window import forgetting
from ..kvcache.eviction.base import make_order
from ..kvcache.layout import DTYPE_BYTES
from ..models.registry import load_model_spec
from ..process import available_host_bytes
from ..registry import Choices
from ..tokenizer.templates import check_template

log = logging.getLogger("baton.engine")

_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_GIB = 1 << 30


def preflight(config: ServerConfig, spec: ModelSpec) -> None:
    """Raises ConfigError for a configuration that this host cannot run; imports nothing that is slow."""
    spec.check_tp(config.parallel.tp_size // config.dp_size,
                  whole_dense=config.parallel.moe_dense_tp_size is not None)
    if config.model.delete_ckpt_after_loading:
        check_removable(config.model)
    _check_device(config)
    _check_backends(config)
    if config.model.chat_template is not None:
        check_template(config.model.chat_template)
    if config.model.is_embedding:
        resolve_pooling(config.model, "last")
    make_order(config.cache.radix_eviction_policy, config.cache.radix_eviction_policy_config)
    if config.events.kv_events_port:
        for port in (config.events.kv_events_port, config.events.kv_events_port + 1):  # events, and replays
            check_free(config.http.host, port, "--kv-events-port")
    check_draft(config, spec)
    check_hybrid(config, spec)
    for host, port in config.nodes.listen_addresses:  # on node 0; the others do not listen
        check_free(host, port, "--dist-init-addr", "--dist-init-addr")
    if not _may_have_gpu(config):
        _check_host_pool(config, spec)


def fitted(config: ServerConfig, spec: ModelSpec) -> ServerConfig:
    """Returns the configuration with what the model decides: its implementation, where ``--model-impl`` is auto, and
    how encoders are served. Raises ConfigError where other flags do not fit that."""
    if config.model.model_impl == "auto" and spec.implementation:
        log.info("%s has no implementation of Baton's own: --model-impl %s computes it", spec.architecture,
                 spec.implementation)
        config = replace(config, model=replace(config.model, model_impl=cast(Any, spec.implementation)))
    return _as_encoder(config, spec) if spec.encoder else config


def _as_encoder(config: ServerConfig, spec: ModelSpec) -> ServerConfig:
    """Returns the configuration that computes whole sequences, of which no keys and values are kept. Raises ConfigError
    where it cannot."""
    if config.dp_size > 1:
        raise ConfigError(f"{spec.architecture} attends in both directions, and --tp-size alone splits it: leave "
                          "--enable-dp-attention out.")
    if config.schedule.max_prefill_tokens < spec.context_length:
        raise ConfigError(f"{spec.architecture} computes sequences whole: --max-prefill-tokens "
                          f"{config.schedule.max_prefill_tokens} must be its {spec.context_length} tokens or more.")
    cache, tokens = config.cache, 2 * config.schedule.max_prefill_tokens
    return replace(
        config, model=replace(config.model, is_embedding=True),
        schedule=replace(config.schedule, chunked_prefill_size=-1),
        kernels=replace(config.kernels, attention_backend="torch", decode_attention_backend="auto",
                        disable_cuda_graph=True),
        cache=replace(cache, disable_radix_cache=True, max_total_tokens=cache.max_total_tokens or tokens))


def _may_have_gpu(config: ServerConfig) -> bool:
    return config.model.device != "cpu" and any(map(os.path.exists, _GPU_FILES))


def _check_device(config: ServerConfig) -> None:
    if config.model.device == "cuda" and not _may_have_gpu(config):
        raise ConfigError("--device cuda needs a GPU, and this host shows none (no driver's /dev/nvidiactl): use "
                          "--device cpu, or give the container its GPUs.")


def _check_backends(config: ServerConfig) -> None:
    """Checks that the host has what backends need: a GPU, and packages."""
    kernels = config.kernels
    chosen: list[tuple[str, Choices, str]] = [
        ("--attention-backend", ATTENTION_CHOICES, kernels.attention_backend),
        ("--sampling-backend", SAMPLING_CHOICES, kernels.sampling_backend),
        ("--decode-attention-backend", ATTENTION_CHOICES, kernels.decode_attention_backend)]
    if config.duties.transfers_kv:
        chosen.append(("--disaggregation-transfer-backend", Choices.of(TRANSFER_BACKENDS),
                       config.disaggregation.disaggregation_transfer_backend))
    may_have_gpu = _may_have_gpu(config) or os.environ.get("TRITON_INTERPRET") == "1"
    why = "--device is cpu" if config.model.device == "cpu" else "this host shows none (no driver's /dev/nvidiactl)"
    for flag, given in [("--enable-layerwise-nvtx-marker", config.debug.enable_layerwise_nvtx_marker),
                        ("--enable-profile-cuda-graph", config.debug.enable_profile_cuda_graph),
                        ("--enable-tf32-matmul", kernels.enable_tf32_matmul)]:
        if given and not _may_have_gpu(config):
            raise ConfigError(f"{flag} needs a GPU, and {why}: leave it out.")
    for flag, choices, name in chosen:
        if not may_have_gpu and choices.has(name, "gpu"):
            raise ConfigError(f"{flag} {name} needs a GPU, and {why}: give the flag the value torch, or leave it out.")
        for module, package in choices.needs_of(name).items():
            if not is_installed(module):
                raise ConfigError(f"{flag} {name} needs the package {package}: pip install {package}, or give the flag "
                                  "another value.")


def _check_host_pool(config: ServerConfig, spec: ModelSpec) -> None:
    """Check a pool in host memory. The kernel commits it page by page as it is written, and would kill the server
    later."""
    tokens = config.cache.max_total_tokens
    if tokens is None:
        return
    dtype = config.model.dtype if config.model.dtype != "auto" else "float32"
    ranks = config.parallel.tp_size
    tp_size = ranks // config.dp_size
    bytes_per_token = ranks * (token_bytes(config.cache, spec, tp_size, dtype,
                                           pool_layers(config, spec, range(spec.num_kv_layers)))
                               + draft_token_bytes(config, spec, tp_size, dtype))
    check_pool(tokens, bytes_per_token, available_host_bytes(), "this host")


def pool_layers(config: ServerConfig, spec: ModelSpec, layers: range) -> float:
    """The layers of a rank, of which those with a pool of their own for a sliding window count by its share."""
    if spec.state is not None:
        return len(spec.kv_layers(layers))
    windows, cache = forgetting(spec.windows_of(range(spec.num_layers))), config.cache
    if cache.disable_hybrid_swa_memory or config.model.is_embedding or None not in windows:
        return len(layers)
    return sum(1 if windows[layer] is None else cache.swa_full_tokens_ratio for layer in layers)


def token_bytes(cache: CacheArgs, spec: ModelSpec, tp_size: int, dtype: str, num_layers: float) -> int:
    """Bytes of one token in one rank's pools."""
    planes = 2 if spec.mla is None else 1
    width = DTYPE_BYTES[_KV_DTYPES.get(cache.kv_cache_dtype, dtype)]
    return int(num_layers * planes * spec.local_kv_heads(tp_size) * spec.kv_dim * width)


def draft_token_bytes(config: ServerConfig, model: ModelSpec, tp_size: int, dtype: str) -> int:
    """Bytes of one token in one rank's pool of the draft model, 0 without one; raises ConfigError for a checkpoint that
    cannot be read. ``model`` is that which it drafts for."""
    args = config.speculative
    if not args.has("draft_path") and not args.has("shifted"):
        return 0
    spec, layers = model, model.mtp_layers
    if args.speculative_draft_model_path not in (None, config.model.model_path):
        with naming_draft():
            spec = load_model_spec(draft_args(config), draft=True)
        layers = spec.mtp_layers or spec.num_layers
    cache = replace(config.cache, kv_cache_dtype=args.draft_cache_dtype(config.cache.kv_cache_dtype))
    return token_bytes(cache, spec, tp_size, dtype, layers)


def check_pool(tokens: int, bytes_per_token: int, available: int, where: str) -> None:
    """Raises ConfigError where a pool of ``tokens`` does not fit into ``available`` bytes."""
    needed = tokens * bytes_per_token
    if needed > available:
        raise ConfigError(f"--max-total-tokens {tokens} takes {needed / _GIB:.1f} GiB for the KV pool, and "
                          f"{where} has {available / _GIB:.1f} GiB: lower it to {available // bytes_per_token} or "
                          "less.")
