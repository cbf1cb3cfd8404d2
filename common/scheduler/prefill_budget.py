"""Token budget of the prompts in one step."""

from __future__ import annotations

from ..config.server import ScheduleArgs
from ..request.req import Req

# Prompt logprobs need logits for every row, 4 bytes x vocabulary each: 512 rows of a 128k vocabulary are 262 MB.
LOGPROB_CHUNK_TOKENS = 512


class PrefillBudget:
    """Distributes a step's prompt tokens over requests, one after the other.

    A prompt gets ``chunked_prefill_size`` tokens at most, or all of its tokens where that is -1; further prompts join
    while the step stays within that and ``max_prefill_tokens``, and has no more than ``prefill_max_requests``.
    """

    def __init__(self, args: ScheduleArgs, num_decode_rows: int = 0, max_batch_tokens: int | None = None):
        """``num_decode_rows``, those of drafts among them, are computed in the same step and count as tokens.
        ``max_batch_tokens`` bounds a step of several prompts, as ``max_prefill_tokens`` does."""
        limit = args.max_prefill_tokens
        self._unchunked = args.chunked_prefill_size < 0
        self._max_batch_tokens = limit if max_batch_tokens is None else min(limit, max_batch_tokens)
        self._remaining = max(1, (limit if self._unchunked else args.chunked_prefill_size) - num_decode_rows)
        self._used = 0
        self._prompts_left = args.prefill_max_requests or float("inf")

    @property
    def exhausted(self) -> bool:
        return self._remaining <= 0 or self._prompts_left <= 0

    def take(self, req: Req) -> int:
        """Tokens of ``req`` that this step computes; 0 where it has to wait for the next step."""
        if self.exhausted:
            return 0
        uncomputed = req.length - req.num_computed_tokens
        unchunked = self._unchunked
        if req.logprob_start is not None:
            self._remaining, unchunked = min(self._remaining, LOGPROB_CHUNK_TOKENS), False
        if not self._used:
            taken = uncomputed if unchunked else min(uncomputed, self._remaining)
        else:
            available = min(self._remaining, self._max_batch_tokens - self._used)
            taken = min(uncomputed, available) if uncomputed <= available or not unchunked else 0
        taken = max(taken, 0)
        self._used += taken
        self._prompts_left -= taken > 0
        self._remaining = self._remaining - taken if taken else 0
        return taken
