"""A rank's batcher, as its configuration wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config.server import ServerConfig
from ..distributed.tp import TPGroup
from ..kvcache.manager import KVCacheManager
from .batcher import Batcher
from .preemption.copy_rates import PrefillRate, link_rate
from .preemption.host_kv_cache import HostKVCache
from .preemption.swap_space import SwapSpace

if TYPE_CHECKING:
    from ..runner.model_runner import ModelRunner


def make_batcher(config: ServerConfig, runner: ModelRunner, cache: KVCacheManager, group: TPGroup) -> Batcher:
    """``group``: the ranks that decide alike."""
    num_bytes = int(config.schedule.retract_host_memory_gb * 2**30)
    swap = None
    if num_bytes:
        host = HostKVCache(runner.pool, num_bytes)
        swap = SwapSpace(host, cache.page_size, link_rate(runner.device), PrefillRate(), group.min_reduce,
                         shared=config.mode == "decode")
    stages, most = config.parallel.pp_size, None
    if stages > 1:
        most = config.parallel.pp_max_micro_batch_size or max(1, config.schedule.max_running_requests // stages)
    return Batcher(cache, config.schedule, decodes=config.mode != "prefill", seed=config.model.random_seed, swap=swap,
                   stages=stages, most=most)
