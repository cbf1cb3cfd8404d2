"""KV events: changes of a server's prefix cache, in the format that vLLM and SGLang publish.

A message has three frames: topic, sequence number (8 bytes, big-endian) and a msgpack batch
``[ts, [event, ...]]``. Events are arrays that begin with their name: ``BlockStored`` (hashes, the hash
before them, tokens, page size, ...), ``BlockRemoved`` (hashes) and ``AllBlocksCleared``. vLLM's newest
releases write maps with the same names instead; ``decode`` reads both.

Our servers' hashes are ``page_hashes``: chained, so that one hash identifies a whole prefix, and the
same for equal tokens on every server, so that routers can compute them from a prompt's tokens. ``medium`` says where
pages are: on the GPU, in host memory, or in the storage behind it. The pages of a
namespace follow its seed (``Namespace.seed``): their hashes differ from those of all other namespaces, and readers
that know no namespaces see pages that follow one they never saw. The salt itself is not sent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec

from .unreadable import UNREADABLE

TOPIC = b"kv-events"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
PROMPT_PAGES_HEADER = "x-baton-prompt-pages"
"""On a request: asks for the prompt's page hashes. On its response: the hashes (see ``encode_pages``)."""
_MAX_ENCODED_PAGES = 64

Hash = int | bytes
Medium = Literal["GPU", "CPU_PINNED", "DISK"]
GPU: Medium = "GPU"
HOST: Medium = "CPU_PINNED"
DISK: Medium = "DISK"
"""Storage of any kind. The names are SGLang's."""

_MEDIA: dict[str | None, Medium] = {
    None: GPU, "GPU": GPU,
    **dict.fromkeys(("CPU_PINNED", "CPU", "CPU_TIER1"), HOST),
    **dict.fromkeys(("DISK", "STORAGE", "CPU_TIER2", "EXTERNAL"), DISK),
}
"""The names that peers have given them: vLLM's CPU, SGLang's older CPU_TIER1 and CPU_TIER2, Dynamo's STORAGE."""


class Stored(NamedTuple):
    """Pages entered the cache, or its tier ``medium``: ``hashes[i]`` covers all tokens up to the end of page i of
    ``token_ids``.

    ``parent`` is the hash of the page before the first one; at the beginning of a prompt its namespace's seed, or None.
    """

    hashes: Sequence[Hash]
    parent: Hash | None
    token_ids: Sequence[int]
    page_size: int
    medium: Medium = GPU


class Removed(NamedTuple):
    """Pages left the cache, or its tier ``medium``."""

    hashes: Sequence[Hash]
    medium: Medium = GPU


class Cleared(NamedTuple):
    """The cache is empty, with its tier in host memory."""


Event = Stored | Removed | Cleared

_U64 = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def page_hashes(token_ids: Sequence[int], page_size: int, parent: int | None = None) -> list[int]:
    """The hashes of the full pages of ``token_ids``, each over all tokens from the prompt's beginning.

    63 bits each (peers store them in signed 64-bit integers): among 10 million pages two would be equal
    once in 200,000 such caches, and a collision costs one badly routed request.
    """
    return chained(token_bytes(token_ids), 4 * page_size, parent)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Packs ids as little-endian int32; raises struct.error where one is not."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def chained(tokens: bytes, page_bytes: int, parent: int | None) -> list[int]:
    """``page_hashes`` of tokens packed as little-endian int32; 0.5 us a page."""
    pack, unpack = _U64.pack, _U64.unpack
    hashes = []
    previous = pack(parent or 0)
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        digest = blake2b(previous + tokens[start:start + page_bytes], digest_size=8).digest()
        value = unpack(digest)[0] >> 1
        hashes.append(value)
        previous = pack(value)
    return hashes


def encode(ts: float, events: Sequence[Event]) -> bytes:
    """A batch's payload; ``ts`` in seconds since the epoch."""
    return _encode((ts, [_as_array(event) for event in events]))


