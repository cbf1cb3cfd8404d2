"""Builds a rank's batcher from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config.server import ServerConfig
from ..distributed.tp import TPGroup
from ..kvcache.manager import KVCacheManager
from .batcher import Batcher
from .preemption.copy_rates import PrefillRate, measure_link_bandwidth
from .preemption.host_kv_cache import HostKVCache
from .preemption.swap_space import SwapSpace

if TYPE_CHECKING:
    from ..runner.model_runner import ModelRunner


def make_batcher(config: ServerConfig, runner: ModelRunner, cache: KVCacheManager, group: TPGroup) -> Batcher:
    """Builds the batcher; ``group``: the ranks that take the same decisions."""
    num_bytes = int(config.schedule.retract_host_memory_gb * 2**30)
    swap = None
    if num_bytes:
        host = HostKVCache(runner.pool, num_bytes)
        swap = SwapSpace(host, cache.page_size, measure_link_bandwidth(runner.device), PrefillRate(), group.min_reduce,
                         shared=config.role.receives_kv)
    pp_size, max_micro_batch = config.parallel.pp_size, None
    if pp_size > 1:
        max_micro_batch = (config.parallel.pp_max_micro_batch_size
                           or max(1, config.schedule.max_running_requests // pp_size))
    return Batcher(cache, config.schedule, decodes=config.role.decodes, seed=config.model.random_seed, swap=swap,
                   pp_size=pp_size, max_micro_batch=max_micro_batch)
