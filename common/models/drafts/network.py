"""Draft networks: small models that read a model's hidden states, and draft the tokens after its next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from ...forward.step_context import StepContext
from ...layers.vocab import VocabTable
from ...weights.slots import Slot


class DraftStates(NamedTuple):
    """A draft layer's results ``[T, hidden]``: the head's input, and the next pass's hidden states."""

    output: torch.Tensor
    hidden: torch.Tensor


class DraftNetwork(Protocol):
    """A draft network. Row i has the hidden state of a position and the token after it; its keys and values are stored
    at the position.

    ``depth``: layers that each draft one token further ahead; the last one drafts all others, from its own results.
    """

    depth: int

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the first layer's hidden states ``[T, hidden]`` of the model's ``[T, F]``."""

    def __call__(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor, step: StepContext) -> DraftStates:
        """Computes layer ``layer`` of ``depth`` for ``hidden`` [T, hidden], which it may overwrite, and the tokens
        ``ids`` [T] int64 after them. ``step`` is one of a batch at their positions."""

    def slots(self) -> Iterator[Slot]: ...


class DraftHead(NamedTuple):
    """The head of a draft: a table of its vocabulary, and the ids [V] int64 of its tokens where they are not all the
    model's."""

    table: VocabTable
    token_ids: torch.Tensor | None = None
