"""What the choice of one row's next token depends on, beside its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..api.sampling import SamplingParams
from .logit_bias import LogitBias
from .logit_processors import RowProcessor
from .token_history import TokenHistory

if TYPE_CHECKING:
    import torch

FAILED = -1
"""In the place of a token: the row's processor has failed. It reaches all ranks as tokens do."""

FillAllowed = Callable[["torch.Tensor", int], None]
"""``fill(bitmask, row)`` writes which tokens may follow into ``bitmask[row]``: bit t % 32 of word t // 32 is token t's.

``bitmask`` is an int32 tensor ``[rows, ceil(vocab / 32)]`` in host memory, all bits set: XGrammar's layout.
"""


class RequestedLogprobs(NamedTuple):
    """What to tell beside the log-probability of a token: the likeliest ``num_top``, and those of ``token_ids``."""

    num_top: int = 0
    token_ids: tuple[int, ...] = ()


class SamplingMetadata(msgspec.Struct, frozen=True, gc=False):
    """One row's choice. ``Sampler.launch`` takes one of these a row, and applies their parts in this order.

    1. ``allowed`` masks the row before anything else sees it: tokens whose bit it clears get a logit of -inf, for
       log-probabilities too. It is called once, on the host, after the forward pass has been launched (with overlapped
       scheduling the device then computes these logits), and on tensor-parallel rank 0 only, which chooses for all.
    2. ``history``: what the penalties of ``params`` look at; None where there are none. ``pending`` is the index of
       the request's newest token among those that the step before chose, where only the device knows it: it counts.
    3. ``bias`` is added; ``suppressed`` tokens get -inf (a request below ``min_new_tokens`` names its stop tokens).
    4. ``processor``, which the request names, is given the row; what it makes counts for log-probabilities, too. On
       rank 0 only, like ``allowed``. Where it fails, the row's token is told as ``FAILED``.
    5. Temperature, truncation and noise of ``params``. ``position`` counts the tokens before the chosen one: the noise
       of a seeded row depends on it.

    ``logprobs`` is None where none are wanted.
    """

    params: SamplingParams
    position: int
    logprobs: RequestedLogprobs | None = None
    suppressed: tuple[int, ...] = ()
    allowed: FillAllowed | None = None
    history: TokenHistory | None = None
    pending: int | None = None
    bias: LogitBias | None = None
    processor: RowProcessor | None = None
