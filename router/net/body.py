"""Looking into a request body without taking it apart, and splicing fields into it.

A body is decoded once, and only to read what a decision needs; the bytes that reach a worker are
the client's own. Re-serializing would change what we do not know: number formats, key order,
duplicate keys, fields of tomorrow.
"""

from __future__ import annotations

import re
from functools import lru_cache
from random import Random
from typing import Any

import msgspec

from ...common.api.errors import InvalidRequest
from ...common.api.unreadable import UNREADABLE

_ABSENT = msgspec.Raw()
_TRUE = msgspec.Raw(b"true")
ROUTED_BYTES = 2**20
"""Bytes of a prompt that routing looks at, some 200,000 tokens: reading and hashing them takes a millisecond."""
COPIED_BYTES = 64 * 1024
"""Larger bodies are sent in parts instead of being copied."""
_CLOSING = re.compile(rb"[ \t\r\n]*\}")
_ROOM_BITS = 63  # SGLang keeps a room in a signed 64-bit integer.


class LargeBody(msgspec.Struct, gc=False):
    """A body with fields added after its opening brace, which is not copied: both halves of a request send its bytes.

    ``added`` ends in a comma unless the client's object was empty.
    """

    whole: bytes
    start: int
    """Where the object's first member begins."""
    added: bytes

    def __len__(self) -> int:
        return len(self.whole) + len(self.added)

    @property
    def parts(self) -> tuple[bytes, bytes, memoryview]:
        return self.whole[:self.start], self.added, memoryview(self.whole)[self.start:]


Body = bytes | LargeBody
"""A body as it is sent: the client's own, or one with fields added."""


class Peek(msgspec.Struct, gc=False):
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

    @property
    def routing_text(self) -> bytes:
        """What the prompt begins with, as the client wrote it: for a chat the whole conversation.

        Later turns of a conversation extend these bytes, so their prefixes compare equal. Of a very long prompt it is
        the first ROUTED_BYTES: looking at more would hold up all other requests.
        """
        raw = self.messages or self.text or self.prompt or self.input_ids or self.input
        if len(raw) > ROUTED_BYTES:
            return bytes(memoryview(raw)[:ROUTED_BYTES])
        return bytes(raw).rstrip(b" \t\r\n\"]")

    @property
    def batch_size(self) -> int | None:
        """How many prompts a batch holds; None for one prompt that is not in a batch.

        ``["a", "b"]`` and ``[[1, 2], [3]]`` are batches, ``"a"`` and ``[1, 2]`` are not.
        """
        for raw in (self.text, self.prompt, self.input_ids):
            if raw:
                return _batch(raw)
        return None

    @property
    def model_name(self) -> str:
        """The model that is asked for; "" where none is, or what is no name."""
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
        """Whether it is one prompt, in messages, that nobody has sent to a pair yet."""
        return bool(self.messages) and not (
            self.text or self.prompt or self.input_ids
            or self.bootstrap_room or self.bootstrap_host or self.bootstrap_port)

    @property
    def has_bootstrap(self) -> bool:
        return bool(self.bootstrap_host or self.bootstrap_port or self.bootstrap_room)


_decode_peek = msgspec.json.Decoder(Peek).decode
_decode_name = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _batch(raw: msgspec.Raw) -> int | None:
    """Length of a JSON list of strings or of lists; None for all else."""
    view = bytes(memoryview(raw)[:64])
    if not view.startswith(b"[") or view[1:].lstrip()[:1] not in (b'"', b"[", b""):
        return None
    try:
        items = _decode_items(raw)
    except UNREADABLE:
        return None
    return len(items) or None


def peek(body: bytes) -> Peek | None:
    """Read a body; None when it is not a JSON object."""
    try:
        return _decode_peek(body)
    except UNREADABLE:
        return None


def require_object(body: bytes) -> Peek:
    """Read a body that has to be a JSON object; raises InvalidRequest."""
    found = peek(body)
    if found is None or (found.has_bootstrap and not _is_readable(body)):
        raise InvalidRequest("The request body must be a JSON object.")
    return found


def _is_readable(body: bytes) -> bool:
    """Whether ``splice`` can replace fields: only then are all names decoded, and they may be no UTF-8."""
    try:
        _decode_fields(body)
    except UNREADABLE:
        return False
    return True


def with_model(body: bytes, name: str) -> bytes:
    """The body for another model's name, all else as it is; one whose names cannot be read stays the same."""
    try:
        fields = _decode_fields(body)
    except UNREADABLE:
        return body
    return _encode({**fields, "model": name})


def bootstrap_fields(host: str, port: int | None, rng: Random, batch_size: int | None) -> dict[str, Any]:
    """SGLang's fields that join the two halves of a request: one room, or one a prompt of a batch."""
    if batch_size is None:
        return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rng.getrandbits(_ROOM_BITS)}
    return {
        "bootstrap_host": [host] * batch_size,
        "bootstrap_port": [port] * batch_size,
        "bootstrap_room": [rng.getrandbits(_ROOM_BITS) for _ in range(batch_size)],
    }


def with_bootstrap(body: bytes, found: Peek, host: str, port: int | None, rng: Random) -> Body:
    """A body for both halves of a request, with fields that join them."""
    if found.is_plain_chat:
        start, room = body.index(b"{") + 1, rng.getrandbits(_ROOM_BITS)
        if len(body) <= COPIED_BYTES:
            return b"%b%b%d,%b" % (body[:start], _address(host, port), room, body[start:])
        return LargeBody(body, start, b"%b%d," % (_address(host, port), room))
    return splice(body, found, bootstrap_fields(host, port, rng, found.batch_size))


def with_previous_room(body: Body, before: Body) -> Body:
    """The prefill half's body with the room, or rooms, of ``before``, the body of the same half of the attempt before:
    what a prefill server of ours computed then, it need not compute again."""
    found = peek(b"{%b}" % before.added.rstrip(b",") if isinstance(before, LargeBody) else before)
    if found is None or not found.bootstrap_room:
        return body
    return with_members(body, b'"bootstrap_previous_room":%b' % bytes(found.bootstrap_room), empty=False)


def with_members(body: Body, members: bytes, *, empty: bool | None = None) -> Body:
    """A JSON object with ``members`` (``"name":value``, commas between) before its own, which stay byte for byte.

    ``empty``: whether it has none of its own; None: to be looked up.
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
    """All that comes before the room."""
    return b'"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":' % (_encode(host), _encode(port))


def splice(body: bytes, found: Peek, fields: dict[str, Any]) -> Body:
    """Add ``fields`` to a JSON object, right after its opening brace; all else stays as it is.

    A body that already carries some of them gets ours instead, its other values byte for byte: two
    equal keys would leave the choice to each worker's parser, and the halves could part.
    """
    if found.has_bootstrap:
        return msgspec.json.encode({**_decode_fields(body), **fields})
    return with_members(body, msgspec.json.encode(fields)[1:-1])
