"""Builds a rank's batcher from its configuration."""

from __future__ import annotations

import dataclasses
import logging
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
from .chain_planner import ChainPlanner
from .drafting import Drafting
from .preemption.copy_rates import PrefillRate, measure_link_bandwidth
from .preemption.swap_space import SwapSpace
from .tier_loads import TierLoads

if TYPE_CHECKING:
    from ..config.model import ModelSpec
    from ..runner.model_runner import ModelRunner


logger = logging.getLogger(__name__)


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
    drafting = make_drafting(config, cache, runner.spec, group)
    chains = None
    if drafting is not None:
        drafting.keeps_drafts = _keeps_drafts(config, runner)
        if runner.chain_levels is not None:
            chains = ChainPlanner(runner.chain_levels, cache, drafting, runner.spec.context_length)
    return Batcher(cache, config.schedule, decodes=config.role.decodes, seed=config.model.random_seed, swap=swap,
                   loads=loads, pp_size=pp_size, max_micro_batch=max_micro_batch,
                   drafting=drafting, chains=chains)


def make_drafting(config: ServerConfig, cache: KVCacheManager, spec: ModelSpec, group: TPGroup) -> Drafting | None:
    """Builds the drafting of a rank of ``group``; None without an algorithm. Raises ConfigError where a path of a tree
    is longer than a sliding window of the model."""
    args, context_length = config.speculative, spec.context_length
    if args.speculative_algorithm is None:
        return None
    windows = [window for window in spec.windows if window is not None]
    if args.drafts_trees and windows and min(windows) <= args.max_depth:
        raise ConfigError(f"The model has a sliding window of {min(windows)} tokens: lower --speculative-num-steps or "
                          f"--speculative-num-draft-tokens, so that paths of trees have fewer than {min(windows)} "
                          "drafts.")
    if (rows := args.speculative_num_draft_tokens) not in (None, args.num_drafts + 1):
        logger.info("--speculative-num-draft-tokens %s: a chain of %s passes has %s rows.", rows, args.num_steps,
                    args.num_drafts + 1)
    make = SPECULATIVE_ALGORITHMS.get(args.speculative_algorithm).make_proposer
    return Drafting(None if make is None else make(args), cache, args.num_drafts,
                    config.schedule.largest_prefill(context_length), context_length, group.size == 1, args.num_steps,
                    args.room_for_drafts)


def _keeps_drafts(config: ServerConfig, runner: ModelRunner) -> bool:
    """See Drafting: where plain steps are CUDA graphs, only those of a chain step have the hidden states."""
    if not config.speculative.is_shifted:
        return False
    return not runner.captures_decode if runner.chain_levels is None else runner.chain_levels.has_plain


def _host_tiers(pools: Sequence[KVPool], draft_pool: KVPool | None, num_bytes: int) -> list[HostTier]:
    """One for each pool, with a share of the memory like the pool's of all. The draft's pages are with the first
    pool's."""
    contexts = [TierContext(pool, num_bytes, "--retract-host-memory-gb", None if index else draft_pool)
                for index, pool in enumerate(pools)]
    sizes = [sum(group.nbytes for group in context.groups) for context in contexts]
    return [HostTier(dataclasses.replace(context, num_bytes=num_bytes * size // sum(sizes)))
            for context, size in zip(contexts, sizes)]
