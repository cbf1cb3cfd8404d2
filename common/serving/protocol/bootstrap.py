"""Bootstrap fields of a request: where its prefill half and its decode half meet."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...api.errors import InvalidRequest
from ...api.messages import Bootstrap
from ...api.wire import Int32, Int64
from .per_prompt import T, per_prompt


class BootstrapFields(msgspec.Struct, kw_only=True):
    """What a router adds to a request; lists hold one entry per prompt of a batch, or one per choice (sgl-router sends
    that for a chat with ``n``)."""

    bootstrap_host: str | list[str] | None = None
    bootstrap_port: Int32 | list[Int32 | None] | None = None
    bootstrap_room: Int64 | list[Int64] | None = None
    # of an attempt before, which the prefill server may reuse
    bootstrap_previous_room: Int64 | list[Int64] | None = None
    data_parallel_rank: Int32 | None = None
    routed_dp_rank: Int32 | None = None  # SGLang's newer name of the same
    disagg_prefill_dp_rank: Int32 | None = None


def chosen_rank(fields: BootstrapFields, dp_size: int) -> int | None:
    """The data-parallel rank of this server that the request names, if it names one; raises InvalidRequest for one that
    is not there."""
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
    if fields.bootstrap_host is None and fields.bootstrap_room is None:
        if fields.bootstrap_port is not None:
            raise InvalidRequest("bootstrap_port needs bootstrap_host and bootstrap_room.", param="bootstrap_port")
        return [None] * (num_prompts * n)
    if fields.bootstrap_host is None or fields.bootstrap_room is None:
        missing = "bootstrap_host" if fields.bootstrap_host is None else "bootstrap_room"
        raise InvalidRequest(f"{missing} is missing: bootstrap_host and bootstrap_room go together.", param=missing)
    hosts = _each_choice("bootstrap_host", fields.bootstrap_host, num_prompts, n)
    ports = _each_choice("bootstrap_port", fields.bootstrap_port, num_prompts, n)
    rooms = _rooms("bootstrap_room", fields.bootstrap_room, num_prompts, n)
    before = fields.bootstrap_previous_room
    previous: Sequence[int | None] = (
        [None] * (num_prompts * n) if before is None else _rooms("bootstrap_previous_room", before, num_prompts, n))
    rank = fields.disagg_prefill_dp_rank
    if rank is not None and rank < 0:
        raise InvalidRequest(f"disagg_prefill_dp_rank must be 0 or more, got {rank}.", param="disagg_prefill_dp_rank")
    return [_checked(host, default_port if port is None else port, room, was, rank)
            for host, port, room, was in zip(hosts, ports, rooms, previous)]


def _each_choice(name: str, given: T | list[T], num_prompts: int, n: int) -> list[T]:
    """A value for each choice, of one for all, one for each prompt, or one for each choice."""
    if isinstance(given, list) and len(given) == num_prompts * n:
        return given
    return [value for value in per_prompt(name, given, num_prompts) for _ in range(n)]


def _rooms(name: str, given: int | list[int], num_prompts: int, n: int) -> list[int]:
    """The room of each choice."""
    if isinstance(given, int):
        return [given + i for i in range(num_prompts * n)]
    if len(given) == num_prompts * n:
        return given
    firsts: list[int] = per_prompt(name, given, num_prompts)
    return [first + i for first in firsts for i in range(n)]


def bootstrap_point(host: str, port: int) -> tuple[str, int]:
    """The address of a bootstrap server; raises InvalidRequest for what can be none."""
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
