"""The pages of prompts that come as token ids: exact, as the workers hash them, and hashed once.

Reading 1,024 ids and hashing their 64 pages takes 60 us, most of a decision's time. Prompts grow from turn
to turn, so most of a prompt was seen before: its text is cut into pieces whose ends depend on what lies
before them only, and what a piece came to is found again by one hash of its text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from ...common.api.kv_events import chained, token_bytes
from ...common.api.unreadable import UNREADABLE

PIECE = 512
"""Bytes of text of a piece, at least: about 80 ids, 5 pages of 16."""
FIRST_PIECE = 192
"""Of the first one: two pages. Of a prompt that nobody has, no more is read."""
MOST_NEW = 4
"""Pieces that one decision reads and hashes, 5 us each; the next one that sees them goes on from there."""
MOST_PIECES = 2**16
"""Pieces remembered, in two generations: 10 MB for 32 MB of prompts."""

_COUNT = struct.Struct("<I")
_decode_ids = msgspec.json.Decoder(list[int]).decode


class Pieces(NamedTuple):
    """A text like ``[5, 17, 4``: a JSON list of ids without its closing bracket, cut at some of its commas."""

    text: bytes
    ends: list[int]
    """Where pieces end, but for the last one."""
    keys: list[int]
    """Hashes of the text up to each end, and of all of it."""

    @property
    def num_tokens(self) -> int:
        return self.text.count(b",") + 1


def cut(text: bytes) -> Pieces:
    ends, keys = [], []
    key, start, least = 0, 1, FIRST_PIECE
    while (end := text.find(b",", start + least)) >= 0:
        least = PIECE
        key = hash((key, text[start:end]))
        ends.append(end)
        keys.append(key)
        start = end + 1
    keys.append(hash((key, text[start:], 1)))
    return Pieces(text, ends, keys)


class TokenPages:
    """The pages of prompts that were cut into pieces.

    A piece is remembered, after all pieces before it, as one bytes object (the garbage collector would walk
    thousands of tuples): the hashes of the pages that end in it, and the tokens after the last of them.
    """

    def __init__(self, most_pieces: int = MOST_PIECES) -> None:
        self._half = max(1, most_pieces // 2)
        self._young: dict[int, bytes] = {}
        self._old: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def runs(self, cut: Pieces, page_size: int) -> Iterator[tuple[int, Sequence[int]]]:
        """``(number of pages up to its end, hashes)`` of each run of full pages in turn, for those who stop early.

        Where more than MOST_NEW pieces are new, the last element is ``(all pages, [the last hash])``: whoever holds
        the prompt that far is taken to hold all of it. Ends where the text is no list of 32-bit integers any more.
        """
        young, old = self._young, self._old
        start, number, new, rest = 1, 0, 0, b""
        parent: int | None = None
        hashes: Sequence[int]
        for end, key in zip((*cut.ends, len(cut.text)), cut.keys):
            found = young.get(key ^ page_size) or old.get(key ^ page_size)
            if found is None:
                if new == MOST_NEW:
                    if parent is not None:
                        yield cut.num_tokens // page_size, [parent]
                    return
                new += 1
                try:
                    tokens = rest + token_bytes(_decode_ids(b"[" + cut.text[start:end] + b"]"))
                except (*UNREADABLE, struct.error):
                    return
                hashes = chained(tokens, 4 * page_size, parent)
                count = len(hashes)
                found = struct.pack(f"<I{count}q", count, *hashes) + tokens[4 * page_size * count:]
                if end < len(cut.text):  # The last one, unfinished, is another one in the next turn.
                    self._keep(key ^ page_size, found)
            else:
                (count,) = _COUNT.unpack_from(found)
                hashes = struct.unpack_from(f"<{count}q", found, _COUNT.size)
            if count:
                number += count
                yield number, hashes
                parent = hashes[-1]
            rest = found[_COUNT.size + 8 * count:]
            start = end + 1

    def _keep(self, key: int, piece: bytes) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = piece
