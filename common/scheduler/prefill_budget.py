"""How many prompt tokens one step computes."""

from __future__ import annotations

from ..config.server import ScheduleArgs
from ..request.req import Req

# Prompt logprobs need logits for every row, 4 bytes x vocabulary each: 512 rows of a 128k vocabulary are 262 MB.
LOGPROB_CHUNK = 512


class PrefillBudget:
    """Deals a step's prompt tokens out to requests, in turn.

    A prompt gets ``chunked_prefill_size`` tokens at most, and all of it where that is -1; further prompts join while
    the step stays within that and ``max_prefill_tokens``.
    """

    def __init__(self, args: ScheduleArgs, num_riding: int = 0, together: int | None = None):
        """``num_riding`` decode rows are computed in the same step: they count. ``together`` bounds a step of several
        prompts beside ``max_prefill_tokens``."""
        self._whole = args.chunked_prefill_size < 0
        self._most = args.max_prefill_tokens if together is None else min(args.max_prefill_tokens, together)
        self._left = max(1, (args.max_prefill_tokens if self._whole else args.chunked_prefill_size) - num_riding)
        self._used = 0

    @property
    def spent(self) -> bool:
        return self._left <= 0

    def take(self, req: Req) -> int:
        """Tokens of ``req`` that this step computes; 0 where its turn is the next step."""
        wanted = req.length - req.num_computed_tokens
        whole = self._whole
        if req.logprob_start is not None:
            self._left, whole = min(self._left, LOGPROB_CHUNK), False
        if not self._used:
            taken = wanted if whole else min(wanted, self._left)
        else:
            room = min(self._left, self._most - self._used)
            taken = min(wanted, room) if wanted <= room or not whole else 0
        taken = max(taken, 0)
        self._used += taken
        self._left = self._left - taken if taken else 0
        return taken
