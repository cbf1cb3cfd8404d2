"""Certificates that are renewed while a server runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from pathlib import Path

from baton.common.config.server import TlsArgs
from baton.common.serving.tls_refresh import refresh_certificate
from baton.tests.helpers.certificates import make_certificate


async def name_shown(port: int) -> str:
    """The common name of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = ssl.DER_cert_to_PEM_cert(writer.get_extra_info("ssl_object").getpeercert(True))
    writer.close()
    return shown


def read(path: str) -> str:
    return Path(path).read_text()


async def until_shown(port: int, expected: str) -> None:
    async with asyncio.timeout(5):
        while await name_shown(port) != expected:
            await asyncio.sleep(0.01)


async def test_new_connections_get_the_new_certificate(tmp_path, caplog):
    """Also where one file is replaced before the other, and the new key has no password."""
    used, renewed = make_certificate(tmp_path, "used", "secret"), make_certificate(tmp_path, "renewed")
    args = TlsArgs(*used, ssl_keyfile_password="secret", enable_ssl_refresh=True)
    first, second = read(used[0]), read(renewed[0])
    context = args.context()
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    task = asyncio.create_task(refresh_certificate(context, args, period=0.01))
    try:
        await until_shown(port, first)
        shutil.copy(renewed[0], used[0])
        async with asyncio.timeout(5):
            while "stays the one before" not in caplog.text:
                await asyncio.sleep(0.01)
        assert await name_shown(port) == first
        os.unlink(used[1])
        await asyncio.sleep(0.05)
        shutil.copy(renewed[1], used[1])
        await until_shown(port, second)
        assert not task.done()
    finally:
        task.cancel()
        server.close()
