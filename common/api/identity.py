"""Which model a server computes with."""

from __future__ import annotations

import msgspec


class ModelIdentity(msgspec.Struct, frozen=True):
    """A KV cache is of use only to a server whose weights are those that it was computed with: two servers may be
    paired when their ``fingerprint`` is equal.

    ``source`` is what an operator knows the weights by, ``updates`` how often they were replaced at run time.
    """

    fingerprint: str
    source: str
    updates: int = 0

    def __str__(self) -> str:
        return f"{self.source} (fingerprint {self.fingerprint})"
