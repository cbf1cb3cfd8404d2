"""Identity of the model that a server runs."""

from __future__ import annotations

import msgspec


class ModelIdentity(msgspec.Struct, frozen=True):
    """Identity of a model's weights. A KV cache is valid only with the weights that computed it: two servers may be
    paired when their ``fingerprint`` is equal.

    ``source`` names the weights for an operator; ``updates`` counts their replacements at run time.
    """

    fingerprint: str
    source: str
    updates: int = 0

    def __str__(self) -> str:
        return f"{self.source} (fingerprint {self.fingerprint})"
