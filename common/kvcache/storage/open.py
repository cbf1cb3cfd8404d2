"""Opens the KV storage of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...api.errors import ConfigError
from ...config.server.tiers import KV_STORAGES
from ..tiers.base import HostSlots
from .base import STALL_SECONDS, Cluster, StorageContext
from .fingerprint import StoredPool
from .objects import ObjectFormat
from .page_servers import PageServers
from .page_shape import PageShape, PoolShape
from .storage import NUM_WRITERS, Storage


def page_shape(pools: Sequence[StoredPool], tp_rank: int, tp_size: int) -> PageShape:
    """The shape of this rank's pages; ``pools`` in the order of a slot's memory, with this rank's layouts."""
    numbers = [pool.layout.number_of(layer) for pool in pools if not pool.is_draft
               for layer in range(pool.layout.num_layers)]
    return PageShape(tuple(PoolShape.of(pool.layout, pool.num_kv_heads) for pool in pools),
                     range(min(numbers), max(numbers) + 1), tp_rank, tp_size)


def open_storage(name: str, options: Mapping[str, Any], host: HostSlots, digest: str, shape: PageShape, *,
                 address: str = "127.0.0.1", cluster: Cluster | None = None) -> Storage:
    """Opens the storage ``name`` of ``KV_STORAGES`` for the pages of ``host``. ``options``:
    ``TierArgs.storage_config``, of which ``stall_seconds`` is for all backends: how long a call may take before nobody
    waits for it. ``address`` is that at which other hosts reach this one. Raises
    ConfigError. A backend with the trait "reads_only" is given nothing to write."""
    stall_seconds = options.get("stall_seconds", STALL_SECONDS)
    if isinstance(stall_seconds, bool) or not isinstance(stall_seconds, (int, float)) or stall_seconds <= 0:
        raise ConfigError(f"The storage's option stall_seconds must be above 0, not {stall_seconds!r}.")
    objects = ObjectFormat(digest, shape)
    context = StorageContext(options, address, host, objects, cluster or Cluster(PageServers()))
    num_writers = 0 if KV_STORAGES.has(name, "reads_only") else NUM_WRITERS
    return Storage(name, KV_STORAGES.get(name)(context), objects, host, stall_seconds=stall_seconds,
                   num_writers=num_writers)
