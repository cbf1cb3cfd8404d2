"""Page keys: the names of pages by content, under which tiers keep copies of them.

A key is chained over the page's namespace and all tokens up to its end, as the hashes of KV events are, and has 128
bits instead of 63: two pages of one key would give a wrong answer here, and there a badly routed request.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from ..api.namespace import Namespace

PageKey = bytes


def namespace_key(namespace: Namespace) -> PageKey:
    """The key before a prompt's first page."""
    return blake2b(namespace.packed, digest_size=16, person=b"baton namespace").digest()


def page_keys(before: PageKey, tokens: np.ndarray, page_size: int, lookahead: int = 0) -> list[PageKey]:
    """The keys of the full pages of ``tokens`` (int32), which follow the page of key ``before``; about 1 us a page.
    With a ``lookahead`` (prefix_cache.py) as many tokens after a page are in its key."""
    data, size = tokens.astype("<i4", copy=False).tobytes(), 4 * page_size
    covered = size + 4 * lookahead
    keys = []
    for start in range(0, len(data) - covered + 1, size):
        before = blake2b(before + data[start:start + covered], digest_size=16).digest()
        keys.append(before)
    return keys
