"""Messages between page servers: msgpack, tagged, bounded; one a frame, with its authentication code in a second one.

A client's DEALER socket asks one question at a time, and is closed where an answer stays away, so that none is taken
for that of another question.

    client                                     page server
    Introduce(who, memory)               ->
                                         <-    Introduced(who, other servers)
    Find(number, names)                  ->
                                         <-    Found(number, present)
    Fetch(number, names, blocks)         ->
                                         <-    Going(number)               it waits, or a write is in flight
                                         <-    Part(number, object, data)  where the server does not reach our memory
                                         <-    Fetched(number, present), or Unknown(number)

``instance`` is the random id of a rank's page server, and of its memory. Objects have the storage's names
(objects.py), which say nothing of the server that has them; whoever reads one checks it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

VERSION = 1
MAX_MESSAGE_BYTES = 8 << 20


class Introduce(msgspec.Struct, tag="introduce", frozen=True):
    """``endpoint`` is that of the client's own page server; ``metadata`` the transfer backend's description of its
    memory, empty where it has none, which is ``num_blocks`` blocks of ``block_bytes``."""

    version: int
    instance: str
    endpoint: str
    metadata: bytes
    num_blocks: int
    block_bytes: int


class Find(msgspec.Struct, tag="find", frozen=True):
    number: int
    names: list[str]


class Fetch(msgspec.Struct, tag="fetch", frozen=True):
    """Objects of ``object_bytes`` each. ``blocks``: the first block of each in the memory of ``instance``, int32 little
    endian; empty where they come as messages."""

    number: int
    instance: str
    names: list[str]
    object_bytes: int
    blocks: bytes


class Introduced(msgspec.Struct, tag="introduced", frozen=True):
    """``holds``: what its objects' names have after the key. ``writes``: it reaches the client's memory. ``servers``:
    page servers that it reaches."""

    version: int
    instance: str
    holds: str
    writes: bool
    servers: list[str]


class Found(msgspec.Struct, tag="found", frozen=True):
    """``present``: a byte for each name, 1 where it is there."""

    number: int
    present: bytes


class Going(msgspec.Struct, tag="going", frozen=True):
    number: int


class Part(msgspec.Struct, tag="part", frozen=True):
    number: int
    index: int
    offset: int
    data: bytes


class Fetched(msgspec.Struct, tag="fetched", frozen=True):
    """All bytes of the objects that are ``present`` have arrived."""

    number: int
    present: bytes


class Unknown(msgspec.Struct, tag="unknown", frozen=True):
    """The server does not know the client's memory (any more): the client introduces itself again."""

    number: int


ToServer = Introduce | Find | Fetch
ToClient = Introduced | Found | Going | Part | Fetched | Unknown

encode = msgspec.msgpack.Encoder().encode
decode_to_server: Callable[[bytes], ToServer] = msgspec.msgpack.Decoder(ToServer).decode
decode_to_client: Callable[[bytes], ToClient] = msgspec.msgpack.Decoder(ToClient).decode
"""Both raise one of ``UNREADABLE`` on anything else."""
