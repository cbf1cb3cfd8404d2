"""Continuous batching over paged KV: which requests compute which tokens in the next step.

This is the part that the unified, prefill and decode schedulers share. It owns the places where requests stand, their
pages and the retraction of requests when pages run out; it does no I/O and reads no clock, so that tensor-parallel
ranks fed the same calls take the same decisions. What it decides by is in ``scheduling/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..api.commands import PauseMode
from ..config.server import ScheduleArgs
from ..kvcache.manager import KVCacheManager
from ..request.batch import Chunk, InputBatchChunks, ScheduledBatch
from ..request.input_batch import InputBatch
from ..request.req import Req
from .new_token_ratio import NewTokenRatio, left_of, one_less
from .page_budget import PageBudget
from .policies.order import Order
from .policies.priority import Priorities
from .policies.registry import order_maker
from .preemption.retraction import Retraction
from .prefill_budget import PrefillBudget
from .request_queues import RequestQueues
from .waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from .preemption.swap_space import SwapSpace


class Batcher:
    """Requests of one rank between admission and their last token; where they stand, Places tells."""

    def __init__(self, cache: KVCacheManager, args: ScheduleArgs, *, decodes: bool = True, seed: int = 0,
                 swap: SwapSpace | None = None, stages: int = 1, most: int | None = None):
        """``decodes``: prompts are followed by output here, so that room for it is reserved. ``seed``: of the random
        policy, equal on all ranks. ``swap``: where retracted requests' pages may go. With several ``stages`` of a
        pipeline, a decode step takes a share of the running requests, so that the other stages have the others; no step
        takes more than ``most`` requests then."""
        self.cache = cache
        self.args = args
        self.swap = swap
        self.priorities = Priorities.of(args)
        self._seed = seed
        self._stages, self._most = stages, most
        self._queues: list[WaitingQueue] = []
        self.places = RequestQueues(self.make_queue())
        self.waiting, self.prefilling = self.places.waiting, self.places.prefilling
        self.running, self.arriving = self.places.running, self.places.arriving
        self.room = PageBudget(cache, NewTokenRatio(args.schedule_conservativeness if decodes else 0.0), self.places)
        self.retraction = Retraction(self.places, self.room, self.priorities, swap, self.detach)
        self.paused: PauseMode | None = None
        """While it is set, whoever owns this launches no step."""
        self._run: InputBatch | None = None  # of the last decode batch; None where requests decoded otherwise since
        self._run_of: list[Req] = []  # those that ran when it was made

    def __repr__(self) -> str:
        return f"Batcher({self.places}, {self.cache})"

    def __iter__(self) -> Iterator[Req]:
        return iter(self.places)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    @property
    def has_slot(self) -> bool:
        """Whether ``max_running_requests`` allows one more."""
        return self.places.num_with_pages < self.args.max_running_requests

    def pause(self, mode: PauseMode) -> None:
        """Wait until ``paused`` is None again. No token may be pending."""
        self.paused = mode
        if mode == "retract":
            self.retraction.all()

    def make_queue(self) -> WaitingQueue:
        """An empty queue of the policy, and of each that is set later."""
        queue = WaitingQueue(self._order_maker(), self.priorities.urgency)
        self._queues.append(queue)
        return queue

    def set_args(self, args: ScheduleArgs) -> None:
        """Go on with other limits, or another policy."""
        before, self.args = self.args, args
        if args.schedule_policy != before.schedule_policy:
            for queue in self._queues:
                queue.reorder(self._order_maker())

    # -- prefill ---------------------------------------------------------------------------------

    def next_prefill(self, together: int | None = None) -> ScheduledBatch | None:
        """The next chunks of prompts, as PrefillBudget deals them out; admits waiting requests."""
        chunks = self._prefill_chunks(PrefillBudget(self.args, together=together))
        return ScheduledBatch(chunks, is_decode=False) if chunks else None

    def next_mixed(self) -> ScheduledBatch | None:
        """The next chunks of prompts together with ``next_decode``, which is all where there are none."""
        num_riding = sum(not req.complete for req in self.running)
        chunks = self._prefill_chunks(PrefillBudget(self.args, num_riding))
        decode = self.next_decode() if not chunks else self._next_share()
        if not chunks or decode is None:
            return ScheduledBatch(chunks, is_decode=False) if chunks else decode
        return ScheduledBatch([*chunks, *decode.chunks], is_decode=False, num_riding=len(decode.chunks))

    def _prefill_chunks(self, budget: PrefillBudget) -> list[Chunk]:
        chunks: list[Chunk] = []
        for req in self._in_prefill_order():
            taken = budget.take(req)
            if taken:
                stop = req.num_computed_tokens + taken
                chunks.append(Chunk(req, req.num_computed_tokens, stop, stop == req.length))
            if budget.spent or len(chunks) == self._most:
                break
        return chunks

    def _in_prefill_order(self) -> Iterator[Req]:
        """Prompts that have begun come before those that are admitted, but for more urgent ones."""
        for req in sorted(self.prefilling, key=self.priorities.urgency, reverse=True):
            yield from self._admitted(above=self.priorities.urgency(req))
            yield req
        yield from self._admitted()

    def _admitted(self, above: int | None = None) -> Iterator[Req]:
        """Admit waiting requests, those more urgent than ``above``, while there is room; yields those to compute."""
        while self.has_slot and (req := self.waiting.head()) is not None:
            if above is not None and self.priorities.urgency(req) <= above:
                return
            if not self.reserve(req, len(req.tokens), req.prefix_limit):
                return
            self.waiting.remove(req)
            self._begin(req)
            self.places.count_left(left_of(req))
            if req.length - req.num_computed_tokens == 1 and req.num_output_tokens:  # all of it came from the host
                self.running.append(req)
            else:
                self.prefilling.append(req)
                yield req

    def _begin(self, req: Req) -> None:
        """The request, which has a hold now, goes on behind what the prefix cache or host memory has of it."""
        assert req.hold is not None
        req.num_computed_tokens = req.hold.num_cached_pages * self.cache.page_size
        if not req.num_retractions:
            req.num_cached_tokens = max(req.num_cached_tokens, min(req.num_computed_tokens, req.num_prompt_tokens))
            if not req.reported:
                req.mark("queue")
        if req.saved is not None:
            assert self.swap is not None
            self.swap.restore(req)

    def reserve(self, req: Req, num_tokens: int, prefix_limit: int) -> bool:
        """Room.reserve."""
        return self.room.reserve(req, num_tokens, prefix_limit)

    # -- decode ----------------------------------------------------------------------------------

    def next_decode(self) -> ScheduledBatch | None:
        """One token of every running request that wants more; ``grow_running`` has made room for them."""
        if self._stages > 1:
            return self._next_share()
        run = self._next_run()
        if run is None:
            return None
        self.room.output.decoded()
        return ScheduledBatch(InputBatchChunks(run), is_decode=True, run=run, ending=run.ending(),
                              positions=run.positions)

    def _next_run(self) -> InputBatch | None:
        """That of the next decode batch, the last one's where requests are the same; None where nobody wants more."""
        run = self._run
        if run is None or run.gone or not run.steps_left or self._run_of != self.running:
            self._run_of = self.running.copy()
            reqs = [req for req in self.running if not req.complete] if run is None else run.wanting(self.running)
            if not reqs:
                return None
            run = self._run = InputBatch(reqs, self.cache.page_size, run)
        return run

    def _next_share(self) -> ScheduledBatch | None:
        """One token of every running request that wants more; of several stages, an equal share of those that are in
        none."""
        free = [req for req in self.running if not req.complete]
        if self._stages > 1:
            share = -(-len(free) // self._stages)
            most = share if self._most is None else min(share, self._most)
            free = [req for req in free if not req.num_pending][:most]
        if not free:
            return None
        self.room.output.decoded()
        return ScheduledBatch([Chunk(req, req.num_computed_tokens, req.length, True) for req in free], is_decode=True)

    def grow_running(self) -> bool:
        """Give every running request the page of its next token; False where pages for all are lacking."""
        if self._stages == 1 and not self.args.enable_mixed_chunk:  # else runs are few
            run = self._next_run()
            if run is None:
                return True
            places = run.short()
            if not places or run.add_page_each(self.cache, places):
                return True
            grown = [self._grow_place(run, place) for place in places]
            return all(grown)
        page_size = self.cache.page_size
        short = [req for req in self.running if req.hold is None or req.hold.count * page_size < req.length]
        grown = [self.room.grow(req) for req in short]
        return all(grown)

    def _grow_place(self, run: InputBatch, place: int) -> bool:
        grown = self.room.grow(run.reqs[place])
        run.grown(place)
        return grown

    # -- giving way ------------------------------------------------------------------------------

    @property
    def num_retracted(self) -> int:
        return self.retraction.num_retracted

    @property
    def num_preempted(self) -> int:
        return self.retraction.num_preempted

    def retract_for_room(self) -> None:
        """Retraction.for_room."""
        self.retraction.for_room()

    def blocked(self, req: Req, num_tokens: int, prefix_limit: int) -> bool:
        """Retraction.blocked."""
        return self.retraction.blocked(req, num_tokens, prefix_limit, has_slot=self.has_slot)

    def make_way(self, req: Req, num_tokens: int, prefix_limit: int) -> None:
        """Retract requests that give way to ``req`` until it is not ``blocked``. No token may be pending."""
        while self.blocked(req, num_tokens, prefix_limit):
            self.retraction.preempt_for(req)

    # -- results ---------------------------------------------------------------------------------

    def launched(self, batch: ScheduledBatch) -> None:
        """Record that the step is on its way: requests whose prompt it completes join the running ones."""
        if batch.run is not None:
            self.places.count_left(-one_less(batch.run.left))
            batch.run.advance()
            return
        if batch.is_decode or batch.num_riding:
            self._run = None
        for chunk in batch.chunks:
            before = left_of(chunk.req)
            chunk.req.num_computed_tokens = chunk.stop
            chunk.req.num_pending += chunk.samples
            self.places.count_left(left_of(chunk.req) - before)
        for chunk in batch.prompts:
            req = chunk.req
            assert req.hold is not None
            self.cache.commit(req.hold, req.computed)
            if chunk.samples:
                self.prefilling.remove(req)
                self.running.append(req)

    def expect(self, req: Req) -> None:
        """Another server fills the pages that were reserved for the request; ``adopt`` it then, or ``finish`` it."""
        self.arriving.append(req)
        self.places.count_left(left_of(req))

    def adopt(self, req: Req) -> None:
        """Take in an expected request: its prompt was computed elsewhere and its first token is known."""
        self.arriving.remove(req)
        self.running.append(req)
        self.places.recount()  # it takes its first token without a step

    def detach(self, reqs: Sequence[Req]) -> None:
        """Take requests out of wherever they stand; they keep their pages."""
        if not reqs:
            return
        if self._run is not None:
            self._run.leave(reqs)
        self.places.take_out(reqs)

    def finish(self, req: Req, keep: bool = True) -> None:
        """Take a request out and free its pages; ``keep`` leaves the full ones in the prefix cache."""
        self.finish_each([req], keep)

    def finish_each(self, reqs: Sequence[Req], keep: bool = True) -> None:
        """``finish`` of many costs little more than of one."""
        self.detach(reqs)
        self.room.release(reqs, keep=keep)
        if self.swap is not None:
            for req in reqs:
                self.swap.drop(req)

    def _order_maker(self) -> Callable[[], Order]:
        return order_maker(self.args.schedule_policy, self.cache.prefix_cache, self._seed)
