"""The tokens of a step that tells nothing beside them."""

from __future__ import annotations

import torch

from .host_copies import Download
from .sampler import Sampled


class Chosen:
    """As ``Launched``: ``tokens`` [R] int64 live on the device, and ``wait`` brings them to the host."""

    def __init__(self, tokens: torch.Tensor):
        self.tokens = tokens
        self._download = Download([tokens])

    def token_ids(self) -> list[int]:
        """Wait for the tokens alone."""
        return self._download.wait()[0]

    def wait(self) -> Sampled:
        token_ids = self.token_ids()
        return Sampled(token_ids, [None] * len(token_ids), {})
