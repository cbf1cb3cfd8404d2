"""Draft prefill: a draft model that reads tokens alone computes what its KV pool lacks of running requests.

Such are the prompts that came from a prefill server without this draft model, and the tokens of steps in which nothing
was drafted. They are computed in chunks between two steps, so that no request waits for more than one chunk; until its
gap is closed a request decodes without drafts.
"""

from __future__ import annotations

from collections import deque

from ..execution.executor import Executor
from ..request.req import Req
from ..request.step_input import Chunk
from ..scheduler.batcher import Batcher

CHUNK_TOKENS = 2048
"""Tokens between two steps: a model of 1 B parameters takes about 10 ms for them on an H100, as long as a step."""


class DraftPrefill:
    """Closes the gaps of requests, in the order in which they were found."""

    def __init__(self, batcher: Batcher, executor: Executor, chunk_tokens: int = CHUNK_TOKENS):
        """``chunk_tokens``: the most between two steps."""
        assert batcher.drafting is not None
        batcher.drafting.closes_gaps = True
        self._batcher = batcher
        self._drafting = batcher.drafting
        self._executor = executor
        self._chunk_tokens = chunk_tokens
        self._left = chunk_tokens  # until the next step
        self._queue: deque[Req] = deque()

    def start(self, req: Req, start: int) -> None:
        """Computes the prompt of a request that no step has decoded yet from token ``start`` on, and drafts after its
        first token; later, without drafts, where it is more than may be computed before the next step."""
        assert req.page_table is not None
        stop = req.num_computed_tokens
        if self._queue or stop - start > self._left:
            self._batcher.cache.open_draft_gap(req.page_table, start)
            self._queue.append(req)
        else:
            self._compute(req, start, stop, samples=True)

    @property
    def due(self) -> bool:
        """True where there are gaps to close."""
        if not self._queue:
            self._queue.extend(self._drafting.gaps(self._batcher.running))
        return bool(self._queue)

    def advance(self) -> None:
        """Computes the next tokens, as many as fit between two steps. No token may be pending."""
        while self._queue and self._left > 0:
            req = self._queue[0]
            table = req.page_table
            if table is not None and table.draft_gap is not None:
                assert not req.num_pending
                stop = min(table.draft_gap + self._left, req.num_computed_tokens)
                self._compute(req, table.draft_gap, stop)
                if stop < req.num_computed_tokens:
                    table.draft_gap = stop
                    return
                self._batcher.cache.close_draft_gap(table)
            self._queue.popleft()

    def on_step(self) -> None:
        """Records that a step follows."""
        self._left = self._chunk_tokens

    def _compute(self, req: Req, start: int, stop: int, *, samples: bool = False) -> None:
        """Computes tokens in as many chunks as the memory of a step asks for; ``samples``: then drafts."""
        size = self._batcher.args.largest_prefill(stop)
        self._left -= stop - start
        for begin in range(start, stop, size):
            end = min(begin + size, stop)
            drafts = self._executor.draft_prompt(
                self._batcher.draft_step(Chunk(req, begin, end, samples and end == stop)))
            if samples:
                req.drafts = drafts
