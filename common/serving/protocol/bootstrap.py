"""Bootstrap fields of a request: the room in which its prefill server and its decode server find each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...api.errors import InvalidRequest
from ...api.messages import Bootstrap
from ...api.wire import Int32, Int64
from ...config.roles import Role
from .namespaces import NamespaceFields
from .per_prompt import per_choice, rooms_per_choice
from .slo import Milliseconds


class BootstrapFields(NamespaceFields, kw_only=True):
    """The fields that a router adds to a request, and its objectives; lists hold one entry per prompt of a batch, or
    one per choice (sgl-router sends that for a chat with ``n``). Every request that may have them has a namespace,
    too."""

    bootstrap_host: str | list[str] | None = None
    bootstrap_port: Int32 | list[Int32 | None] | None = None
    bootstrap_room: Int64 | list[Int64] | None = None
    # the room of the attempt before, whose prompt the prefill server may have retained
    bootstrap_previous_room: Int64 | list[Int64] | None = None
    data_parallel_rank: Int32 | None = None
    routed_dp_rank: Int32 | None = None  # SGLang's newer name of data_parallel_rank
    disagg_prefill_dp_rank: Int32 | None = None
    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None


class Placement(NamedTuple):
    """The bootstrap room of one choice, None where this server computes the prompt itself, and its data-parallel rank,
    None where the engine's client chooses it. ``sends_kv``: this server computes the prompt for another one."""

    bootstrap: Bootstrap | None
    dp_rank: int | None
    sends_kv: bool = False


def place_choices(fields: BootstrapFields, num_prompts: int, n: int, *, role: Role, default_port: int,
               dp_size: int) -> list[Placement]:
    """One entry per choice, ``n`` for each prompt. Raises InvalidRequest.

    A unified server ignores bootstrap fields, a prefill server needs them, and a decode server computes the prompt
    itself where there are none. A request of a prefill server that names no data-parallel rank gets the one that its
    room leads to: decode servers look there.
    """
    rooms: list[Bootstrap | None] = [None] * (num_prompts * n)
    if role.transfers_kv:
        rooms = bootstraps(fields, num_prompts, n, default_port)
    if role.sends_kv and rooms[0] is None:
        raise InvalidRequest("A prefill server needs bootstrap_host, bootstrap_port and bootstrap_room; send "
                             "requests to the router.", param="bootstrap_room")
    rank = requested_dp_rank(fields, dp_size)
    if dp_size == 1:
        return [Placement(room, None, role.sends_kv) for room in rooms]
    if rank is None and role.sends_kv:
        return [Placement(room, None if room is None else room.room % dp_size, True) for room in rooms]
    return [Placement(room, rank, role.sends_kv) for room in rooms]


def requested_dp_rank(fields: BootstrapFields, dp_size: int) -> int | None:
    """The data-parallel rank of this server that the request names, None where it names none; raises InvalidRequest for
    a rank that this server does not have."""
    named = [name for name in ("data_parallel_rank", "routed_dp_rank") if getattr(fields, name) is not None]
    for name in named:
        rank = getattr(fields, name)
        if not 0 <= rank < dp_size:
            raise InvalidRequest(f"{name} must be {'0' if dp_size == 1 else f'between 0 and {dp_size - 1}'}, got "
                                 f"{rank}: this server has dp_size {dp_size}.", param=name)
    return getattr(fields, named[0]) if named else None


def bootstraps(fields: BootstrapFields, num_prompts: int, n: int, default_port: int) -> list[Bootstrap | None]:
    """One entry per choice (``n`` for each prompt); all None where the request has no bootstrap fields.

    Choices of one prompt take consecutive rooms, as do the prompts of a batch that was given a single room. Raises
    InvalidRequest for fields that are incomplete, out of range, or do not match the number of prompts.
    """
    total = num_prompts * n
    if fields.bootstrap_host is None and fields.bootstrap_room is None:
        if fields.bootstrap_port is not None:
            raise InvalidRequest("bootstrap_port needs bootstrap_host and bootstrap_room.", param="bootstrap_port")
        return [None] * total
    if fields.bootstrap_host is None or fields.bootstrap_room is None:
        missing = "bootstrap_host" if fields.bootstrap_host is None else "bootstrap_room"
        raise InvalidRequest(f"{missing} is missing: bootstrap_host and bootstrap_room go together.", param=missing)
    hosts = per_choice("bootstrap_host", fields.bootstrap_host, num_prompts, n)
    ports = per_choice("bootstrap_port", fields.bootstrap_port, num_prompts, n)
    rooms = rooms_per_choice("bootstrap_room", fields.bootstrap_room, num_prompts, n)
    before = fields.bootstrap_previous_room
    previous: Sequence[int | None] = (
        [None] * total if before is None else rooms_per_choice("bootstrap_previous_room", before, num_prompts, n))
    rank = fields.disagg_prefill_dp_rank
    if rank is not None and rank < 0:
        raise InvalidRequest(f"disagg_prefill_dp_rank must be 0 or more, got {rank}.", param="disagg_prefill_dp_rank")
    return [_checked(host, default_port if port is None else port, room, last_room, rank)
            for host, port, room, last_room in zip(hosts, ports, rooms, previous)]


def bootstrap_point(host: str, port: int) -> tuple[str, int]:
    """The address of a bootstrap server; raises InvalidRequest for a host or port that cannot be one."""
    if not host or len(host) > 255 or any(char.isspace() for char in host):
        raise InvalidRequest(f"bootstrap_host must be a host name or address, got {host[:80]!r}.",
                             param="bootstrap_host")
    if not 0 < port < 65536:
        raise InvalidRequest(f"bootstrap_port must be between 1 and 65535, got {port}.", param="bootstrap_port")
    return host, port


def _checked(host: str, port: int, room: int, previous: int | None,
             dp_rank: int | None) -> Bootstrap:
    bootstrap_point(host, port)
    if not 0 <= room < 2**63:
        raise InvalidRequest(f"bootstrap_room must be between 0 and 2**63 - 1, got {room}.", param="bootstrap_room")
    if previous is not None and not 0 <= previous < 2**63:
        raise InvalidRequest(f"bootstrap_previous_room must be between 0 and 2**63 - 1, got {previous}.",
                             param="bootstrap_previous_room")
    return Bootstrap(host, port, room, previous, dp_rank)
