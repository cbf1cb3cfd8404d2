"""A cache of parsed message heads: most heads are the same again and again, except for their Content-Length.

The meaning of a head is a function of its bytes, so it needs to be parsed once. llhttp parses it, with the
rules of any other message, and from then on it is looked up: a known head costs 0.5 us instead of a callback a header,
and cannot mean anything else than llhttp says. The value of Content-Length is left out of the bytes that are
compared; it must be one header line of nothing but digits, else the head is not looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

_MAX_KNOWN = 1024
_MAX_HEAD_BYTES = 8192
_MAX_SEEN_ONCE = 8192

Fact = TypeVar("Fact")


class KnownHead(msgspec.Struct, Generic[Fact], frozen=True, eq=False):
    """A head as its bytes before and after the digits of its Content-Length, and its meaning."""

    before: bytes
    after: bytes
    start: int
    """The offset of the digits."""
    fact: Fact


class KnownHeads(Generic[Fact]):
    """Facts of heads by their bytes. A head is stored when it is seen again: one that comes once is not worth it.

    ``read`` is given a head that announces a body of one byte. It returns None unless the head's message is plain:
    framed by that length alone, and followed by others.
    """

    __slots__ = ("_read", "_known", "_seen_once", "_spelling", "_other")

    def __init__(self, read: Callable[[bytes], Fact | None]):
        self._read = read
        self._known: dict[bytes, KnownHead[Fact] | None] = {}
        self._seen_once: set[int] = set()
        self._spelling, self._other = b"\r\nContent-Length: ", b"\r\ncontent-length: "

    def __len__(self) -> int:
        return len(self._known)

    def find(self, data: bytes, last: KnownHead[Fact] | None) -> tuple[KnownHead[Fact], int, int] | None:
        """``(head, its size, Content-Length)`` of the message that starts with ``data``, if its head is known.

        ``last``: the head of this connection's last message, which is probably the same again.
        """
        if last is not None and data.startswith(last.before):
            start = last.start
            stop = data.find(b"\r", start)
            if not data.startswith(last.after, stop):
                last = None
        else:
            last = None
        if last is None:
            found = self._look_up(data)
            if found is None:
                return None
            start, stop, last = found
        digits = data[start:stop]
        if not digits.isdigit() or stop - start > 15:
            return None
        return last, stop + len(last.after), int(digits)

    def _look_up(self, data: bytes) -> tuple[int, int, KnownHead[Fact]] | None:
        """``(start, stop, head)`` of the digits of Content-Length in a known head."""
        size = data.find(b"\r\n\r\n") + 4
        start = data.find(self._spelling, 0, size) + 18
        if start < 18:
            start = data.find(self._other, 0, size) + 18
            if start < 18:
                return None
            self._spelling, self._other = self._other, self._spelling
        stop = data.find(b"\r", start)
        key = data[:start] + data[stop:size]
        known = self._known.get(key) or self._learn(key, start)
        return None if known is None else (start, stop, known)

    def _learn(self, key: bytes, start: int) -> KnownHead[Fact] | None:
        """Parse and store an unknown head, without its length at ``start``, if it was seen before."""
        if key in self._known or len(key) > _MAX_HEAD_BYTES:
            return None
        mark = hash(key)
        if mark not in self._seen_once:
            if len(self._seen_once) >= _MAX_SEEN_ONCE:
                self._seen_once.clear()
            self._seen_once.add(mark)
            return None
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        head = key[:start] + b"1" + key[start:]
        # llhttp also accepts other line ends than CRLF; a head that has any is not looked up.
        strict = head.count(b"\r") == head.count(b"\n") == head.count(b"\r\n")
        fact = self._read(head) if strict else None
        known = None if fact is None else KnownHead(key[:start], key[start:], start, fact)
        self._known[key] = known
        return known
