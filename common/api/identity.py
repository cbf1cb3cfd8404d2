"""Identity of the model that a server runs."""

from __future__ import annotations

import hashlib

import msgspec

_SENT = " with a trainer's weights"


class ModelIdentity(msgspec.Struct, frozen=True):
    """Identity of a model's weights. A KV cache is valid only with the weights that computed it: two servers may be
    paired when their ``fingerprint`` is equal.

    ``source`` names the weights for an operator; ``updates`` counts their replacements at run time.
    """

    fingerprint: str
    source: str
    updates: int = 0
    version: str | None = None
    """The name of weights that another server has sent, where they were not loaded."""

    def updated(self, digest: str, updates: int) -> ModelIdentity:
        """Returns the identity of these weights once tensors were sent over them; ``digest`` is that of all tensors
        that were. Servers that began with equal weights and were sent equal tensors have equal fingerprints."""
        fingerprint = hashlib.sha256(f"{self.fingerprint}+{digest}".encode()).hexdigest()[:16]
        source = self.source if self.source.endswith(_SENT) else self.source + _SENT
        return ModelIdentity(fingerprint, source, updates)

    def __str__(self) -> str:
        return f"{self.source} (fingerprint {self.fingerprint})"
