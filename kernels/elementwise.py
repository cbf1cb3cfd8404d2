"""Element-wise functions whose results do not depend on an element's place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .tuning.policy import policy_of

_VECTOR = 64
"""A multiple of the elements that torch's loops take at once, of any type and on any CPU."""


def by_element(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Applies ``function``, which maps each element of ``x``. On a CPU, torch computes the last few elements of a
    tensor by other code than those before, which gives other bits: where the policy is batch-invariant, rows are padded
    to whole vectors."""
    width = x.shape[-1]
    if not width % _VECTOR or x.is_cuda or not policy_of(x.device).batch_invariant:
        return function(x)
    return function(torch.nn.functional.pad(x, (0, -width % _VECTOR)))[..., :width]
