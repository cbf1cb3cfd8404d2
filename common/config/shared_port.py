"""A port that several processes of one server accept on."""

from __future__ import annotations

import socket
from typing import Any

from .addresses import cannot_listen


def reserve(host: str, port: int) -> tuple[list[socket.socket], int]:
    """Binds sockets that reserve a port for this program while its processes come and go; returns them and the port
    (chosen where it is 0).

    They do not listen, so no connection goes to them. Raises ConfigError where another program has the port: with
    SO_REUSEPORT alone two servers of one user would share it silently.
    """
    reserved: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM,
                                                           flags=socket.AI_PASSIVE):
            address = (address[0], port, *address[2:])
            if port:
                _bind(family, address, shared=False).close()
            reserved.append(_bind(family, address, shared=True))
            port = reserved[-1].getsockname()[1]
    except OSError as error:
        for sock in reserved:
            sock.close()
        raise cannot_listen(host, port, error) from None
    return reserved, port


def _bind(family: int, address: tuple[Any, ...], *, shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
