"""The command line ``launch_router``."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import uvloop

from ..common.api.errors import ConfigError
from ..common.config.cli import parse
from . import logs
from .app import Router, serve
from .compat import translate
from .config import RouterConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Run a router until SIGTERM or SIGINT; exits with status 2 and one sentence when it cannot start."""
    try:
        config = parse(
            RouterConfig, translate(sys.argv[1:] if argv is None else argv), prog="launch_router",
            description="Route OpenAI-compatible requests to whole workers or to pairs of prefill and decode.")
        logs.configure(config.logs.log_level, config.logs.log_dir)
    except ConfigError as error:
        _refuse(error)
    _raise_descriptor_limit()
    # Requests leave no reference cycles behind; at Python's default of 700 objects the collector still runs
    # over the live ones every 40 requests, which costs up to 2 us each.
    gc.set_threshold(50_000, 20, 50)
    try:
        uvloop.run(_run(config))
    except ConfigError as error:
        _refuse(error)


def _refuse(error: ConfigError) -> NoReturn:
    print(f"launch_router: error: {error}", file=sys.stderr)
    raise SystemExit(2) from None


async def _run(config: RouterConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, stop)
    await serve(config, ready=_announce, stop=stop)


def _stop(stop: asyncio.Event) -> None:
    if stop.is_set():  # Asked twice: the running requests are not waited for.
        raise SystemExit(1)
    stop.set()


def _raise_descriptor_limit() -> None:
    """A request holds two or three descriptors; the usual soft limit of 1,024 ends at some 400 streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _announce(router: Router) -> None:
    logging.getLogger("baton.router").info(
        "Listening on %s://%s:%d with %d workers.", "https" if router.config.security.ssl_certfile else "http",
        router.config.http.host, router.port, len(router.registry))


if __name__ == "__main__":
    main()
