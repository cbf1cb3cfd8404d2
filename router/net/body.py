"""Partial decoding of a request body, and splicing of fields into its bytes.

A body is decoded once, and only the fields that a decision needs; the bytes that reach a worker are
the client's own. Re-serializing would change what the router does not know: number formats, key order,
duplicate keys, future fields.
"""

from __future__ import annotations

import re
from functools import lru_cache
from random import Random
from typing import Any

import msgspec

from ...common.api.errors import InvalidRequest
from ...common.api.namespace import SHARED, Namespace
from ...common.api.unreadable import UNREADABLE

_ABSENT = msgspec.Raw()
_TRUE = msgspec.Raw(b"true")
ROUTED_BYTES = 2**20
"""Bytes of a prompt that routing reads, some 200,000 tokens: reading and hashing them takes a millisecond."""
COPIED_BYTES = 64 * 1024
"""The largest body that is copied to add fields; larger ones are sent in parts."""
_CLOSING = re.compile(rb"[ \t\r\n]*\}")
_ROOM_BITS = 63  # SGLang keeps a room in a signed 64-bit integer.


class LargeBody(msgspec.Struct, gc=False):
    """A body with fields added after its opening brace, which is not copied: both calls of a pair send its bytes.

    ``added`` ends in a comma unless the client's object was empty.
    """

    whole: bytes
    start: int
    """The offset of the object's first member."""
    added: bytes

    def __len__(self) -> int:
        return len(self.whole) + len(self.added)

    @property
    def parts(self) -> tuple[bytes, bytes, memoryview]:
        return self.whole[:self.start], self.added, memoryview(self.whole)[self.start:]


Body = bytes | LargeBody
"""A body as it is sent: the client's own bytes, or a body with fields added."""


class RoutingFields(msgspec.Struct, gc=False):
    """The fields of a request that routing reads, as raw JSON: prompts are hashed, not decoded."""

    model: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input_ids: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    bootstrap_host: msgspec.Raw = _ABSENT
    bootstrap_port: msgspec.Raw = _ABSENT
    bootstrap_room: msgspec.Raw = _ABSENT
    stream: msgspec.Raw = _ABSENT
    session_params: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT
    extra_key: msgspec.Raw = _ABSENT

    @property
    def namespace(self) -> Namespace:
        """The namespace of the prompt's pages in workers' prefix caches; of a batch, the first prompt's."""
        if not self.cache_salt and not self.extra_key:
            return SHARED
        return Namespace(_first_key(self.cache_salt), _first_key(self.extra_key))

    @property
    def routing_text(self) -> bytes:
        """The beginning of the prompt, as the client wrote it: for a chat, the whole conversation.

        Later turns of a conversation extend these bytes, so their prefixes compare equal. A very long prompt is cut at
        ROUTED_BYTES: reading more would delay all other requests.
        """
        raw = self.messages or self.text or self.prompt or self.input_ids or self.input
        if len(raw) > ROUTED_BYTES:
            return bytes(memoryview(raw)[:ROUTED_BYTES])
        return bytes(raw).rstrip(b" \t\r\n\"]")

    @property
    def batch_size(self) -> int | None:
        """The number of prompts in a batch; None for one prompt that is not in a batch.

        ``["a", "b"]`` and ``[[1, 2], [3]]`` are batches, ``"a"`` and ``[1, 2]`` are not.
        """
        for raw in (self.text, self.prompt, self.input_ids):
            if raw:
                return _batch(raw)
        return None

    @property
    def model_name(self) -> str:
        """The requested model; "" if there is none, or if it is no string."""
        if not self.model:
            return ""
        try:
            return _decode_name(self.model)
        except UNREADABLE:
            return ""

    @property
    def streamed(self) -> bool:
        return self.stream == _TRUE

    @property
    def is_plain_chat(self) -> bool:
        """True if it is one prompt, in messages, without bootstrap fields of its own."""
        return bool(self.messages) and not (
            self.text or self.prompt or self.input_ids
            or self.bootstrap_room or self.bootstrap_host or self.bootstrap_port)

    @property
    def has_bootstrap(self) -> bool:
        return bool(self.bootstrap_host or self.bootstrap_port or self.bootstrap_room)


_decode_routing_fields = msgspec.json.Decoder(RoutingFields).decode
_decode_name = msgspec.json.Decoder(str).decode
_decode_keys = msgspec.json.Decoder(str | list[str] | None).decode
_encode = msgspec.json.Encoder().encode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _first_key(raw: msgspec.Raw) -> str:
    """A string, or the first of a list of strings; "" for anything else, which workers refuse."""
    try:
        keys = _decode_keys(raw) if raw else None
    except UNREADABLE:
        return ""
    return (keys[0] if keys else "") if isinstance(keys, list) else keys or ""


