"""Sampling metadata: the inputs of sampling one row's next token, apart from its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..api.sampling import SamplingParams
from .extras import RowExtra

if TYPE_CHECKING:
    import torch

FAILED = -1
NOT_FINITE = -2
"""The token id of a row whose logit processor has failed. It reaches all ranks as tokens do."""

FillAllowed = Callable[["torch.Tensor", int], None]
"""``fill(bitmask, row)`` writes the allowed tokens into ``bitmask[row]``: bit t % 32 of word t // 32 is token t's.

``bitmask`` is an int32 tensor ``[rows, ceil(vocab / 32)]`` in host memory, all bits set: XGrammar's layout.
"""


def nothing_allowed(bitmask: torch.Tensor, row: int) -> None:
    """Marks, in place of a FillAllowed, a row that nothing can follow, after drafts that are not accepted: it fails."""
    bitmask[row] = 0


class RequestedLogprobs(NamedTuple):
    """Log-probabilities to report besides that of the sampled token: the top ``num_top``, and those of
    ``token_ids``."""

    num_top: int = 0
    token_ids: tuple[int, ...] = ()


class SamplingMetadata(msgspec.Struct, frozen=True, gc=False):
    """Sampling metadata of one row.

    Its ``extras`` change the row's logits or report them, in their order: masks of a grammar before all else, penalties
    and bias, suppressed tokens, processors. Then come temperature, truncation and Gumbel noise of ``params``.
    ``position`` counts the tokens before the sampled one: the noise of a seeded row depends on it. ``drafts``: tokens
    that may be taken in place of the sample, where drafts are accepted loosely.
    """

    params: SamplingParams
    position: int
    extras: tuple[RowExtra, ...] = ()
    drafts: tuple[int, ...] = ()
