"""Setup that senders and receivers share: their arguments, identity, registered pool and sockets."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import zmq

from ..common.api.errors import ConfigError
from ..common.api.identity import ModelIdentity
from ..common.kvcache.layout import KVLayout
from ..common.kvcache.storage.page_servers import PageServers
from .backends import make_backend
from .backends.base import Backend, Region
from .protocol.messages import MAX_MESSAGE_BYTES, DraftInfo, RankInfo

if TYPE_CHECKING:
    from ..common.engine.rank import EngineParts
    from ..common.runner.model_runner import ModelRunner


class FurtherGroup(NamedTuple):
    """The pool of a cache group after the first. No request uses ``spare_page``."""

    layout: KVLayout
    num_pages: int
    spare_page: int | None = None


def transport_arguments(parts: EngineParts) -> dict[str, Any]:
    """Keyword arguments that KVSender and KVReceiver have in common, from the parts of an engine rank."""
    config, runner = parts.config, parts.runner
    args = config.disaggregation
    pools = [*runner.pools, *(() if runner.draft_pool is None else (runner.draft_pool,))]
    backend = make_backend(args.disaggregation_transfer_backend, config.http.host, args.disaggregation_ib_device)
    return {
        "args": args, "host": config.http.host, "server": config.shown_url, "backend": backend,
        "rank": parts.tp.rank, "tp_size": parts.tp.size, "dp_rank": parts.parallel.dp_rank,
        "dp_size": parts.parallel.dp_size, "model": runner.model, "layout": runner.layout,
        "num_pages": runner.pool.num_pages, "spare_page": runner.scratch_page,
        "regions": [region for one in pools for region in one.regions()],
        "further": [FurtherGroup(one.layout, one.num_pages, one.num_pages - 1) for one in runner.pools[1:]],
        "page_servers": page_servers_of(parts),
        "draft": draft_info(runner), "deterministic": config.kernels.enable_deterministic_inference}


def page_servers_of(parts: EngineParts) -> PageServers:
    """Returns the page servers that an engine's rank knows, with its own one, where it has one."""
    loads = parts.batcher.loads
    return PageServers() if loads is None or loads.prefetches is None else loads.prefetches.page_servers


def draft_info(runner: ModelRunner) -> DraftInfo | None:
    """Returns the description of an engine's draft model, where it has one."""
    model, identity, algorithm = runner.draft_model, runner.draft_identity, runner.draft_algorithm
    if model is None or identity is None or algorithm is None:
        return None
    return DraftInfo(algorithm, identity, model.layout, required=model.features is not None)


def with_weights(info: RankInfo, model: ModelIdentity, draft: ModelIdentity | None) -> RankInfo:
    """Returns a rank's description with other weights of its model, and of its draft model where it has one."""
    own = info.draft
    if own is not None and draft is not None:
        own = msgspec.structs.replace(own, model=draft)
    return msgspec.structs.replace(info, model=model, draft=own)


def pool_groups(first: FurtherGroup, further: Sequence[FurtherGroup], draft: DraftInfo | None) -> list[FurtherGroup]:
    """Returns the pools of all cache groups, and after them the draft's, which has the pages of the first one's ids."""
    return [first, *further, *(() if draft is None else (first._replace(layout=draft.layout),))]


def rank_info(*, endpoint: str, rank: int, tp_size: int, layout: KVLayout, backend: Backend, dp_rank: int,
              dp_size: int, pp_rank: int = 0, pp_size: int = 1, model: ModelIdentity | None = None,
              server: str = "", further: Sequence[FurtherGroup] = (), draft: DraftInfo | None = None,
              deterministic: bool = False, page_server: str = "") -> RankInfo:
    """Returns our identity, with a fresh instance id (the epoch of this process)."""
    return RankInfo(secrets.token_hex(8), endpoint, rank, tp_size, layout, backend.name, dp_rank=dp_rank,
                    dp_size=dp_size, pp_rank=pp_rank, pp_size=pp_size, model=model, server=server,
                    further_layouts=tuple(group.layout for group in further), draft=draft, deterministic=deterministic,
                    page_server=page_server)


