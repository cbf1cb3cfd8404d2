"""Page keys: the names of pages by content, under which tiers keep copies of them.

A key is the SHA-256 of the key before it and the page's token ids, 4 bytes each in little-endian order: in the plain
namespace they are those of SGLang's hierarchical cache (``get_hash_str`` of its hicache_storage.py). KV events have
hashes of 63 bits: two pages of one hash route a request badly there, two of one key would give a wrong answer here.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from ..api.namespace import SHARED, Namespace

PageKey = bytes


def namespace_key(namespace: Namespace) -> PageKey:
    """The key before a prompt's first page; empty in the namespace of requests that name none."""
    return b"" if namespace == SHARED else sha256(b"baton namespace\0" + namespace.packed).digest()


def page_keys(before: PageKey, tokens: np.ndarray, page_size: int, lookahead: int = 0) -> list[PageKey]:
    """The keys of the full pages of ``tokens`` (int32), which follow the page of key ``before``; about 1 us a page.
    With a ``lookahead`` (prefix_cache.py) every token stands with as many tokens after it, as SGLang's pairs of tokens
    do for EAGLE."""
    covered = lookahead + 1
    windows = tokens if covered == 1 or len(tokens) < covered else np.lib.stride_tricks.sliding_window_view(
        tokens, covered)
    data, size = windows.astype("<i4", copy=False).tobytes(), 4 * covered * page_size
    keys = []
    for start in range(0, (len(tokens) - lookahead) // page_size * size, size):
        before = sha256(before + data[start:start + size]).digest()
        keys.append(before)
    return keys
