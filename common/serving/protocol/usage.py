"""Token counts of an answer."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Drafts of speculative decoding are OpenAI's predictions. ``simulated_acceptance``: how many are accepted is
    drawn, for measurements."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    simulated_acceptance: bool | UnsetType = UNSET


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET  # SGLang's name; the same count as in completion_tokens_details
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, prompt_tokens: int, cached_tokens: int | None, completion_tokens: int) -> Usage:
        """``cached_tokens`` None: they are not reported."""
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens,
                   UNSET if cached_tokens is None else PromptTokensDetails(cached_tokens))

    @property
    def cached_tokens(self) -> int:
        """The reported ones."""
        details = self.prompt_tokens_details
        return details.cached_tokens if details else 0
