"""How attention makes scores of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scores:
    """``softcap * tanh(q k^T * scale / softcap)``; without a ``softcap`` (0) just ``q k^T * scale``. A ``scale`` of
    None is one over the root of a head's values."""

    scale: float | None = None
    softcap: float = 0.0

    def scale_of(self, head_dim: int) -> float:
        """Returns the scale for heads of ``head_dim`` values."""
        return head_dim ** -0.5 if self.scale is None else self.scale


PLAIN_SCORES = Scores()
