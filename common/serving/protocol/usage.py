"""Token counts of an answer."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...api.messages import LoadedTokens, PromptUsage

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class CachedTokensDetails(msgspec.Struct):
    """SGLang's: a prompt's cached tokens by where they were. The last two where the server has a KV storage."""

    device: int
    host: int = 0
    storage: int | UnsetType = UNSET
    storage_backend: str | UnsetType = UNSET

    @classmethod
    def of(cls, usage: PromptUsage, num_cached: int) -> CachedTokensDetails:
        """Of the first ``num_cached`` tokens of ``usage``: pages of host memory follow those of the GPU, and the
        storage's are last."""
        loaded = usage.loaded or LoadedTokens()
        device = max(0, min(num_cached, usage.num_cached_tokens - loaded.host - loaded.storage))
        host = min(num_cached - device, loaded.host)
        if loaded.storage_backend is None:
            return cls(device, host)
        return cls(device, host, num_cached - device - host, loaded.storage_backend)


class SglExt(msgspec.Struct):
    """Fields that SGLang adds to answers of OpenAI's APIs, where a request or the server asks for it."""

    cached_tokens_details: CachedTokensDetails | UnsetType = UNSET
    input_ids: list[int] | UnsetType = UNSET
    output_ids: list[list[int]] | UnsetType = UNSET
    """One list for each choice."""

    @property
    def or_unset(self) -> SglExt | UnsetType:
        """UNSET where there is nothing to add."""
        return UNSET if self == SglExt() else self


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
