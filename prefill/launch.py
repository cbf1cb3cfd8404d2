"""``launch_prefill``: a server that computes prompts and pushes their KV cache to decode servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.config.cli import parse
from ..common.config.command import command
from ..common.config.packages import check_engine
from ..common.config.server import ServerConfig
from ..common.config.server.sglang_flags import SGLANG_FLAGS
from ..common.engine.rank_spec import RankSpec

if TYPE_CHECKING:
    from ..kvtransfer.bootstrap import BootstrapServer


@command("launch_prefill")
def main(argv: Sequence[str] | None = None) -> None:
    config = parse(ServerConfig, argv, prog="launch_prefill", description="Start a prefill server.",
                   foreign=SGLANG_FLAGS,
                   defaults={"disaggregation_mode": "prefill"}, adjust=lambda config: config.require_mode("prefill"))
    sys.exit(run(config))


def run(config: ServerConfig) -> int:
    """Serves until stopped; returns the process's exit code."""
    check_engine()
    from ..common.serving.server import run_server

    # A server whose role may change starts and stops it by itself.
    switches = config.disaggregation.enable_pd_role_switch
    return run_server(config, run_rank, services=[] if switches else [lambda: bootstrap_server(config)])


def bootstrap_server(config: ServerConfig) -> BootstrapServer:
    """The server at which decode servers find the ranks of this one; use as an asynchronous context manager."""
    from ..kvtransfer.bootstrap import BootstrapServer

    args = config.disaggregation
    return BootstrapServer(config.http.host, args.disaggregation_bootstrap_port, secret=args.cluster_secret)


def run_rank(spec: RankSpec) -> None:
    """Runs a rank's process, which imports the engine and with it torch; the API server process does not."""
    from . import rank

    rank.main(spec)


if __name__ == "__main__":
    main()
