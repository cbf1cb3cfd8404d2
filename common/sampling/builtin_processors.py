"""Logit processors that come with Baton; what processors are: see processors.py.

Name them in a request as ``baton.common.sampling.builtin_processors:DisallowedTokens``.
"""

from __future__ import annotations

from typing import Any

import torch

from ..api.token_ids import check_ids


class DisallowedTokens:
    """Tokens in ``custom_params.token_ids`` are never chosen."""

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        for row, given in enumerate(params):
            check_ids(given["token_ids"], logits.shape[1], "token_ids")  # on a GPU no index is checked
            logits[row, given["token_ids"]] = float("-inf")
        return logits


class ThinkingBudget:
    """Ends a reasoning block after ``thinking_budget`` tokens.

    ``custom_params`` also name the tokens of the model's format: ``start_token_id`` (the block begins behind its last
    appearance; without it, with the output) and ``end_token_id``, which is chosen when the budget is spent. With
    ``new_line_token_id``, that token is put before it.
    """

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        for row, given in enumerate(params):
            forced = _forced(given)
            if forced is not None:
                check_ids([forced], logits.shape[1], "custom_params")
                logits[row] = float("-inf")
                logits[row, forced] = 0.0
        return logits


def _forced(given: dict[str, Any]) -> int | None:
    """The token that has to come now; None where any may."""
    end: int = given["end_token_id"]
    new_line: int | None = given.get("new_line_token_id")
    budget: int = given["thinking_budget"]
    thought = given["__req__"].output_ids
    start = given.get("start_token_id")
    if start is not None:
        ids = given["__req__"].origin_input_ids + thought
        if start not in ids:
            return None
        thought = ids[len(ids) - ids[::-1].index(start):]
    if end in thought or len(thought) < budget:
        return None
    if new_line is not None and (not thought or thought[-1] != new_line):
        return new_line
    return end
