"""Continuous batching over paged KV: which requests compute which tokens in the next step.

This is the part that the unified, prefill and decode schedulers share. It owns the waiting queue, the
requests in prefill and in decode, their pages and the retraction of requests when pages run out; it does no I/O
and reads no clock, so that tensor-parallel ranks fed the same calls take the same decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..config.server import ScheduleArgs
from ..kvcache.manager import KVCacheManager
from .req import Req

# Prompt logprobs need logits for every row, 4 bytes x vocabulary each: 512 rows of a 128k vocabulary are 262 MB.
LOGPROB_CHUNK = 512
LPM_QUEUE = 128


@dataclass(frozen=True)
class Chunk:
    """The request's tokens ``start:stop`` are computed in this step; ``samples``: they end with its last, and the
    step yields the next one."""

    req: Req
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True)
class Batch:
    """The chunks of one step. ``is_decode``: each is one token long and samples."""

    chunks: list[Chunk]
    is_decode: bool

    @property
    def num_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


class Batcher:
    """Requests of one rank between admission and their last token.

    waiting -> prefilling (pages for all its tokens allocated, computed chunk by chunk) -> running (decode).
    """

    def __init__(self, cache: KVCacheManager, args: ScheduleArgs):
        self.cache = cache
        self.args = args
        self.waiting: deque[Req] = deque()
        self.prefilling: list[Req] = []
        self.running: list[Req] = []
        self.num_retracted = 0

    def __repr__(self) -> str:
        return (f"Batcher(waiting {len(self.waiting)}, prefilling {len(self.prefilling)}, "
                f"running {len(self.running)}, {self.cache})")

    def __iter__(self) -> Iterator[Req]:
        yield from self.waiting
        yield from self.prefilling
        yield from self.running

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    # -- prefill ---------------------------------------------------------------------------------

    def next_prefill(self) -> Batch | None:
        """The next chunks of prompts, of ``chunked_prefill_size`` tokens at most; admits waiting requests."""
        budget = self.args.chunked_prefill_size
        chunks: list[Chunk] = []
        for req in self._in_prefill_order():
            if req.logprob_start is not None:
                budget = min(budget, LOGPROB_CHUNK)
            stop = min(req.length, req.num_computed_tokens + budget)
            chunks.append(Chunk(req, req.num_computed_tokens, stop, stop == req.length))
            budget -= stop - req.num_computed_tokens
            if budget <= 0:
                break
        return Batch(chunks, is_decode=False) if chunks else None

    def _in_prefill_order(self) -> Iterator[Req]:
        yield from list(self.prefilling)
        if self.args.schedule_policy == "lpm":
            self._sort_by_cached_prefix()
        while self.waiting and len(self.prefilling) + len(self.running) < self.args.max_running_requests:
            if not self._admit(self.waiting[0]):
                break
            req = self.waiting.popleft()
            if not req.reported:
                req.mark("queue")
            self.prefilling.append(req)
            yield req

    def _admit(self, req: Req) -> bool:
        if not self.reserve(req, len(req.tokens), req.prefix_limit):
            return False
        assert req.hold is not None
        req.num_computed_tokens = req.hold.num_cached_pages * self.cache.page_size
        req.num_cached_tokens = max(req.num_cached_tokens, min(req.num_computed_tokens, req.num_prompt_tokens))
        return True

    def reserve(self, req: Req, num_tokens: int, prefix_limit: int) -> bool:
        """Borrow the cached prefix and allocate the other pages of the first ``num_tokens`` tokens.

        Leaves each running request a page to grow into; False, and no change, where that does not fit.
        """
        private = req.embeds is not None
        hold = self.cache.begin_private() if private else self.cache.begin(req.tokens.view(), prefix_limit)
        missing = self.cache.pages_for(num_tokens) - hold.count
        if missing + len(self.running) > self.cache.num_available or not self.cache.grow(hold, num_tokens):
            self.cache.release(hold)
            return False
        req.hold = hold
        return True

    def _sort_by_cached_prefix(self) -> None:
        """Longest cached prefix first; a request's place among equals stays its place of arrival.

        Longer queues stay in order of arrival: a look-up each, every step, would cost more than it saves.
        """
        if self.cache.prefix_cache is None or not 2 <= len(self.waiting) <= LPM_QUEUE:
            return
        match = self.cache.prefix_cache.match
        self.waiting = deque(sorted(self.waiting, key=lambda req: -len(match(req.tokens.view(0, req.prefix_limit))[1])))

    # -- decode ----------------------------------------------------------------------------------

    def next_decode(self) -> Batch | None:
        """One token of every running request that wants more; ``grow_running`` has made room for them."""
        chunks = [Chunk(req, req.num_computed_tokens, req.length, True) for req in self.running if not req.complete]
        return Batch(chunks, is_decode=True) if chunks else None

    def grow_running(self) -> bool:
        """Give every running request the page of its next token; False where pages for all are lacking."""
        grown = [self._grow(req) for req in self.running]
        return all(grown)

    def retract_for_room(self) -> None:
        """Retract the youngest running requests until the others can grow. No token may be pending."""
        short = [req for req in self.running if not self._grow(req)]
        while short:
            youngest = max(self.running, key=lambda req: req.arrived)
            self._retract(youngest)
            short = [req for req in short if req is not youngest and not self._grow(req)]

    def _grow(self, req: Req) -> bool:
        assert req.hold is not None
        return req.complete or self.cache.grow(req.hold, req.length)

    def _retract(self, req: Req) -> None:
        """Give the request's pages back; it waits at the front of the queue and is computed again later.

        Its full pages go to the prefix cache, so that whatever is not evicted until then need not be recomputed.
        """
        self.running.remove(req)
        self._release(req, keep=True)
        self.waiting.appendleft(req)
        self.num_retracted += 1

    # -- results ---------------------------------------------------------------------------------

    def launched(self, batch: Batch) -> None:
        """Record that the step is on its way: requests whose prompt it completes join the running ones."""
        for chunk in batch.chunks:
            req = chunk.req
            req.num_computed_tokens = chunk.stop
            req.num_pending += chunk.samples
            if not batch.is_decode:
                assert req.hold is not None
                self.cache.commit(req.hold, req.computed)
                if chunk.samples:
                    self.prefilling.remove(req)
                    self.running.append(req)

    def adopt(self, req: Req) -> None:
        """Take in a request whose prompt was computed elsewhere and whose first token is known."""
        self.running.append(req)

    def detach(self, req: Req) -> None:
        """Take a request out of whatever list it stands in; it keeps its pages."""
        for place in (self.waiting, self.prefilling, self.running):
            if req in place:
                place.remove(req)
                return

    def finish(self, req: Req, keep: bool = True) -> None:
        """Take a request out and free its pages; ``keep`` leaves the full ones in the prefix cache."""
        self.detach(req)
        self._release(req, keep)

    def _release(self, req: Req, keep: bool) -> None:
        if req.hold is not None:
            self.cache.release(req.hold, req.computed if keep else None)
        req.hold = None
        req.num_computed_tokens = 0
