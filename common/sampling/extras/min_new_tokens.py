"""Suppressed tokens: a request below ``min_new_tokens`` does not end. A grammar's mask does this itself."""

from __future__ import annotations

import torch

from ...forward.host_copies import upload
from ...request.extras import EXTRAS, Extra, Members, RowState
from ...request.req import Req


def _suppressed(req: Req, state: RowState) -> tuple[int, ...] | None:
    below = state.position - req.num_prompt_tokens < req.sampling.min_new_tokens
    return tuple(req.stop_ids) if below and req.stop_ids else None


def suppress(logits: torch.Tensor, members: Members, previous: torch.Tensor | None = None) -> dict[int, str]:
    """Sets the logits of each member's tokens to -inf, in place."""
    pairs = [(row, token) for row, tokens in members for token in tokens]
    index, tokens = upload(pairs, torch.int64, logits.device).unbind(-1)
    logits[index, tokens] = float("-inf")
    return {}


SUPPRESSED = EXTRAS.register("min_new_tokens")(Extra(
    frozenset(("min_new_tokens",)), lambda req: req.sampling.min_new_tokens > 0 and req.sampling.grammar is None, 40,
    _suppressed, suppress))