def _as_array(event: Event) -> tuple[Any, ...]:
    # lora_id, medium and lora_name have no default in the readers' array forms: without them they refuse the event.
    match event:
        case Stored(hashes, parent, token_ids, page_size, medium):
            return "BlockStored", hashes, parent, token_ids, page_size, None, medium, None
        case Removed(hashes, medium):
            return "BlockRemoved", hashes, medium
        case Cleared():
            return ("AllBlocksCleared",)


def decode(payload: bytes) -> list[Event]:
    """The events of a batch; unknown ones, and those of an unknown medium, are left out.

    Raises ValueError where the payload is no batch.
    """
    try:
        batch = _decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        read = [_read(event) for event in events]
    except (*UNREADABLE, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from None
    return [event for event in read if event is not None]


_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def _read(event: Any) -> Event | None:
    if isinstance(event, dict):
        name, fields = event["type"], event
    else:
        name = event[0]
        fields = dict(zip(_FIELDS.get(name, ()), event[1:]))
    if name == "AllBlocksCleared":
        return Cleared()
    # Layer groups after the first are no prefixes.
    medium = _MEDIA.get(fields.get("medium"))
    if name not in _FIELDS or medium is None or fields.get("group_idx"):
        return None
    if name == "BlockRemoved":
        return Removed(_hashes(fields["block_hashes"]), medium)
    # Pages of a LoRA, and those with extra keys (salts, images), have other content for the same tokens.
    if fields.get("lora_id") is not None or fields.get("lora_name") is not None or any(fields.get("extra_keys") or ()):
        return None
    parent, token_ids = fields["parent_block_hash"], fields["token_ids"]
    if not isinstance(parent, (int, bytes, type(None))) or not isinstance(token_ids, list):
        raise ValueError("parent_block_hash must be a hash or null, and token_ids a list")
    # Where vLLM's connector of host memory reports a page, it names the hash alone.
    page_size = 1 if medium != GPU and not token_ids else _count(fields["block_size"])
    return Stored(_hashes(fields["block_hashes"]), parent, token_ids, page_size, medium)


def _hashes(value: Any) -> Sequence[Hash]:
    if not isinstance(value, list) or not all(isinstance(item, (int, bytes)) for item in value):
        raise ValueError("block_hashes must be a list of integers or bytes")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError("block_size must be a positive integer")
    return value


def encode_pages(token_ids: Sequence[int], page_size: int, seed: int | None = None) -> str:
    """A prompt's page hashes as a header's value: ``PAGES;PAGE_SIZE;PAGE:HASH,PAGE:HASH,...``, hashes in hexadecimal.
    ``seed`` is that of the prompt's namespace.

    For long prompts the value has every 2nd, 4th, 8th ... page, 64 or fewer, and the last one: it stays below 2 KB,
    and prompts that share a prefix have the same pages of it.
    """
    hashes = page_hashes(token_ids, page_size, seed)
    count = len(hashes)
    stride = 1
    while count > stride * _MAX_ENCODED_PAGES:
        stride *= 2
    pages = [*range(stride, count + 1, stride), *([count] if count % stride else [])]
    return f"{count};{page_size};" + ",".join(f"{page}:{hashes[page - 1]:x}" for page in pages)


class PromptPages(NamedTuple):
    """Decoded ``encode_pages``: the number of pages, and for some of them, in order, ``(number of pages up to its end,
    hash)``."""

    pages: int
    page_size: int
    hashes: list[tuple[int, int]]


def decode_pages(value: str) -> PromptPages:
    """Raises ValueError where the value is not ``encode_pages``'s."""
    count, page_size, hashes = value.split(";")
    pairs = [pair.split(":") for pair in hashes.split(",")] if hashes else []
    return PromptPages(int(count), int(page_size), [(int(page), int(hashed, 16)) for page, hashed in pairs])
