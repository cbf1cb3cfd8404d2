"""Keys of pages: SGLang's in the plain namespace, and never those of other namespaces, tokens or lookaheads."""

from hashlib import sha256

import numpy as np

from baton.common.api.namespace import SHARED, Namespace
from baton.common.kvcache.page_keys import namespace_key, page_keys

PAGE = 4


def keys_of(ids, lookahead=0, namespace=SHARED):
    return page_keys(namespace_key(namespace), np.array(ids, np.int32), PAGE, lookahead)


def chained(pages):
    """SGLang's definition: each page's token ids, or pairs of them, after the digest of the page before."""
    digest = b""
    for page in pages:
        hasher = sha256(digest)
        for token in page:
            for number in token if isinstance(token, tuple) else (token,):
                hasher.update(number.to_bytes(4, "little"))
        digest = hasher.digest()
        yield digest.hex()


def test_keys_of_the_plain_namespace_are_those_of_sglang():
    ids = [1, 2, 3, 4, 70000, 6, 7, 128255, 9]
    assert [key.hex() for key in keys_of(ids)] == list(chained([ids[:4], ids[4:8]]))
    assert keys_of([1, 2, 3, 4])[0].hex() == "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
    assert keys_of(ids[:3]) == [] == keys_of([])


def test_with_a_lookahead_they_are_those_of_pairs_of_tokens():
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    pairs = list(zip(ids, ids[1:]))
    assert [key.hex() for key in keys_of(ids, 1)] == list(chained([pairs[:4], pairs[4:8]]))
    assert keys_of(ids[:8], 1) == keys_of(ids, 1)[:1]  # the token after the second page is not known
    assert keys_of(ids[:4], 1) == keys_of([], 1) == keys_of([1], 3) == []


def test_keys_continue_those_of_the_pages_before():
    ids = np.arange(50, dtype=np.int32)
    whole = page_keys(b"", ids, PAGE)
    assert whole[3:] == page_keys(whole[2], ids[12:], PAGE) and len(whole) == 12


def test_namespaces_and_lookaheads_have_keys_of_their_own():
    ids = range(12)
    namespaces = [SHARED, Namespace("a"), Namespace("", "a"), Namespace("a", "a"), Namespace(weights="1"),
                  Namespace("a", weights="1")]
    keys = [key for namespace in namespaces for lookahead in (0, 1, 2) for key in keys_of(ids, lookahead, namespace)]
    assert len(set(keys)) == len(keys) == 6 * (3 + 2 + 2)
    assert all(len(key) == 32 for key in keys)