class PairKey:
    """Key that two servers of one role share where they can be paired with the same servers of the other role.

    A router then tries one pair of each kind for all pairs of that kind. The key reveals nothing of its inputs: of the
    cluster's secret it has 16 bits of a slow hash, which can rule guesses out but never confirm one.
    """

    def __init__(self, secret: str | None, backend: Backend, regions: Sequence[tuple[int, int, int]]):
        on_gpu = any(device >= 0 for _, _, device in regions)
        self._parts = (backend.name, backend.scope, on_gpu, _secret_bits(secret))

    def of(self, info: RankInfo) -> str:
        fingerprint = None if info.model is None else info.model.fingerprint
        parts = (self._parts, info.protocol, info.tp_size, info.pp_size, fingerprint, info.deterministic)
        layouts = b"".join(map(msgspec.json.encode, info.layouts))
        if info.draft is not None:
            draft = info.draft.algorithm, info.draft.model.fingerprint
            layouts += msgspec.json.encode(info.draft.layout) + repr(draft).encode()
        return hashlib.sha256(layouts + repr(parts).encode()).hexdigest()[:16]


def _secret_bits(secret: str | None) -> str:
    """Returns 16 bits of a slow hash: a guess costs 30 ms and 16 MiB."""
    if secret is None:
        return ""
    return hashlib.scrypt(secret.encode(), salt=b"baton pair key", n=2**14, r=8, p=1).hex()[:4]


class RegisteredPool(NamedTuple):
    """The layer groups of all cache groups, one after the other: memory, number of pages and bytes of a page."""

    regions: list[Region]
    num_pages: list[int]
    page_bytes: list[int]


def register_pool(backend: Backend, groups: Sequence[FurtherGroup],
                  regions: Sequence[tuple[int, int, int]]) -> RegisteredPool:
    """Registers the KV pools of all cache groups: one ``(address, bytes, device)`` for each layer group; device -1 is
    host memory."""
    pool = RegisteredPool([Region(*region) for region in regions], [], [])
    for layout, num_pages, _ in groups:
        pool.num_pages.extend([num_pages] * len(layout.groups))
        pool.page_bytes.extend(map(layout.group_page_bytes, range(len(layout.groups))))
    assert len(regions) == len(pool.num_pages), "one region for each layer group"
    for region, count, page_bytes in zip(pool.regions, pool.num_pages, pool.page_bytes):
        assert region.num_bytes == count * page_bytes, "a region has the size of its group's pages"
    backend.register(pool.regions, pool.num_pages)
    return pool


def control_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Creates a socket with a bounded frame size, no lingering, and no limit on queued messages: there are a few small
    ones for each transfer."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return sock


def bind_control(sock: zmq.Socket[bytes], host: str, port: int = 0) -> str:
    """Binds to ``port`` of ``host``, 0: a free one, and returns the endpoint; raises ConfigError where that is
    impossible."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        if address[0] == socket.AF_INET6:
            sock.setsockopt(zmq.IPV6, 1)
            endpoint = f"tcp://[{address[4][0]}]"
        else:
            endpoint = f"tcp://{address[4][0]}"
        if not port:
            return f"{endpoint}:{sock.bind_to_random_port(endpoint)}"
        sock.bind(f"{endpoint}:{port}")
        return f"{endpoint}:{port}"
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(f"Cannot listen on --host {host}{f', port {port},' if port else ''} for KV transfers: "
                          f"{error}.") from None


def reachable_endpoint(host: str, endpoint: str) -> str:
    """Returns where to connect: a server that listens on all addresses is reached at ``host``."""
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(wildcard) and host:
            return f"tcp://{f'[{host}]' if ':' in host else host}:{endpoint[len(wildcard):]}"
    return endpoint


def receive_all(sock: zmq.Socket[bytes], handle: Callable[[list[bytes]], None]) -> None:
    """Gives every message that has arrived to ``handle``."""
    while True:
        try:
            frames = sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        handle(frames)

