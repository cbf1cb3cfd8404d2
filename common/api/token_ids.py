"""Checks token ids: each that reaches an engine must be in the model's vocabulary.

A larger id reads outside of the embedding table: on one rank the engine crashes, on several, which skip rows of other
ranks, the answer is wrong. API servers check the ids of requests, with the parameter's name; every engine rank checks
all that it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from .errors import InvalidRequest

if TYPE_CHECKING:
    from .messages import Generate


def check_ids(ids: Collection[int], vocab_size: int, param: str,
              name_of: Callable[[int], str] | None = None) -> None:
    """Raises InvalidRequest for an id outside the vocabulary; ``name_of`` returns a tokenizer's text of an id."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    wrong = next(token for token in ids if not 0 <= token < vocab_size)
    name = name_of(wrong) if name_of is not None and 0 <= wrong < 2**31 else ""
    named = f" ({name[:80]!r} in the tokenizer)" if name else ""
    raise InvalidRequest(f"{param} holds token id {wrong}{named}, which the model does not have: its vocabulary has "
                         f"ids 0 to {vocab_size - 1}; leave that token out.", param=param)


def check_request_ids(message: Generate, vocab_size: int) -> None:
    """Raises InvalidRequest where any id of a request is outside the vocabulary."""
    check_ids(message.input_ids, vocab_size, "The prompt")
    check_ids(message.token_ids_logprob, vocab_size, "token_ids_logprob")
    check_ids(message.sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_ids(message.sampling.logit_bias, vocab_size, "logit_bias")
