"""Heads of messages that were met before: most are the same again and again, but for their Content-Length.

What a head means is a function of its bytes, so it needs to be read once. It is read by llhttp, with the
rules of any other message, and looked up from then on: a known head costs 0.5 us instead of a callback a header,
and cannot mean anything that llhttp would not take it for. The value of Content-Length is left out of
the bytes that are compared; it is one header line of nothing but digits, else the head is not looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_MOST = 1024
_LONGEST = 8192
_MET_ONCE = 8192

Fact = TypeVar("Fact")


class KnownHeads(Generic[Fact]):
    """Facts of heads by their bytes. A head is learnt when it is met again: one that comes once is not worth it.

    ``read``, to be set by whoever owns the heads, is given a head that announces a body of one byte. It returns
    None for a head whose message is anything but plain: framed by that length alone, and followed by others.
    """

    __slots__ = ("read", "_known", "_met", "_spelling", "_other")

    def __init__(self, read: Callable[[bytes], Fact | None] = lambda head: None):
        self.read = read
        self._known: dict[bytes, Fact | None] = {}
        self._met: set[int] = set()
        self._spelling, self._other = b"\r\nContent-Length: ", b"\r\ncontent-length: "

    def find(self, data: bytes) -> tuple[Fact, int, int] | None:
        """``(fact, size of the head, Content-Length)`` of the message that starts with ``data``, if it is known."""
        size = data.find(b"\r\n\r\n") + 4
        start = data.find(self._spelling, 0, size) + 18
        if start < 18:
            start = data.find(self._other, 0, size) + 18
            if start < 18:
                return None
            self._spelling, self._other = self._other, self._spelling
        stop = data.find(b"\r", start)
        digits = data[start:stop]
        if not digits.isdigit() or stop - start > 15:
            return None
        key = data[:start] + data[stop:size]
        fact = self._known.get(key)
        if fact is None:
            fact = self._meet(key, start)
            if fact is None:
                return None
        return fact, size, int(digits)

    def _meet(self, key: bytes, start: int) -> Fact | None:
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
        fact = self._known[key] = self.read(head) if strict else None
        return fact
