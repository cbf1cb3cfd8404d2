"""Chooses one rank's attention backend, by the model, the flags and the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..api.errors import ConfigError
from ..attention.base import AttentionBackend, AttentionPlanner
from ..attention.double_sparsity_backend import SPARSE_WITHIN, DoubleSparsityBackend, Sparsity
from ..attention.hybrid_backend import HybridBackend, StateBackend
from ..attention.mla.select import choose_latent_decode_backend, select_latent_attention
from ..attention.per_layer_backend import LayerPlace, PerLayerBackend
from ..attention.select import choose_decode_backend, select_attention
from ..attention.whole_sequences import WholeSequencesBackend
from ..config.model import ModelSpec
from ..config.server import KernelArgs, ServerConfig
from ..config.state import StateSpec
from ..distributed.parallel import Parallel
from ..kvcache.channel_order import ChannelOrder
from ..kvcache.pool import KVPool
from ..weights.kv_scales import KV_DTYPES


@dataclass(frozen=True)
class AttentionChoice:
    """The inputs of the choice; ``dtype`` is the model's."""

    config: ServerConfig
    spec: ModelSpec
    parallel: Parallel
    dtype: str

    @property
    def _kernels(self) -> KernelArgs:
        return replace(self.config.kernels, disable_cuda_graph=not self.config.captures_graphs)

    def check(self, device: torch.device) -> None:
        """Raises ConfigError where the backend that the flags name cannot run the model; needs no weights."""
        sparse = ChannelOrder.read(self.config.sparsity, self.spec) is not None
        if self.spec.mla is None:
            name = choose_decode_backend(self._kernels, device, self.dtype, self.spec.head_dim,
                                         self.spec.scores.softcap)
            if sparse and name not in SPARSE_WITHIN:
                raise ConfigError(f"--enable-double-sparsity does not decode by the attention backend {name}: set "
                                  "--decode-attention-backend to triton.")
        else:
            stored = KV_DTYPES.get(self.config.cache.kv_cache_dtype, self.dtype)
            choose_latent_decode_backend(self._kernels, device, self.spec.mla, self.dtype, stored)

    def _sparse(self, exact: AttentionBackend, pool: KVPool, num_heads: int) -> AttentionBackend:
        """Returns the ``exact`` backend, with --enable-double-sparsity within one that is sparse in decode steps."""
        args, group = self.config.sparsity, self.parallel.attn_tp
        order = ChannelOrder.read(args, self.spec)
        if order is None:
            return exact
        layers = [pool.layout.number_of(layer) for layer in range(pool.layout.num_layers)]
        channels = torch.from_numpy(order.of_rank(layers, group.rank, group.size)).to(pool.groups[0].device)
        sparsity = Sparsity(args.ds_heavy_channel_num, args.ds_heavy_token_num, args.ds_sparse_decode_threshold)
        return DoubleSparsityBackend(exact, pool, num_heads, channels, sparsity if self.config.duties.decodes else None,
                                     self.spec.scores.scale_of(self.spec.head_dim))

    def _hybrid(self, pools: Sequence[KVPool], state: StateSpec, num_heads: int) -> AttentionPlanner:
        """Creates the backend of a model with recurrent layers, whose pool is the last."""
        pool = pools[0]
        windows = self.spec.windows_of(range(self.spec.num_layers))
        attention = select_attention(self._kernels, pool.groups[0].device, pool, num_heads, self.dtype,
                                     [windows[layer] for layer in state.attention_layers], self.spec.scores)
        return HybridBackend(attention, state.attention_layers, StateBackend(pools[1], 1, state.layers))

    def over(self, pools: Sequence[KVPool]) -> AttentionPlanner:
        """Creates the attention backend for the pools of all cache groups."""
        spec, pool = self.spec, pools[0]
        num_heads = spec.num_heads // self.parallel.attn_tp.size
        if spec.mla is not None:
            return select_latent_attention(self._kernels, pool.groups[0].device, pool, spec.mla, num_heads,
                                           self.dtype)
        if spec.encoder:
            return WholeSequencesBackend(pool, spec.scores)
        if spec.state is not None:
            return self._hybrid(pools, spec.state, num_heads)
        windows = spec.windows_of(range(spec.num_layers))
        numbers = [[pool.layout.number_of(layer) for layer in range(pool.layout.num_layers)] for pool in pools]
        backends = [select_attention(self._kernels, pool.groups[0].device, pool, num_heads, self.dtype,
                                     [windows[number] for number in own], spec.scores)
                    for pool, own in zip(pools, numbers)]
        places = sorted((number, LayerPlace(group, layer)) for group, own in enumerate(numbers)
                        for layer, number in enumerate(own))
        if len(pools) == 1:
            return self._sparse(backends[0], pool, num_heads)
        return PerLayerBackend(backends, range(len(pools)), [place for _, place in places])
