"""Checks addresses to listen on, and names the flag to change where one cannot be bound."""

from __future__ import annotations

import errno
import os
import socket
from functools import partial

from ..api.errors import ConfigError

_HOST_ERRORS = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT))


def cannot_listen(host: str, port: int, error: OSError, *, host_flag: str = "--host",
                  port_flag: str = "--port") -> ConfigError:
    """Returns the error to raise where ``host`` and ``port`` cannot be bound; it names the flag that is wrong."""
    if isinstance(error, socket.gaierror):
        return ConfigError(f"{host_flag} {host} is no address of this machine ({error.strerror}).")
    known = error.errno is not None and error.errno > 0  # event loops write sentences of their own into strerror
    reason = os.strerror(error.errno) if known and error.errno is not None else str(error)
    if error.errno in _HOST_ERRORS:
        return ConfigError(f"Cannot listen on {host} port {port}: {reason}; choose another {host_flag}, an address of "
                           "this machine.")
    return ConfigError(f"Cannot listen on {host} port {port}: {reason}; choose another {port_flag}.")


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound and does not listen yet; raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                         flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def find_free_ports(host: str, first: int, count: int, *, width: int = 1) -> list[int]:
    """Finds ``count`` ports from ``first`` on; the ``width - 1`` ports above each are free too.

    Raises ConfigError if there are too few.
    """
    ports: list[int] = []
    port = first
    while len(ports) < count:
        if port + width > 65536:
            raise ConfigError(f"There are no {count * width} free ports above {first} on {host}.")
        if all(map(partial(_is_free, host), range(port, port + width))):
            ports.append(port)
            port += width
        else:
            port += 1
    return ports


def _is_free(host: str, port: int) -> bool:
    try:
        bound(host, port).close()
    except OSError:
        return False
    return True


def check_free(host: str, port: int, port_flag: str, host_flag: str = "--host") -> None:
    """Raises ConfigError where a port that a server will listen on is taken."""
    try:
        bound(host, port).close()
    except OSError as error:
        raise cannot_listen(host, port, error, host_flag=host_flag, port_flag=port_flag) from None
