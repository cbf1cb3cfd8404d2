"""The pages of prompts that come as token ids: exact, as the workers hash them, and hashed once.

Reading 1,024 ids and hashing their 64 pages takes 60 us, most of a decision's time. Prompts grow from turn
to turn, so most of a prompt was seen before: its text is cut into pieces whose ends depend on what lies
before them only, and what a piece came to is found again by one hash of its text.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ...common.api.kv_events import chained, token_bytes

PIECE = 1024
"""Bytes of text of a piece, at least: about 170 ids, 10 pages of 16."""
MOST_PIECES = 2**15
"""Pieces remembered, in two generations: 15 MB for 32 MB of prompts."""

_decode_ids = msgspec.json.Decoder(list[int]).decode


class _Piece(NamedTuple):
    """What a piece comes to, after all pieces before it."""

    hashes: array[int]
    """Of the pages that end in it."""
    rest: bytes
    """Tokens after the last of them, little-endian int32."""


class TokenPages:
    """Pages of texts like ``[5, 17, 4``: a JSON list of ids without its closing bracket."""

    def __init__(self, most_pieces: int = MOST_PIECES) -> None:
        self._half = max(1, most_pieces // 2)
        self._young: dict[int, _Piece] = {}
        self._old: dict[int, _Piece] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def chain(self, text: bytes, page_size: int) -> Iterator[tuple[int, int]]:
        """``(number of pages up to its end, hash)`` of each full page in turn, for those who stop early.

        Ends where the text is no list of 32-bit integers any more.
        """
        young, old = self._young, self._old
        key, number, parent, rest = page_size, 0, None, b""
        start, size = 1, len(text)
        while start < size:
            end = text.find(b",", start + PIECE)
            whole = end >= 0
            piece = text[start:end] if whole else text[start:]
            key = hash((key, piece))
            found = young.get(key) or old.get(key)
            if found is None:
                try:
                    tokens = rest + token_bytes(_decode_ids(b"[" + piece + b"]"))
                except (msgspec.DecodeError, struct.error):
                    return
                hashes = chained(tokens, 4 * page_size, parent)
                found = _Piece(array("q", hashes), tokens[4 * page_size * len(hashes):])
                if whole:  # The last one, unfinished, is another one in the next turn.
                    self._keep(key, found)
            for value in found.hashes:
                number += 1
                yield number, value
            if found.hashes:
                parent = value
            rest = found.rest
            if not whole:
                return
            start = end + 1

    def _keep(self, key: int, piece: _Piece) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = piece
