"""Builds a rank's batcher from its configuration."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..api.errors import ConfigError
from ..config.server import ServerConfig
from ..config.server.speculative import SPECULATIVE_ALGORITHMS
from ..config.server.tiers import KV_TIERS, WRITE_POLICIES
from ..config.window import AttentionChunk
from ..distributed.agreement import RankAgreement
from ..distributed.tp import TPGroup
from ..kvcache.eviction.base import make_order
from ..kvcache.manager import KVCacheManager
from ..kvcache.pool import KVPool
from ..kvcache.storage.page_servers import PageServers
from ..kvcache.tiers.base import KVTier, TierContext
from ..kvcache.tiers.host import HostTier
from ..kvcache.tiers.shared_pages import HostShare
from ..kvcache.tiers.slot_memory import SlotMemory
from ..kvcache.tiers.with_states import HybridHostTier
from .batcher import Batcher
from .chain_planner import ChainPlanner
from .drafting import Drafting
from .kv_storage import num_sharing, open_rank_storage, share_host_memory
from .preemption.copy_rates import AgreedRates, measure_link_bandwidth
from .preemption.swap_space import SwapSpace
from .tier_loads import TierLoads
from .tier_prefetch import Prefetches

if TYPE_CHECKING:
    from ..config.model import ModelSpec
    from ..runner.model_runner import ModelRunner


logger = logging.getLogger(__name__)


def make_batcher(config: ServerConfig, runner: ModelRunner, cache: KVCacheManager, group: TPGroup,
                 agreement: RankAgreement | None = None) -> Batcher:
    """Builds the batcher; ``group``: the ranks that take the same decisions, with their ``agreement`` where that is not
    by collectives."""
    alone = group.size == 1 and config.parallel.pp_size == 1
    num_bytes = int(config.schedule.retract_host_memory_gb * 2**30)
    swap = loads = rates = None
    if num_bytes or config.tiers.enable_hierarchical_cache:
        rates = AgreedRates(measure_link_bandwidth(runner.device), agreement or group,
                            # A page's bytes, and so what is cheaper, differ between stages of unequal layers.
                            always_load=config.tiers.hicache_load_policy == "always" or config.parallel.pp_size > 1)
    if rates is not None and num_bytes:
        tiers = _host_tiers(runner.pools, runner.draft_pool, num_bytes)
        swap = SwapSpace(tiers, cache, rates, shared=config.duties.receives_kv)
    if rates is not None and config.tiers.enable_hierarchical_cache:
        if cache.groups and runner.spec.state is None:
            _check_windows(config)
        tier, share = make_tier(config, runner, group)
        policy = WRITE_POLICIES.get(config.tiers.hicache_write_policy)()
        cache.attach_tier(tier, policy, shared=config.duties.receives_kv, alone=alone)
        if isinstance(tier, HostTier):
            runner.page_loads = tier
        prefetches = make_prefetches(config, runner, cache, tier, share, group, agreement or group, rates)
        loads = TierLoads(cache, tier, agreement or group, rates, prefetches, alone=alone,
                          shared=config.duties.receives_kv)
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
    return Batcher(cache, config.schedule, decodes=config.duties.decodes, seed=config.model.random_seed, swap=swap,
                   loads=loads, pp_size=pp_size, max_micro_batch=max_micro_batch,
                   drafting=drafting, chains=chains, rates=rates)


def make_drafting(config: ServerConfig, cache: KVCacheManager, spec: ModelSpec, group: TPGroup) -> Drafting | None:
    """Builds the drafting of a rank of ``group``; None without an algorithm. Raises ConfigError where a path of a tree
    is longer than a sliding window of the model."""
    args, context_length = config.speculative, spec.context_length
    if args.speculative_algorithm is None:
        return None
    windows = [window for window in spec.windows if window is not None]
    if args.drafts_trees and any(isinstance(window, AttentionChunk) for window in windows):
        raise ConfigError("Layers of the model attend within chunks, in which trees of drafts are not verified: leave "
                          "--speculative-eagle-topk and --speculative-ngram-max-bfs-breadth at 1.")
    if args.drafts_trees and windows and min(windows) <= args.max_depth:
        raise ConfigError(f"The model has a sliding window of {min(windows)} tokens: lower --speculative-num-steps or "
                          f"--speculative-num-draft-tokens, so that paths of trees have fewer than {min(windows)} "
                          "drafts.")
    if (rows := args.speculative_num_draft_tokens) not in (None, args.num_drafts + 1):
        logger.info("--speculative-num-draft-tokens %s: a chain of %s passes has %s rows.", rows, args.num_steps,
                    args.num_drafts + 1)
    make = SPECULATIVE_ALGORITHMS.get(args.speculative_algorithm).make_proposer
    return Drafting(None if make is None else make(config), cache, args.num_drafts,
                    config.schedule.largest_prefill(context_length), context_length, group.size == 1, args.num_steps,
                    args.room_for_drafts)


def _keeps_drafts(config: ServerConfig, runner: ModelRunner) -> bool:
    """See Drafting: where plain steps are CUDA graphs, only those of a chain step have the hidden states."""
    if not config.speculative.is_shifted:
        return False
    return not runner.captures_decode if runner.chain_levels is None else runner.chain_levels.has_plain


def make_tier(config: ServerConfig, runner: ModelRunner, group: TPGroup) -> tuple[KVTier, HostShare | None]:
    """Builds the tier behind the pools of a rank of ``group``, and says which ranks it is shared with. Raises
    ConfigError where the host lacks its memory."""
    args = config.tiers
    order = make_order(config.cache.radix_eviction_policy, config.cache.radix_eviction_policy_config)
    context = TierContext(runner.pool, 0, args.host_flag, runner.draft_pool, io_backend=args.hicache_io_backend,
                          in_background=runner.device.type == "cuda", order=order, further=runner.pools[1:])
    num_bytes = args.host_bytes(sum(each.nbytes for each in context.groups))
    share = None
    if (count := num_sharing(config, runner, group)) > 1:
        sizes = [each[0].nbytes for each in context.groups]
        slots = count * num_bytes // sum(sizes)
        if slots and (share := share_host_memory(SlotMemory.num_bytes(sizes, slots), count, group)) is not None:
            num_bytes = slots * sum(sizes)
            logger.info("%d ranks share %d pages in host memory", count, slots)
    make = KV_TIERS.get(args.kv_tier) if runner.spec.state is None else HybridHostTier
    tier: KVTier = make(dataclasses.replace(context, num_bytes=num_bytes, share=share))
    return tier, share


def _check_windows(config: ServerConfig) -> None:
    """Raises ConfigError for what the tier cannot do with pages of sliding windows."""
    args, unless = config.tiers, "or set --disable-hybrid-swa-memory."
    if args.kv_tier != "host":
        raise ConfigError(f"--kv-tier {args.kv_tier} does not keep the pages of sliding windows: leave it at host, "
                          f"{unless}")


def make_prefetches(config: ServerConfig, runner: ModelRunner, cache: KVCacheManager, tier: KVTier,
                    share: HostShare | None, group: TPGroup, agreement: RankAgreement,
                    rates: AgreedRates) -> Prefetches | None:
    """Builds the prefetches into host memory, from the storage of the flags or from one that is attached later; None
    where the tier is another. Raises ConfigError where the storage cannot be opened."""
    if not isinstance(tier, HostTier):
        return None
    args, storage, servers = config.tiers, None, PageServers()
    open_storage = partial(open_rank_storage, config, runner, tier, group, servers, share)
    if args.hicache_storage_backend is not None:
        storage = open_storage(args.hicache_storage_backend, args.storage_config)
    return Prefetches(cache, tier, storage, agreement, rates, args.hicache_storage_prefetch_policy,
                      args.prefetch_limits, open_storage, servers)


def _host_tiers(pools: Sequence[KVPool], draft_pool: KVPool | None, num_bytes: int) -> list[HostTier]:
    """One for each pool, with a share of the memory like the pool's of all. The draft's pages are with the first
    pool's."""
    contexts = [TierContext(pool, num_bytes, "--retract-host-memory-gb", None if index else draft_pool)
                for index, pool in enumerate(pools)]
    sizes = [sum(group.nbytes for group in context.groups) for context in contexts]
    return [HostTier(dataclasses.replace(context, num_bytes=num_bytes * size // sum(sizes)))
            for context, size in zip(contexts, sizes)]
