"""What a sender and a receiver set up alike: who they are, their registered pool, their sockets."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence

import zmq

from ..common.api.errors import ConfigError
from ..common.kvcache.layout import KVLayout
from .backends.base import Backend, Region
from .messages import MAX_MESSAGE_BYTES, RankInfo


def rank_info(*, endpoint: str, rank: int, tp_size: int, layout: KVLayout, backend: Backend, dp_rank: int,
              dp_size: int, pp_rank: int = 0, pp_size: int = 1) -> RankInfo:
    """Our identity, with a fresh instance id (the epoch of this process)."""
    return RankInfo(secrets.token_hex(8), endpoint, rank, tp_size, layout, backend.name, dp_rank=dp_rank,
                    dp_size=dp_size, pp_rank=pp_rank, pp_size=pp_size)


def register_pool(backend: Backend, layout: KVLayout, num_pages: int,
                  regions: Sequence[tuple[int, int, int]]) -> list[Region]:
    """Register the KV pool: one ``(address, bytes, device)`` for each layer group; device -1 is host memory."""
    named = [Region(*region) for region in regions]
    assert len(regions) == len(layout.groups), "one region for each layer group"
    for group, (_, num_bytes, _) in enumerate(regions):
        assert num_bytes == num_pages * layout.group_page_bytes(group), "a region holds the pages of its group"
    backend.register(named, num_pages)
    return named


def control_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A bounded frame size, no lingering, and no limit on queued messages: there are a few small ones for each room."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return sock


def bind_control(sock: zmq.Socket[bytes], host: str) -> str:
    """Bind to a free port of ``host`` and return the endpoint; raises ConfigError when it is no address of ours."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        if address[0] == socket.AF_INET6:
            sock.setsockopt(zmq.IPV6, 1)
            port = sock.bind_to_random_port(f"tcp://[{address[4][0]}]")
            return f"tcp://[{address[4][0]}]:{port}"
        port = sock.bind_to_random_port(f"tcp://{address[4][0]}")
        return f"tcp://{address[4][0]}:{port}"
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(f"Cannot listen on --host {host} for KV transfers: {error}.") from None


def receive_all(sock: zmq.Socket[bytes], handle: Callable[[list[bytes]], None]) -> None:
    """Hand every message that has arrived to ``handle``."""
    while True:
        try:
            frames = sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        handle(frames)

