"""Namespaces of the prefix cache: requests of different namespaces never share a page, whatever their tokens."""

from __future__ import annotations

from hashlib import blake2b

import msgspec


class Namespace(msgspec.Struct, frozen=True, array_like=True):
    """Everything that a page depends on, apart from tokens: prompts share pages where both are equal.

    ``salt`` and ``extra_key`` are the request's ``cache_salt`` (vLLM's and SGLang's) and ``extra_key`` (SGLang's).
    They are fields of their own: joined to one text, "a" + "bc" and "ab" + "c" would share pages.

    ``weights`` is an engine's own: how often its weights have been replaced, and the fingerprint of those of now. A
    request that was admitted before that keeps its pages, and the namespace in which others no longer find them.
    """

    salt: str = ""
    extra_key: str = ""
    weights: str = ""

    @property
    def asked(self) -> Namespace:
        """What the request has asked for, equal in all engines."""
        return msgspec.structs.replace(self, weights="") if self.weights else self

    @property
    def seed(self) -> int | None:
        """The parent of a prompt's first page in chains of page hashes (63 bits): so every page's hash depends on the
        namespace. None for ``SHARED``. The salt cannot be found from it, apart from by trying salts. Weights do not
        count: an engine tells that it has dropped all pages when they change."""
        asked = self.asked
        if asked == SHARED:
            return None
        return int.from_bytes(blake2b(asked.packed, digest_size=8, person=b"baton namespace").digest(), "little") >> 1

    @property
    def packed(self) -> bytes:
        """All fields as bytes; those of ``SHARED`` are empty."""
        if self == SHARED:
            return b""
        return _encode(self) if self.weights else _encode([self.salt, self.extra_key])


_encode = msgspec.msgpack.Encoder().encode

SHARED = Namespace()
"""The namespace of requests that name none."""
