"""Opens the storage behind a rank's host memory, from its configuration and its pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..kvcache.storage.base import Cluster
from ..kvcache.storage.fingerprint import StoredPool, storage_digest
from ..kvcache.storage.open import open_storage, page_shape

if TYPE_CHECKING:
    from ..config.server import ServerConfig
    from ..distributed.tp import TPGroup
    from ..kvcache.storage.page_servers import PageServers
    from ..kvcache.storage.storage import Storage
    from ..kvcache.tiers.base import HostSlots
    from ..runner.model_runner import ModelRunner


def open_rank_storage(config: ServerConfig, runner: ModelRunner, host: HostSlots, group: TPGroup,
                      servers: PageServers, name: str, options: Mapping[str, Any]) -> Storage:
    """Opens the storage ``name`` with its ``options`` for the pages that rank ``group.rank`` keeps in ``host``. Objects
    are shared with all servers of equal weights, page layout and numbers. ``servers``: the page servers that the rank
    hears of. Raises ConfigError."""
    pools = [StoredPool(pool.layout, runner.spec.num_kv_heads) for pool in runner.pools]
    if runner.draft_pool is not None:
        layout = runner.draft_pool.layout  # where ranks repeat heads, each is taken for one of its own
        num_heads = layout.num_kv_heads * (1 if layout.form == "latent" else group.size)
        pools.append(StoredPool(layout, num_heads, is_draft=True))
    digest = storage_digest(runner.model, pools, weight_version=config.model.weight_version,
                            compute=(runner.layout.dtype, config.model.dtype, config.model.quantization),
                            lookahead=runner.lookahead, draft=runner.draft_identity)
    args = config.disaggregation
    cluster = Cluster(servers, args.cluster_secret, args.disaggregation_transfer_backend, args.disaggregation_ib_device)
    return open_storage(name, options, host, digest, page_shape(pools, group.rank, group.size),
                        address=config.http.host, cluster=cluster)
