"""KV sizing: the layout of one rank's KV pool and its number of pages, by the model, the flags and the free memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import torch

from ..api.errors import ConfigError
from ..config.load_format import LOAD_FORMATS
from ..config.model import ModelSpec
from ..config.server import CacheArgs, ModelArgs, ServerConfig
from ..config.state import StateSpec
from ..config.window import forgetting
from ..distributed.parallel import Parallel
from ..kvcache.cache_group import SlidingWindow
from ..kvcache.channel_order import ChannelOrder
from ..kvcache.layout import DTYPE_BYTES, KVLayout, split_layers
from ..kvcache.state_group import LEAST_STATES, READ_TOKENS
from ..scheduler.prefill_budget import LOGPROB_CHUNK_TOKENS
from ..weights.kv_scales import KV_DTYPES, Scales, read_kv_scales
from .cuda_graphs.chain_sizes import most_chain_rows
from .cuda_graphs.piecewise_graphs import prefill_graph_sizes

# On a CPU a few whole contexts, which concurrent requests rarely fill there; those of the shipped model are 235 MB.
_CPU_POOL_CONTEXTS = 4
_CPU_POOL_TOKENS = range(16_384, 65_537)
_CPU_POOL_BYTES = 2 << 30
_DEFAULT_STATES = 32
"""States of a hybrid model, at least, unless a flag says it: those of ten running requests."""


def resolve_dtype(config: ServerConfig, spec: ModelSpec, device: torch.device) -> str:
    """Returns the model's dtype, also its KV cache's unless --kv-cache-dtype names another: the flag's, else the
    checkpoint's on a GPU and float32 on a CPU."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return spec.dtype if device.type == "cuda" else "float32"


def kv_scales(cache: CacheArgs, model: ModelArgs, spec: ModelSpec) -> Scales:
    """Returns the KV scales of all layers; none where the cache is not in float8."""
    if cache.kv_cache_dtype == "auto":
        return ()
    return read_kv_scales(cache, LOAD_FORMATS.get(model.load_format)(model), spec.num_layers)


def scales_of(scales: Scales, layers: range) -> Scales:
    """Returns the KV scales of some layers, where there are any."""
    return scales[layers.start:layers.stop]


def kv_layout(cache: CacheArgs, spec: ModelSpec, tp_size: int, dtype: str, scales: Scales = (),
              layers: range | None = None) -> KVLayout:
    """Returns the layout of one rank's pool; ``dtype`` is the model's, ``scales`` those of all layers. ``layers``:
    those of the rank's pipeline stage, where it has not all."""
    layers = range(spec.num_kv_layers) if layers is None else layers
    is_pp_stage = len(layers) < spec.num_kv_layers
    layout = KVLayout(groups=(len(layers),), num_kv_heads=spec.local_kv_heads(tp_size), head_dim=spec.kv_dim,
                      page_size=cache.page_size, dtype=KV_DTYPES.get(cache.kv_cache_dtype, dtype),
                      scales=scales_of(scales, layers), first_layer=layers.start,
                      of_layers=spec.num_layers if is_pp_stage else 0,
                      form="heads" if spec.mla is None else "latent",
                      windows=spec.windows[layers.start:layers.stop])
    groups = split_layers(len(layers), layout.layer_page_bytes, cache.num_layer_groups)
    return msgspec.structs.replace(layout, groups=groups)


def cache_layouts(config: ServerConfig, spec: ModelSpec, parallel: Parallel, dtype: str,
                  scales: Scales = ()) -> tuple[KVLayout, ...]:
    """Returns the layouts of one rank's pools, one for each cache group: first that of the layers that read all tokens,
    then one for each sliding window; a single one of all layers where a pipeline stage lacks layers of some group."""
    cache, tp_size = config.cache, parallel.attn_tp.size
    own = parallel.pp.layers(spec.num_kv_layers)
    whole = kv_layout(cache, spec, tp_size, dtype, scales, own)
    order = ChannelOrder.read(config.sparsity, spec)
    if order is not None:
        whole = msgspec.structs.replace(whole, channel_order=order.digest)
    if spec.state is not None:
        return _hybrid_layouts(whole, cache, spec.state, tp_size)
    windows = forgetting(spec.windows_of(range(spec.num_layers)))
    kinds = sorted(set(windows), key=lambda window: window or 0)
    stages = [] if len(kinds) == 1 else parallel.pp.layers_of_stages(spec.num_layers)
    disabled = cache.disable_hybrid_swa_memory or config.model.is_embedding
    if disabled or not stages or any(set(windows[stage.start:stage.stop]) != {None, *kinds} for stage in stages):
        return (whole,)
    return tuple(_layout_of_group(whole, cache, own, [layer for layer in range(spec.num_layers)
                                                      if windows[layer] == window], window) for window in kinds)


