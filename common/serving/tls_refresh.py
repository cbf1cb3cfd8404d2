"""Renewed certificates of a running server."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

from ..api.errors import ConfigError
from ..config.server import TlsArgs
from ..config.tls import load_chain

log = logging.getLogger("baton.server")


async def refresh_certificate(context: ssl.SSLContext, args: TlsArgs, period: float = 5.0) -> None:
    """Loads certificate and key into ``context`` when their files have changed, until cancelled. Files that do not fit
    together, as while one of them is replaced, are tried again."""
    assert args.ssl_certfile is not None and args.ssl_keyfile is not None
    loaded = _stamps(args)
    while True:
        await asyncio.sleep(period)
        if (found := _stamps(args)) == loaded:
            continue
        try:
            args.context()  # a chain that fails half-way would leave the running context without its key
            load_chain(context, args.ssl_certfile, args.ssl_keyfile, "--ssl-certfile and --ssl-keyfile",
                       args.ssl_keyfile_password)
        except ConfigError as error:
            log.warning("The certificate stays the one before: %s", error)
        else:
            loaded = found
            log.info("read %s again", args.ssl_certfile)


def _stamps(args: TlsArgs) -> list[tuple[int, int, int]]:
    """Identities of the files; empty while one of them is missing."""
    try:
        found = [os.stat(path) for path in (args.ssl_certfile, args.ssl_keyfile) if path is not None]
    except OSError:
        return []
    return [(each.st_ino, each.st_mtime_ns, each.st_size) for each in found]
