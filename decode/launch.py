"""``launch_decode``: a server that receives KV caches from prefill servers and generates."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..common.config.cli import parse
from ..common.config.command import command
from ..common.config.packages import check_engine
from ..common.config.server import ServerConfig
from ..common.config.server.sglang_flags import SGLANG_FLAGS
from ..common.engine.rank_spec import RankSpec


@command("launch_decode")
def main(argv: Sequence[str] | None = None) -> None:
    config = parse(ServerConfig, argv, prog="launch_decode", description="Start a decode server.",
                   foreign=SGLANG_FLAGS,
                   defaults={"disaggregation_mode": "decode"}, adjust=lambda config: config.require_mode("decode"))
    sys.exit(run(config))


def run(config: ServerConfig) -> int:
    """Serves until stopped; returns the process's exit code."""
    check_engine()
    from ..common.serving.server import run_server

    return run_server(config, run_rank)


def run_rank(spec: RankSpec) -> None:
    """Runs a rank's process, which imports the engine and with it torch; the API server process does not."""
    from . import rank

    rank.main(spec)


if __name__ == "__main__":
    main()
