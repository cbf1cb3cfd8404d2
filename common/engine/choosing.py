"""What the choice of one row's next token depends on, beside its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..api.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

FillAllowed = Callable[["torch.Tensor", int], None]
"""``fill(bitmask, row)`` writes which tokens may follow into ``bitmask[row]``: bit t % 32 of word t // 32 is token t's.

``bitmask`` is an int32 tensor ``[rows, ceil(vocab / 32)]`` in host memory, all bits set: XGrammar's layout.
"""


class Choosing(NamedTuple):
    """One row's choice. ``Sampler.launch`` takes one of these a row, and applies their parts in this order.

    ``allowed`` masks the row before anything else sees it: tokens whose bit it clears get a logit of -inf, for
    log-probabilities too. It is called once, on the host, after the forward pass has been launched (with overlapped
    scheduling the device then computes these logits), and on tensor-parallel rank 0 only, which chooses for all.

    ``suppressed`` tokens get -inf as well (a request below ``min_new_tokens`` names its stop tokens there).
    ``position`` counts the tokens before the chosen one: the noise of a seeded row depends on it. ``num_top`` is the
    number of likeliest tokens to report beside the chosen one's log-probability, None where none is wanted.
    """

    params: SamplingParams
    position: int
    num_top: int | None = None
    suppressed: tuple[int, ...] = ()
    allowed: FillAllowed | None = None
