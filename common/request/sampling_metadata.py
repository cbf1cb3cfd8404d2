"""Sampling metadata: the inputs of sampling one row's next token, apart from its logits."""

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
"""The token id of a row whose logit processor has failed. It reaches all ranks as tokens do."""

FillAllowed = Callable[["torch.Tensor", int], None]
"""``fill(bitmask, row)`` writes the allowed tokens into ``bitmask[row]``: bit t % 32 of word t // 32 is token t's.

``bitmask`` is an int32 tensor ``[rows, ceil(vocab / 32)]`` in host memory, all bits set: XGrammar's layout.
"""


class RequestedLogprobs(NamedTuple):
    """Log-probabilities to report besides that of the sampled token: the top ``num_top``, and those of
    ``token_ids``."""

    num_top: int = 0
    token_ids: tuple[int, ...] = ()


class SamplingMetadata(msgspec.Struct, frozen=True, gc=False):
    """Sampling metadata of one row. ``Sampler.launch`` takes one of these a row, and applies the fields in this order.

    1. ``allowed`` masks the row before all else: tokens whose bit it clears get a logit of -inf, for
       log-probabilities too. It is called once, on the host, after the forward pass has been launched (with overlapped
       scheduling the device then computes these logits), and on tensor-parallel rank 0 only, which samples for all.
    2. ``history``: the token counts that the penalties of ``params`` use; None where there are none. ``pending`` is the
       index of the request's newest token among those that the previous step sampled, where only the device knows it:
       it is counted.
    3. ``bias`` is added; ``suppressed`` tokens get -inf (a request below ``min_new_tokens`` lists its stop tokens).
    4. ``processor``, which the request names, transforms the row; its output counts for log-probabilities, too. On
       rank 0 only, like ``allowed``. Where it fails, the row's token is reported as ``FAILED``.
    5. Temperature, truncation and Gumbel noise of ``params``. ``position`` counts the tokens before the sampled one:
       the noise of a seeded row depends on it.

    ``logprobs`` is None where the request asks for none.
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
