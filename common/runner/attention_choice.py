"""Chooses one rank's attention backend, by the model, the flags and the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..attention.base import AttentionPlanner
from ..attention.mla.select import choose_latent_decode_backend, select_latent_attention
from ..attention.per_layer_backend import LayerPlace, PerLayerBackend
from ..attention.select import choose_decode_backend, select_attention
from ..config.model import ModelSpec
from ..config.server import ServerConfig
from ..distributed.parallel import Parallel
from ..kvcache.pool import KVPool
from ..weights.kv_scales import KV_DTYPES


@dataclass(frozen=True)
class AttentionChoice:
    """The inputs of the choice; ``dtype`` is the model's."""

    config: ServerConfig
    spec: ModelSpec
    parallel: Parallel
    dtype: str

    def check(self, device: torch.device) -> None:
        """Raises ConfigError where the backend that the flags name cannot run the model; needs no weights."""
        if self.spec.mla is None:
            choose_decode_backend(self.config.kernels, device, self.dtype, self.spec.head_dim)
        else:
            stored = KV_DTYPES.get(self.config.cache.kv_cache_dtype, self.dtype)
            choose_latent_decode_backend(self.config.kernels, device, self.spec.mla, self.dtype, stored)

    def over(self, pools: Sequence[KVPool]) -> AttentionPlanner:
        """Creates the attention backend for the pools of all cache groups."""
        spec, pool = self.spec, pools[0]
        num_heads = spec.num_heads // self.parallel.attn_tp.size
        if spec.mla is not None:
            return select_latent_attention(self.config.kernels, pool.groups[0].device, pool, spec.mla, num_heads,
                                           self.dtype)
        windows = spec.windows_of(range(spec.num_layers))
        numbers = [[pool.layout.number_of(layer) for layer in range(pool.layout.num_layers)] for pool in pools]
        backends = [select_attention(self.config.kernels, pool.groups[0].device, pool, num_heads, self.dtype,
                                     [windows[number] for number in own]) for pool, own in zip(pools, numbers)]
        places = sorted((number, LayerPlace(group, layer)) for group, own in enumerate(numbers)
                        for layer, number in enumerate(own))
        if len(pools) == 1:
            return backends[0]
        return PerLayerBackend(backends, range(len(pools)), [place for _, place in places])