def _batch(raw: msgspec.Raw) -> int | None:
    """Length of a JSON list of strings or of lists; None for anything else."""
    view = bytes(memoryview(raw)[:64])
    if not view.startswith(b"[") or view[1:].lstrip()[:1] not in (b'"', b"[", b""):
        return None
    try:
        items = _decode_items(raw)
    except UNREADABLE:
        return None
    return len(items) or None


def routing_fields(body: bytes) -> RoutingFields | None:
    """Decode a body's routing fields; None if it is not a JSON object."""
    try:
        return _decode_routing_fields(body)
    except UNREADABLE:
        return None


def require_object(body: bytes) -> RoutingFields:
    """Decode the routing fields of a body that has to be a JSON object; raises InvalidRequest."""
    found = routing_fields(body)
    if found is None or (found.has_bootstrap and not _is_decodable(body)):
        raise InvalidRequest("The request body must be a JSON object.")
    return found


def _is_decodable(body: bytes) -> bool:
    """True if ``splice`` can replace fields, for which all names are decoded; they may not be UTF-8."""
    try:
        _decode_fields(body)
    except UNREADABLE:
        return False
    return True


def with_model(body: bytes, name: str) -> bytes:
    """The body with another model's name, all else as it is; one whose names cannot be decoded stays the same."""
    try:
        fields = _decode_fields(body)
    except UNREADABLE:
        return body
    return _encode({**fields, "model": name})


def bootstrap_fields(host: str, port: int | None, rng: Random, batch_size: int | None) -> dict[str, Any]:
    """SGLang's fields that join the two calls of a pair: one bootstrap room, or one for each prompt of a batch."""
    if batch_size is None:
        return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rng.getrandbits(_ROOM_BITS)}
    return {
        "bootstrap_host": [host] * batch_size,
        "bootstrap_port": [port] * batch_size,
        "bootstrap_room": [rng.getrandbits(_ROOM_BITS) for _ in range(batch_size)],
    }


def with_bootstrap(body: bytes, fields: RoutingFields, host: str, port: int | None, rng: Random) -> Body:
    """The body of both calls of a pair, with the fields that join them."""
    if fields.is_plain_chat:
        start, room = body.index(b"{") + 1, rng.getrandbits(_ROOM_BITS)
        if len(body) <= COPIED_BYTES:
            return b"%b%b%d,%b" % (body[:start], _address(host, port), room, body[start:])
        return LargeBody(body, start, b"%b%d," % (_address(host, port), room))
    return splice(body, fields, bootstrap_fields(host, port, rng, fields.batch_size))


def with_previous_room(body: Body, previous: Body) -> Body:
    """The prefill call's body with the bootstrap rooms of ``previous``, the body of the attempt before: one of our
    prefill servers need not compute again what it computed for that."""
    fields = routing_fields(b"{%b}" % previous.added.rstrip(b",") if isinstance(previous, LargeBody) else previous)
    if fields is None or not fields.bootstrap_room:
        return body
    return with_members(body, b'"bootstrap_previous_room":%b' % bytes(fields.bootstrap_room), empty=False)


def with_members(body: Body, members: bytes, *, empty: bool | None = None) -> Body:
    """A JSON object with ``members`` (``"name":value``, commas between) before its own, which stay byte for byte.

    ``empty``: True if it has no member of its own; None if unknown.
    """
    if isinstance(body, LargeBody):
        return LargeBody(body.whole, body.start, b"%b,%b" % (members, body.added))
    start = body.index(b"{") + 1
    if empty is None:
        empty = _CLOSING.match(body, start) is not None
    if len(body) > COPIED_BYTES:
        return LargeBody(body, start, members if empty else members + b",")
    return b"%b%b%b%b" % (body[:start], members, b"" if empty else b",", body[start:])


@lru_cache(maxsize=1024)
def _address(host: str, port: int | None) -> bytes:
    """The bootstrap fields up to the room's value."""
    return b'"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":' % (_encode(host), _encode(port))


def splice(body: bytes, known: RoutingFields, fields: dict[str, Any]) -> Body:
    """Add ``fields`` to a JSON object, right after its opening brace; all else stays as it is.

    Bootstrap fields that the body already has are replaced, its other values stay byte for byte: with two equal keys
    the choice would be up to each worker's parser, and the two workers could choose differently.
    """
    if known.has_bootstrap:
        return msgspec.json.encode({**_decode_fields(body), **fields})
    return with_members(body, msgspec.json.encode(fields)[1:-1])
