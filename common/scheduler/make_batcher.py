"""Builds a rank's batcher from its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..api.errors import ConfigError
from ..config.server import ServerConfig
from ..config.server.cache import KV_TIERS
from ..config.server.speculative import SPECULATIVE_ALGORITHMS
from ..distributed.tp import TPGroup
from ..kvcache.manager import KVCacheManager
from ..kvcache.pool import KVPool
from ..kvcache.tiers.base import KVTier, TierContext
from ..kvcache.tiers.host import HostTier
from .batcher import Batcher
from .drafting import Drafting
from .preemption.copy_rates import PrefillRate, measure_link_bandwidth
from .preemption.swap_space import SwapSpace
from .tier_loads import TierLoads

if TYPE_CHECKING:
    from ..runner.model_runner import ModelRunner


def make_batcher(config: ServerConfig, runner: ModelRunner, cache: KVCacheManager, group: TPGroup) -> Batcher:
    """Builds the batcher; ``group``: the ranks that take the same decisions."""
    num_bytes = int(config.schedule.retract_host_memory_gb * 2**30)
    swap = loads = None
    if num_bytes:
        tiers = _host_tiers(runner.pools, runner.draft_pool, num_bytes)
        swap = SwapSpace(tiers, cache, measure_link_bandwidth(runner.device), PrefillRate(), group.min_reduce,
                         shared=config.role.receives_kv)
    if config.cache.kv_tier is not None:
        if cache.groups:
            raise ConfigError("--kv-tier does not keep the pages of sliding windows yet; leave it out, or set "
                              "--disable-hybrid-swa-memory.")
        num_bytes = int(config.cache.kv_tier_gb * 2**30)
        tier: KVTier = KV_TIERS.get(config.cache.kv_tier)(TierContext(runner.pool, num_bytes, "--kv-tier-gb",
                                                                      runner.draft_pool))
        cache.attach_tier(tier, shared=config.role.receives_kv)
        loads = TierLoads(cache, tier, group.min_reduce)
    pp_size, max_micro_batch = config.parallel.pp_size, None
    if pp_size > 1:
        max_micro_batch = (config.parallel.pp_max_micro_batch_size
                           or max(1, config.schedule.max_running_requests // pp_size))
    return Batcher(cache, config.schedule, decodes=config.role.decodes, seed=config.model.random_seed, swap=swap,
                   loads=loads, pp_size=pp_size, max_micro_batch=max_micro_batch,
                   drafting=make_drafting(config, cache, runner.spec.context_length, group))


def make_drafting(config: ServerConfig, cache: KVCacheManager, context_length: int, group: TPGroup) -> Drafting | None:
    """Builds the drafting of a rank of ``group``; None without an algorithm."""
    args = config.speculative
    if args.speculative_algorithm is None:
        return None
    make = SPECULATIVE_ALGORITHMS.get(args.speculative_algorithm).make_proposer
    return Drafting(None if make is None else make(args), cache, args.num_drafts,
                    config.schedule.largest_prefill(context_length), context_length, group.size == 1)


def _host_tiers(pools: Sequence[KVPool], draft_pool: KVPool | None, num_bytes: int) -> list[HostTier]:
    """One for each pool, with a share of the memory like the pool's of all. The draft's pages are with the first
    pool's."""
    contexts = [TierContext(pool, num_bytes, "--retract-host-memory-gb", None if index else draft_pool)
                for index, pool in enumerate(pools)]
    sizes = [sum(group.nbytes for group in context.groups) for context in contexts]
    return [HostTier(dataclasses.replace(context, num_bytes=num_bytes * size // sum(sizes)))
            for context, size in zip(contexts, sizes)]
