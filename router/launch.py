"""The command line ``launch_router``."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from ..common.config.cli import parse
from ..common.config.command import command
from ..common.obs.logging import setup_logging
from .admin.rights import is_loopback
from .app import Router, serve
from .config import RouterConfig
from .process_setup import prepare
from .sglang_flags import SGLANG_FLAGS, translate

if TYPE_CHECKING:
    from .multiprocess.supervisor import Supervisor


@command("launch_router")
def main(argv: Sequence[str] | None = None) -> None:
    """Runs a router until SIGTERM or SIGINT; exits with status 2 and one sentence when it cannot start."""
    config = parse(RouterConfig, translate(sys.argv[1:] if argv is None else argv), prog="launch_router",
                   foreign=SGLANG_FLAGS,
                   description="Route OpenAI-compatible requests to whole workers or to pairs of prefill and decode.")
    setup_logging(config.logs, "router")
    prepare()
    uvloop.run(_run(config))


async def _run(config: RouterConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, stop)
    if config.http.router_workers > 1:
        from .multiprocess import supervisor

        await supervisor.serve(config, ready=partial(_announce, config), stop=stop)
    else:
        await serve(config, ready=partial(_announce, config), stop=stop)


def _stop(stop: asyncio.Event) -> None:
    if stop.is_set():  # A second signal: running requests are not waited for.
        raise SystemExit(1)
    stop.set()


def _announce(config: RouterConfig, router: Router | Supervisor) -> None:
    processes = f", in {config.http.router_workers} processes" if config.http.router_workers > 1 else ""
    logging.getLogger("baton.router").info(
        "Listening on %s://%s:%d with %d workers%s.", "https" if config.security.ssl_certfile else "http",
        config.http.host, router.port, len(router.registry), processes)
    security = config.security
    if security.client_keys and not security.admin_keys:
        logging.getLogger("baton.router").warning(
            "There are keys of clients and none of an administrator: no one may add, drain or remove workers over "
            "HTTP, or change them (--admin-api-key KEY; it may be the clients').")
    elif not security.admin_keys and not is_loopback(config.http.host):
        logging.getLogger("baton.router").warning(
            "Whoever reaches %s:%d may add workers, which are then sent others' prompts: give --admin-api-key KEY.",
            config.http.host, router.port)


if __name__ == "__main__":
    main()
