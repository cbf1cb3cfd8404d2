"""The pages of prompts that come as token ids: exact, as the workers hash them, and hashed once.

Reading 1,024 ids and hashing their 64 pages takes 60 us, most of a decision's time. Conversations grow, so most of
a prompt was seen before: its text is split into segments whose ends depend on the text before them only, and the pages
of a segment are looked up by one hash of its text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from ...common.api.kv_events import chained, token_bytes
from ...common.api.unreadable import UNREADABLE

MIN_SEGMENT_BYTES = 512
"""About 80 ids, 5 pages of 16."""
MIN_FIRST_SEGMENT_BYTES = 192
"""Two pages. Of a prompt that no worker has, no more is read."""
MAX_NEW_SEGMENTS = 4
"""Segments that one decision reads and hashes, 5 us each; the next one that sees them continues from there."""
MAX_SEGMENTS = 2**16
"""Segments remembered, in two generations: 10 MB for 32 MB of prompts."""

_COUNT = struct.Struct("<I")
_decode_ids = msgspec.json.Decoder(list[int]).decode


class TokenSegments(NamedTuple):
    """A text like ``[5, 17, 4``: a JSON list of ids without its closing bracket, split at some of its commas."""

    text: bytes
    ends: list[int]
    """Offsets at which segments end, but for the last one."""
    keys: list[int]
    """Hashes of the text up to each end, and of all of it, in its namespace."""
    seed: int | None = None
    """The seed of its namespace: the parent of its first page."""

    @property
    def num_tokens(self) -> int:
        return self.text.count(b",") + 1


def split(text: bytes, seed: int | None = None) -> TokenSegments:
    ends, keys = [], []
    key, start, min_size = seed or 0, 1, MIN_FIRST_SEGMENT_BYTES
    while (end := text.find(b",", start + min_size)) >= 0:
        min_size = MIN_SEGMENT_BYTES
        key = hash((key, text[start:end]))
        ends.append(end)
        keys.append(key)
        start = end + 1
    keys.append(hash((key, text[start:], 1)))
    return TokenSegments(text, ends, keys, seed)


class TokenPages:
    """The pages of prompts that were split into segments.

    A segment, by the hash of the text up to its end, is stored as one bytes object (the garbage collector would walk
    thousands of tuples): the hashes of the pages that end in it, and the tokens after the last of them.
    """

    def __init__(self, max_segments: int = MAX_SEGMENTS) -> None:
        self._generation_size = max(1, max_segments // 2)
        self._young: dict[int, bytes] = {}
        self._old: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def runs(self, segments: TokenSegments, page_size: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yields ``(number of pages up to its end, hashes)`` of each run of full pages; callers may stop early.

        Where more than MAX_NEW_SEGMENTS are new, the last element is ``(all pages, [the last hash])``: a worker that
        has the prompt that far is assumed to have all of it. Ends where the text is no list of 32-bit integers any
        more.
        """
        young, old = self._young, self._old
        start, number, new, rest = 1, 0, 0, b""
        parent = segments.seed
        hashes: Sequence[int]
        for end, key in zip((*segments.ends, len(segments.text)), segments.keys):
            segment = young.get(key ^ page_size) or old.get(key ^ page_size)
            if segment is None:
                if new == MAX_NEW_SEGMENTS:
                    if parent is not None and parent != segments.seed:
                        yield segments.num_tokens // page_size, [parent]
                    return
                new += 1
                try:
                    tokens = rest + token_bytes(_decode_ids(b"[" + segments.text[start:end] + b"]"))
                except (*UNREADABLE, struct.error):
                    return
                hashes = chained(tokens, 4 * page_size, parent)
                count = len(hashes)
                segment = struct.pack(f"<I{count}q", count, *hashes) + tokens[4 * page_size * count:]
                if end < len(segments.text):  # The last one, unfinished, differs when the prompt has grown.
                    self._put(key ^ page_size, segment)
            else:
                (count,) = _COUNT.unpack_from(segment)
                hashes = struct.unpack_from(f"<{count}q", segment, _COUNT.size)
            if count:
                number += count
                yield number, hashes
                parent = hashes[-1]
            rest = segment[_COUNT.size + 8 * count:]
            start = end + 1

    def _put(self, key: int, segment: bytes) -> None:
        if len(self._young) >= self._generation_size:
            self._old, self._young = self._young, {}
        self._young[key] = segment
