"""The four shapes of a prompt: a text, token ids, or a batch of either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...api.errors import InvalidRequest


@dataclass(frozen=True)
class Prompts:
    """Prompts as ``texts`` or as ``ids``. ``batched``: the request has a list of prompts, even if of one."""

    texts: list[str] | None = None
    ids: list[list[int]] | None = None
    batched: bool = False

    def __len__(self) -> int:
        return len(self.texts if self.texts is not None else self.ids or ())


def parse_prompts(value: str | Sequence[Any], param: str) -> Prompts:
    """Raises InvalidRequest for empty prompts and lists of mixed types."""
    items: list[Any] = [value] if isinstance(value, str) else list(value)
    if items and all(isinstance(item, str) for item in items):
        prompts = Prompts(texts=items, batched=not isinstance(value, str))
    elif items and all(isinstance(item, int) for item in items):
        prompts = Prompts(ids=[items])
    elif items and all(isinstance(item, list) for item in items):
        prompts = Prompts(ids=items, batched=True)
    elif items:
        raise InvalidRequest(f"{param} must not mix strings, token ids and lists.", param=param)
    else:
        raise InvalidRequest(f"{param} is empty; send at least one token.", param=param)
    if not all(prompts.texts if prompts.texts is not None else prompts.ids or ()):
        raise InvalidRequest(f"{param} is empty; send at least one token.", param=param)
    return prompts


def output_limit(num_prompt_tokens: int, requested: int | None, limit: int, *, tokens_name: str) -> int:
    """Tokens that may follow the prompt. Raises InvalidRequest where prompt and ``requested`` exceed ``limit``.

    A prompt may fill all of it where nothing is to follow.
    """
    if num_prompt_tokens > limit or (num_prompt_tokens == limit and requested != 0):
        raise too_long("The prompt", num_prompt_tokens, limit)
    if requested is not None and num_prompt_tokens + requested > limit:
        raise InvalidRequest(
            f"Requested token count exceeds the model's maximum context length: {_maximum(limit)}, and the prompt's "
            f"{num_prompt_tokens} with {tokens_name} {requested} are {num_prompt_tokens + requested}. Shorten the "
            f"prompt or lower {tokens_name}.", param=tokens_name, code="context_length_exceeded")
    return limit - num_prompt_tokens


def too_long(what: str, count: int, limit: int, *, param: str | None = None) -> InvalidRequest:
    """The error of an input that leaves no tokens for an answer, in words that clients of OpenAI and SGLang parse."""
    why = "is longer than the model's context length" if count > limit else "leaves no room for output"
    return InvalidRequest(f"{what} of {count} tokens {why}: {_maximum(limit)}. Shorten it.", param=param,
                          code="context_length_exceeded")


def _maximum(limit: int) -> str:
    return f"this model's maximum context length is {limit} tokens here"
