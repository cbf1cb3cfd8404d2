"""A unified server: both phases in one engine."""

from __future__ import annotations

from ..config.packages import check_engine
from ..config.server import ServerConfig
from ..engine.rank_spec import RankSpec


def run(config: ServerConfig) -> int:
    """Serve until stopped; returns the process's exit code."""
    check_engine()
    from .server import run_server

    return run_server(config, run_rank)


def run_rank(spec: RankSpec) -> None:
    """Entry of a rank's process, which imports the engine, and with it torch; the API server process does not."""
    from ..engine import rank

    rank.main(spec)
