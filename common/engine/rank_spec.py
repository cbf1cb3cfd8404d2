"""The start parameters of one engine rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.server import ServerConfig


@dataclass(frozen=True)
class RankSpec:
    """Arguments of a rank's process. ``to_engine`` and ``from_engine`` are ZMQ endpoints that the API server has bound;
    ``dist_init`` is torch.distributed's ``init_method``. ``local_rank`` counts the ranks of this host."""

    config: ServerConfig
    rank: int
    world_size: int
    to_engine: str
    from_engine: str
    dist_init: str
    local_rank: int = 0
