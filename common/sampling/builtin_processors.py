"""Logit processors that come with Baton; ``request.logit_processors`` documents the interface.

Name them in a request as ``baton.common.sampling.builtin_processors:DisallowedTokens``.
"""

from __future__ import annotations

from typing import Any

import torch

from ..api.token_ids import check_ids


class DisallowedTokens:
    """Never samples the tokens in ``custom_params.token_ids``."""

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        for row, custom_params in enumerate(params):
            check_ids(custom_params["token_ids"], logits.shape[1], "token_ids")  # on a GPU no index is checked
            logits[row, custom_params["token_ids"]] = float("-inf")
        return logits


class ThinkingBudget:
    """Ends a reasoning block after ``thinking_budget`` tokens.

    ``custom_params`` also name the tokens of the model's format: ``start_token_id`` (the block begins after its last
    occurrence; without it, with the output) and ``end_token_id``, which is forced when the budget is spent. With
    ``new_line_token_id``, that token is inserted before it.
    """

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        for row, custom_params in enumerate(params):
            forced = _forced_token(custom_params)
            if forced is not None:
                check_ids([forced], logits.shape[1], "custom_params")
                logits[row] = float("-inf")
                logits[row, forced] = 0.0
        return logits


def _forced_token(params: dict[str, Any]) -> int | None:
    """Returns the token that must come next; None where any may."""
    end: int = params["end_token_id"]
    new_line: int | None = params.get("new_line_token_id")
    budget: int = params["thinking_budget"]
    reasoning = params["__req__"].output_ids
    start = params.get("start_token_id")
    if start is not None:
        ids = params["__req__"].origin_input_ids + reasoning
        if start not in ids:
            return None
        reasoning = ids[len(ids) - ids[::-1].index(start):]
    if end in reasoning or len(reasoning) < budget:
        return None
    if new_line is not None and (not reasoning or reasoning[-1] != new_line):
        return new_line
    return end
