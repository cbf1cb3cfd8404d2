"""SGLang's logit processors under its class names, for what its clients serialize; ``request.logit_processors``
documents the interface.

``CustomLogitProcessor`` is the base of users' own: ``MyProcessor.to_str()`` is the value of a request's
``custom_logit_processor``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from ..api.token_ids import check_ids
from ..request.serialized_processors import serialize, unpickle
from .builtin_processors import DisallowedTokens, ThinkingBudget

Params = list[dict[str, Any]]


class CustomLogitProcessor(ABC):
    """A processor whose class travels in requests."""

    @abstractmethod
    def __call__(self, logits: torch.Tensor, custom_param_list: Params) -> torch.Tensor:
        """Returns logits [n, vocab] in place of ``logits``; ``custom_param_list`` has a dict for each row."""

    @classmethod
    def to_str(cls) -> str:
        """The class in serialized form; needs dill."""
        return serialize(cls)

    @classmethod
    def from_str(cls, json_str: str) -> Any:
        """An instance of a serialized class."""
        return unpickle(json_str)()


class DisallowedTokensLogitsProcessor(DisallowedTokens, CustomLogitProcessor):
    """Never samples the tokens in ``token_ids``."""


class ThinkingBudgetLogitProcessor(CustomLogitProcessor):
    """Ends a reasoning block after ``thinking_budget`` tokens; rows without this parameter stay as they are.

    Subclasses name the tokens of their model.
    """

    THINKING_START_TOKEN_ID: int
    THINKING_END_TOKEN_ID: int
    NEW_LINE_TOKEN_ID: int

    def __call__(self, logits: torch.Tensor, custom_param_list: Params) -> torch.Tensor:
        tokens = {"start_token_id": self.THINKING_START_TOKEN_ID, "end_token_id": self.THINKING_END_TOKEN_ID,
                  "new_line_token_id": self.NEW_LINE_TOKEN_ID}
        for row, params in enumerate(custom_param_list):
            budget = params.get("thinking_budget")
            if isinstance(budget, int) and budget >= 0:
                ThinkingBudget()(logits[row:row + 1], [{**params, **tokens}])
        return logits


class Glm4MoeThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID = 151350
    THINKING_END_TOKEN_ID = 151351
    NEW_LINE_TOKEN_ID = 198


class Qwen3ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID = 151667
    THINKING_END_TOKEN_ID = 151668
    NEW_LINE_TOKEN_ID = 198


class DeepSeekR1ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID = 128798
    THINKING_END_TOKEN_ID = 128799
    NEW_LINE_TOKEN_ID = 201


class DeepseekOCRNoRepeatNGramLogitProcessor(CustomLogitProcessor):
    """Never completes an n-gram of ``ngram_size`` tokens that begins among the last ``window_size`` tokens already,
    but with tokens of ``whitelist_token_ids``."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Params) -> torch.Tensor:
        for row, params in enumerate(custom_param_list):
            size, window = params.get("ngram_size") or 0, params.get("window_size") or 0
            if size > 0 and window > 0:
                tokens = params["__req__"].origin_input_ids + params["__req__"].output_ids
                banned = _repeating(tokens, size, window) - set(params.get("whitelist_token_ids") or ())
                check_ids(banned, logits.shape[1], "custom_params")
                logits[row, sorted(banned)] = float("-inf")
        return logits


def _repeating(tokens: list[int], size: int, window: int) -> set[int]:
    """The tokens after which the last ``size`` tokens would repeat an n-gram of the window."""
    start = tokens[len(tokens) - size + 1:] if size > 1 else []
    first = max(0, len(tokens) - window)
    return {tokens[i + size - 1] for i in range(first, len(tokens) - size + 1) if tokens[i:i + size - 1] == start}
