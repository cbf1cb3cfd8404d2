"""Heads of messages that were met before: most are the same again and again, but for their Content-Length.

What a head means is a function of its bytes, so it needs to be read once. It is read by llhttp, with the
rules of any other message, and looked up from then on: a known head costs 0.5 us instead of a callback a header,
and cannot mean anything that llhttp would not take it for. The value of Content-Length is left out of
the bytes that are compared; it is one header line of nothing but digits, else the head is not looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

_MOST = 1024
_LONGEST = 8192
_MET_ONCE = 8192

Fact = TypeVar("Fact")


class KnownHead(msgspec.Struct, Generic[Fact], frozen=True, eq=False):
    """A head as its bytes before and after the digits of its Content-Length, and what it says."""

    before: bytes
    after: bytes
    start: int
    """Where the digits begin."""
    fact: Fact


class KnownHeads(Generic[Fact]):
    """Facts of heads by their bytes. A head is learnt when it is met again: one that comes once is not worth it.

    ``read`` is given a head that announces a body of one byte. It returns None for a head whose message is anything
    but plain: framed by that length alone, and followed by others.
    """

    __slots__ = ("_read", "_known", "_met", "_spelling", "_other")

    def __init__(self, read: Callable[[bytes], Fact | None]):
        self._read = read
        self._known: dict[bytes, KnownHead[Fact] | None] = {}
        self._met: set[int] = set()
        self._spelling, self._other = b"\r\nContent-Length: ", b"\r\ncontent-length: "

    def __len__(self) -> int:
        return len(self._known)

    def find(self, data: bytes, last: KnownHead[Fact] | None) -> tuple[KnownHead[Fact], int, int] | None:
        """``(head, its size, Content-Length)`` of the message that starts with ``data``, if its head is known.

        ``last``: the head that this connection's last message had, probably the same again.
        """
        if last is not None and data.startswith(last.before):
            start = last.start
            stop = data.find(b"\r", start)
            if not data.startswith(last.after, stop):
                last = None
        else:
            last = None
        if last is None:
            place = self._place(data)
            if place is None:
                return None
            start, stop, last = place
        digits = data[start:stop]
        if not digits.isdigit() or stop - start > 15:
            return None
        return last, stop + len(last.after), int(digits)

    def _place(self, data: bytes) -> tuple[int, int, KnownHead[Fact]] | None:
        """Where the length stands in a known head."""
        size = data.find(b"\r\n\r\n") + 4
        start = data.find(self._spelling, 0, size) + 18
        if start < 18:
            start = data.find(self._other, 0, size) + 18
            if start < 18:
                return None
            self._spelling, self._other = self._other, self._spelling
        stop = data.find(b"\r", start)
        key = data[:start] + data[stop:size]
        known = self._known.get(key) or self._meet(key, start)
        return None if known is None else (start, stop, known)

    def _meet(self, key: bytes, start: int) -> KnownHead[Fact] | None:
        """An unknown head, without its length at ``start``: read it, if it was met before."""
        if key in self._known or len(key) > _LONGEST:
            return None
        mark = hash(key)
        if mark not in self._met:
            if len(self._met) >= _MET_ONCE:
                self._met.clear()
            self._met.add(mark)
            return None
        if len(self._known) >= _MOST:
            self._known.clear()
        head = key[:start] + b"1" + key[start:]
        # llhttp may take a line's end for another one's; a head in which they differ is not looked up.
        strict = head.count(b"\r") == head.count(b"\n") == head.count(b"\r\n")
        fact = self._read(head) if strict else None
        known = None if fact is None else KnownHead(key[:start], key[start:], start, fact)
        self._known[key] = known
        return known
