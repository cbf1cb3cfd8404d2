"""Addresses to listen on, and what to change where one cannot be had."""

from __future__ import annotations

import errno
import os
import socket

from ..api.errors import ConfigError

_OF_HOST = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT))


def cannot_listen(host: str, port: int, error: OSError, *, host_flag: str = "--host",
                  port_flag: str = "--port") -> ConfigError:
    """The error to raise where ``host`` and ``port`` cannot be bound: it names the flag that is wrong."""
    if isinstance(error, socket.gaierror):
        return ConfigError(f"{host_flag} {host} is no address of this machine ({error.strerror}).")
    known = error.errno is not None and error.errno > 0  # event loops write sentences of their own into strerror
    reason = os.strerror(error.errno) if known and error.errno is not None else str(error)
    if error.errno in _OF_HOST:
        return ConfigError(f"Cannot listen on {host} port {port}: {reason}; choose another {host_flag}, an address of "
                           "this machine.")
    return ConfigError(f"Cannot listen on {host} port {port}: {reason}; choose another {port_flag}.")


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet; raises OSError."""
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


def check_free(host: str, port: int, port_flag: str, host_flag: str = "--host") -> None:
    """Raises ConfigError for a port that is to be listened on later, and is taken."""
    try:
        bound(host, port).close()
    except OSError as error:
        raise cannot_listen(host, port, error, host_flag=host_flag, port_flag=port_flag) from None
