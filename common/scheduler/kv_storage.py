"""A rank's host memory and the storage behind it, from its configuration and its pools: which ranks share the first,
and what opens the second."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kvcache.storage.base import Cluster
from ..kvcache.storage.fingerprint import StoredPool, storage_digest
from ..kvcache.storage.first_rank import FirstRankStorage
from ..kvcache.storage.open import open_storage, page_shape
from ..kvcache.tiers.shared_pages import HostShare
from ..shared_memory.host import HostHandle, handle_of, map_handle, shared_bytes

if TYPE_CHECKING:
    from ..config.server import ServerConfig
    from ..distributed.tp import TPGroup
    from ..kvcache.storage.page_servers import PageServers
    from ..kvcache.storage.page_shape import PageShape
    from ..kvcache.storage.storage import Storage
    from ..kvcache.tiers.base import HostSlots
    from ..runner.model_runner import ModelRunner


log = logging.getLogger("baton.engine")


def stored_pools(runner: ModelRunner, group: TPGroup) -> list[StoredPool]:
    """The pools of a rank of ``group``, in the order of a slot's memory."""
    pools = [StoredPool(pool.layout, runner.spec.num_kv_heads) for pool in runner.pools]
    if runner.draft_pool is not None:
        layout = runner.draft_pool.layout  # where ranks repeat heads, each is taken for one of its own
        num_heads = layout.num_kv_heads * (1 if layout.form == "latent" else group.size)
        pools.append(StoredPool(layout, num_heads, is_draft=True))
    return pools


def num_sharing(config: ServerConfig, runner: ModelRunner, group: TPGroup) -> int:
    """The number of ranks that have the same pages as this one, itself included, and share host memory; 1 where hosts
    are several, since memory is of one, and for models with states, whose host memory is divided."""
    if config.nodes.nnodes > 1 or config.tiers.kv_tier != "host" or runner.spec.state is not None:
        return 1
    shape: PageShape = page_shape(stored_pools(runner, group), group.rank, group.size)
    return group.size // shape.own.split


def share_host_memory(num_bytes: int, size: int, group: TPGroup) -> HostShare | None:
    """Maps memory of ``num_bytes`` that each ``size`` ranks of ``group``, which follow each other, have in common; a
    collective. None on all ranks where one of them cannot map it."""
    index, memory, total = group.rank % size, None, HostShare.HEADER_BYTES + num_bytes
    mine = HostHandle(0, 0, 0, 0)
    problem = ""
    try:
        if index == 0:
            memory = shared_bytes(total)
            mine = handle_of(memory.ctypes.data, total) or mine
    except OSError as error:
        problem = str(error)
    handles = group.gather_ints(np.array([mine.pid, mine.fd, mine.inode, mine.offset]))
    try:
        if index > 0:
            memory = map_handle(HostHandle(*handles[group.rank - index].tolist()), total)
    except OSError as error:
        problem = str(error)
    if not group.all_true(memory is not None):
        log.warning("The ranks keep a copy of the same pages each, because host memory cannot be shared%s.",
                    f": {problem}" if problem else "")
        return None
    assert memory is not None
    return HostShare.of(index, size, memory)


def open_rank_storage(config: ServerConfig, runner: ModelRunner, host: HostSlots, group: TPGroup,
                      servers: PageServers, share: HostShare | None, name: str,
                      options: Mapping[str, Any]) -> Storage | FirstRankStorage:
    """Opens the storage ``name`` with its ``options`` for the pages that rank ``group.rank`` keeps in ``host``. Objects
    are shared with all servers of equal weights, page layout and numbers. ``servers``: the page servers that the rank
    hears of. ``share``: the ranks that ``host`` is shared with. Raises ConfigError."""
    if share is not None and share.index > 0:
        return FirstRankStorage(name)
    pools = stored_pools(runner, group)
    digest = storage_digest(runner.model, pools, weight_version=config.model.weight_version,
                            compute=(runner.layout.dtype, config.model.dtype, config.model.quantization),
                            lookahead=runner.lookahead, draft=runner.draft_identity)
    args = config.disaggregation
    cluster = Cluster(servers, args.cluster_secret, args.disaggregation_transfer_backend, args.disaggregation_ib_device)
    return open_storage(name, options, host, digest, page_shape(pools, group.rank, group.size),
                        address=config.http.host, cluster=cluster)