def _hybrid_layouts(whole: KVLayout, cache: CacheArgs, state: StateSpec, tp_size: int) -> tuple[KVLayout, ...]:
    """Returns the layouts of the layers with keys and values, and of those with states. ``whole``: of all layers."""
    layers = state.attention_layers
    attention = msgspec.structs.replace(
        whole, groups=split_layers(len(layers), whole.layer_page_bytes, cache.num_layer_groups), layers=layers,
        windows=tuple(map(whole.window_of, layers)) if whole.windows else (),
        scales=tuple(map(whole.scales_of, layers)) if whole.scales else ())
    states = KVLayout(groups=(len(state.layers),), num_kv_heads=state.num_heads // tp_size,
                      head_dim=-(-state.head_values // whole.page_size), page_size=whole.page_size,
                      dtype=cache.mamba_ssm_dtype, form="state", layers=state.layers, retained_tokens=READ_TOKENS)
    groups = split_layers(len(state.layers), states.layer_page_bytes, cache.num_layer_groups)
    return attention, msgspec.structs.replace(states, groups=groups)


def _layout_of_group(whole: KVLayout, cache: CacheArgs, own: range, numbers: list[int],
                     window: int | None) -> KVLayout:
    """Returns the layout of those of the rank's layers ``own``, whose layout is ``whole``, that are in the cache group
    with the model's layers ``numbers``."""
    here = [number for number in numbers if number in own]
    return msgspec.structs.replace(
        whole, groups=split_layers(len(here), whole.layer_page_bytes, cache.num_layer_groups), layers=tuple(here),
        first_layer=numbers.index(here[0]), of_layers=len(numbers) if len(here) < len(numbers) else 0,
        scales=tuple(whole.scales_of(number - own.start) for number in here) if whole.scales else (),
        windows=tuple(whole.window_of(number - own.start) for number in here), retained_tokens=window)


def page_counts(cache: CacheArgs, layouts: Sequence[KVLayout], num_pages: int) -> tuple[int, ...]:
    """Returns the number of pages of each cache group, where the first has ``num_pages``."""
    return num_pages, *(_group_pages(cache, layouts[0], layout, num_pages) for layout in layouts[1:])


def _group_pages(cache: CacheArgs, first: KVLayout, layout: KVLayout, num_pages: int) -> int:
    """Returns the number of pages of a further cache group, where the ``first`` has ``num_pages``."""
    if layout.form != "state":
        share = math.ceil(num_pages * cache.swa_full_tokens_ratio)
        return max(share, SlidingWindow(layout.retained_tokens or 1).max_pages(layout.page_size))
    if cache.max_mamba_cache_size is not None:
        return max(cache.max_mamba_cache_size, LEAST_STATES)
    share = int(num_pages * first.page_bytes * cache.mamba_full_memory_ratio) // layout.page_bytes
    return max(share, _DEFAULT_STATES)


def count_pages(config: ServerConfig, spec: ModelSpec, layouts: Sequence[KVLayout], parallel: Parallel,
                device: torch.device, draft: KVLayout | None = None) -> int:
    """Returns the number of pages of the first cache group that fit, with the other groups', besides the loaded weights
    and what a step needs; below 1 where none do. ``draft``: of the pool that has a page for each of these."""
    max_tokens, layout = config.cache.max_total_tokens, layouts[0]
    if max_tokens is not None:
        if max_tokens < layout.page_size:
            raise ConfigError(f"--max-total-tokens {max_tokens} holds no page of {layout.page_size} tokens.")
        return max_tokens // layout.page_size
    if device.type != "cuda":
        tokens = min(max(_CPU_POOL_CONTEXTS * spec.context_length, _CPU_POOL_TOKENS.start), _CPU_POOL_TOKENS[-1])
        return min(tokens // layout.page_size, _pages_within(config.cache, layouts, _CPU_POOL_BYTES, draft))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # The budget is this process's own, so that servers which share a GPU need not start one after the other.
    budget = total * config.cache.mem_fraction_static / ranks_per_gpu(config, torch.cuda.device_count())
    available = budget - torch.cuda.memory_allocated(device)
    if parallel.token_exchange.all_to_all is not None:
        available -= parallel.token_exchange.all_to_all.nbytes  # which torch does not count
    return _pages_within(config.cache, layouts, int(min(
        available, free - _activation_bytes(config, spec, layout, parallel, device))), draft)


def _pages_within(cache: CacheArgs, layouts: Sequence[KVLayout], num_bytes: int, draft: KVLayout | None = None) -> int:
    """Returns the most pages of the first cache group with which all groups, and the draft's pages of the same ids,
    take ``num_bytes`` at most."""
    page_bytes = layouts[0].page_bytes + (0 if draft is None else draft.page_bytes)
    if len(layouts) == 1:
        return num_bytes // page_bytes

    def pool_bytes(num_pages: int) -> int:
        first, *counts = page_counts(cache, layouts, num_pages)
        return first * page_bytes + sum(count * layout.page_bytes for count, layout in zip(counts, layouts[1:]))

    return bisect_right(range(max(0, num_bytes) // page_bytes + 1), num_bytes, key=pool_bytes) - 1


def ranks_per_gpu(config: ServerConfig, gpus: int) -> int:
    """Returns the number of the server's ranks on one of a host's GPUs, at most."""
    local_ranks = config.parallel.world_size // config.nodes.nnodes
    return -(-local_ranks // len(range(config.model.base_gpu_id, gpus, config.model.gpu_id_step)))


def _activation_bytes(config: ServerConfig, spec: ModelSpec, layout: KVLayout, parallel: Parallel,
                      device: torch.device) -> int:
    """Returns the bytes that one step needs besides weights and pool, at most: its widest layer, its logits, and
    workspaces."""
    schedule = config.schedule
    local = _attention_values(spec) // parallel.attn_tp.size
    local += parallel.dp_size * _mlp_values(spec, parallel.tp.size)  # of all attention groups' tokens
    if parallel.experts.whole_dense:
        local = max(local, _attention_values(spec) // parallel.attn_tp.size + _mlp_values(spec, 1))
    values = (4 + 2 * parallel.dp_size) * spec.hidden_size + local + 2 * layout.num_kv_heads * spec.head_dim
    itemsize = DTYPE_BYTES[resolve_dtype(config, spec, device)]
    rows = max(schedule.largest_prefill(spec.context_length), schedule.max_running_requests)
    # Graphs have memory of their own.
    chain_rows = most_chain_rows(config)
    rows += max(prefill_graph_sizes(config, spec, parallel), default=0) + chain_rows
    # Logits, scaled, sorted, noise.
    logits = (schedule.max_running_requests + _most_drafts(config)) * spec.vocab_size * 4 * 4
    logits += chain_rows * spec.vocab_size * itemsize
    workspaces = 1 << 30 << config.data_parallel.enable_two_batch_overlap  # of the micro-batches' attentions
    return rows * values * itemsize + logits + workspaces


def _most_drafts(config: ServerConfig) -> int:
    """Returns the most drafts, each with logits, in a step."""
    if config.speculative.speculative_algorithm is None or not config.role.decodes:
        return 0
    return min(config.schedule.max_running_requests * config.speculative.num_drafts, LOGPROB_CHUNK_TOKENS)


def _attention_values(spec: ModelSpec) -> int:
    """Returns the values of one row's queries and attention outputs, of all heads; for long contexts MLA accumulates
    outputs in float32."""
    if spec.mla is None:
        return 2 * spec.num_heads * spec.head_dim
    return spec.num_heads * (spec.mla.qk_dim + 3 * spec.mla.v_dim)


def _mlp_values(spec: ModelSpec, ranks: int) -> int:
    """Returns the values of one row within a layer's MLP, at most. Whole experts may all be on one rank."""
    dense = 3 * spec.intermediate_size // ranks
    if spec.moe is None:
        return dense
    return max(dense, spec.moe.top_k * (3 * spec.moe.intermediate_size + spec.hidden_size))
