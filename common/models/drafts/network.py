"""Draft networks: small models that read a model's hidden states, and draft the tokens after its next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from ....kernels.arguments import NormWeight
from ....kernels.rowwise.gather_rows import gather_rows
from ....kernels.rowwise.joined_norms import joined_norms
from ...forward.step_context import StepContext
from ...layers.norm import RMSNorm
from ...layers.vocab import VocabTable
from ...weights.slots import Slot
from ..decoder.blocks import Norm


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

    def __call__(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor, step: StepContext,
                 trimmed: bool = False) -> DraftStates:
        """Computes layer ``layer`` of ``depth`` for ``hidden`` [T, hidden], which it may overwrite, and the tokens
        ``ids`` [T] int64 after them. ``step`` is one of a batch at their positions. With ``trimmed`` it stores all keys
        and values, and computes the rows of the batch's ``last_tokens`` only, which may be none."""

    def slots(self) -> Iterator[Slot]: ...


def last_rows(x: torch.Tensor, step: StepContext) -> torch.Tensor:
    """Returns the rows of ``x`` [T, hidden], contiguous, that are the step's ``last_tokens``."""
    assert step.batch.logits_rows is not None
    return gather_rows(x, step.batch.logits_rows)


def joined_input(embed: VocabTable, ids: torch.Tensor, hidden: torch.Tensor, token_norm: Norm | None = None,
                 hidden_norm: Norm | None = None) -> torch.Tensor:
    """Returns ``[T, 2 * hidden]``: the embeddings of ``ids`` [T] and the states ``hidden`` [T, hidden], side by side,
    after their norms where given."""
    norms = token_norm, hidden_norm
    if not all(norm is None or isinstance(norm, RMSNorm) for norm in norms):
        parts = embed.embed(ids), hidden
        return torch.cat([x if norm is None else norm(x) for x, norm in zip(parts, norms)], dim=-1)
    first, second = (NormWeight(norm.weight, norm.eps) if isinstance(norm, RMSNorm) else None for norm in norms)
    if embed.tp.size > 1:
        return joined_norms(embed.embed(ids), hidden, first, second)
    return joined_norms(embed.weight, hidden, first, second, ids)


class DraftHead(NamedTuple):
    """The head of a draft: a table of its vocabulary, and the ids [V] int64 of its tokens where they are not all the
    model's."""

    table: VocabTable
    token_ids: torch.Tensor | None = None
