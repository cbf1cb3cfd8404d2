"""Continuous batching over paged KV: which requests compute which tokens in the next step.

This is the part that the unified, prefill and decode schedulers share. It owns the request queues, the requests' pages,
and their retraction when pages run out; it does no I/O and reads no clock, so that tensor-parallel ranks that are fed
the same calls take the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..commands.pause import PauseMode
from ..config.server import ScheduleArgs
from ..config.server.schedule import SCHEDULE_POLICIES
from ..kvcache.manager import KVCacheManager
from ..request.input_batch import InputBatch
from ..request.req import Req
from ..request.step_input import Chunk, StepInput, chunk_step, draft_step
from .chain_planner import ChainPlanner, NoChain
from .drafting import Drafting
from .new_token_ratio import NewTokenRatio, remaining_decrease, remaining_output
from .page_budget import PageBudget, QueueAdmission
from .policies.order import Order, OrderInputs
from .policies.priority import Priorities
from .preemption.retraction import Retraction
from .prefill_budget import PrefillBudget
from .prefill_pace import PrefillPace
from .request_queues import RequestQueues
from .waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from .preemption.copy_rates import AgreedRates
    from .preemption.swap_space import SwapSpace
    from .tier_loads import Then, TierLoads


class Batcher:
    """Batches the requests of one rank, from admission to their last token; ``queues`` has their states."""

    def __init__(self, cache: KVCacheManager, args: ScheduleArgs, *, decodes: bool = True, seed: int = 0,
                 swap: SwapSpace | None = None, loads: TierLoads | None = None, pp_size: int = 1,
                 max_micro_batch: int | None = None, drafting: Drafting | None = None,
                 chains: ChainPlanner | None = None, rates: AgreedRates | None = None):
        """``decodes``: output follows the prompts on this server, so that pages are reserved for it. ``seed``: of the
        random policy, equal on all ranks. ``swap``: the host memory for retracted requests' pages. ``loads``: of the
        cache's tier. With a ``pp_size`` above 1, a decode step takes a share of the running requests, so that the
        other pipeline stages have the others, and no step takes more than ``max_micro_batch`` requests. ``drafting``:
        with speculative decoding, not with a pipeline; ``chains``: where chain steps are captured. ``rates``: with
        ``swap`` or ``loads``, which weigh copies by them."""
        self.cache = cache
        self.args = args
        self.swap = swap
        self.loads = loads
        self.rates = rates
        self.drafting = drafting
        self.chains = chains
        self.priorities = Priorities.of(args)
        self._seed = seed
        self._pp_size, self._max_micro_batch = pp_size, max_micro_batch
        self.pace = PrefillPace()
        self._waiting_queues: list[WaitingQueue] = []
        self.queues = RequestQueues(self.make_queue())
        self.waiting, self.prefilling = self.queues.waiting, self.queues.prefilling
        self.running, self.transferring = self.queues.running, self.queues.transferring
        self.page_budget = PageBudget(cache, NewTokenRatio(args.schedule_conservativeness if decodes else 0.0),
                                      self.queues, self.priorities)
        self.admission = QueueAdmission(self.page_budget)
        self.retraction = Retraction(self.queues, self.page_budget, self.priorities, swap, self.remove, loads)
        self.paused: PauseMode | None = None
        """The owner launches no step while this is set."""
        self._input_batch: InputBatch | None = None  # the last decode batch; None after requests decoded otherwise
        self._running_version = -1  # of ``queues`` when ``_input_batch`` was built
        self._last: StepInput | None = None  # the step that was launched last

    def __repr__(self) -> str:
        return f"Batcher({self.queues}, {self.cache})"

    def __iter__(self) -> Iterator[Req]:
        return iter(self.queues)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running or self.loads or self.queues.prefetching)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages, or for the content of theirs."""
        return len(self.queues.prefetching) + len(self.waiting) + len(self.queues.loading)

    @property
    def tier_counters(self) -> dict[str, float]:
        """What the KV tiers did, for the engine's report."""
        return {} if self.loads is None else self.loads.counters

    @property
    def tier_gauges(self) -> dict[str, float]:
        return {} if self.loads is None else self.loads.gauges

    @property
    def has_slot(self) -> bool:
        """True while ``max_running_requests`` allows one more."""
        return self.queues.num_admitted < self.args.max_running_requests

    def pause(self, mode: PauseMode) -> None:
        """Pause until ``paused`` is None again. No token may be pending."""
        self.paused = mode
        if mode == "retract":
            self.retraction.retract_all()

    def prefetch(self, req: Req, limit: int) -> None:
        """Begin to fetch pages of the first ``limit`` tokens of a request that has arrived from a storage, if there is
        one; ``enqueue``, a transfer or ``remove`` follows."""
        if self.loads is not None:
            self.loads.prefetch(req, limit)

    def enqueue(self, req: Req) -> None:
        """Let a request wait for pages; for its prefetch first, as the policy of prefetches says."""
        if self.loads is None or self.loads.is_ready(req):
            self.waiting.append(req)
        else:
            self.queues.prefetching[req] = None

    def make_queue(self) -> WaitingQueue:
        """An empty queue, ordered by the current policy and by each that is set later."""
        queue = WaitingQueue(self._order_maker(), self.priorities.urgency, self.args.schedule_backfill_ratio)
        self._waiting_queues.append(queue)
        return queue

    def set_args(self, args: ScheduleArgs) -> None:
        """Change limits, or the policy."""
        before, self.args = self.args, args
        if args.schedule_policy != before.schedule_policy:
            for queue in self._waiting_queues:
                queue.reorder(self._order_maker())

    # -- prefill ---------------------------------------------------------------------------------

    def next_prefill(self, max_batch_tokens: int | None = None) -> StepInput | None:
        """The next chunks of prompts, within PrefillBudget; admits waiting requests."""
        chunks = self._prefill_chunks(PrefillBudget(self.args, max_batch_tokens=max_batch_tokens))
        return self._chunk_step(chunks, len(chunks)) if chunks else None

    def _chunk_step(self, chunks: Sequence[Chunk], num_prefill: int, drafts: bool = True) -> StepInput:
        plan = None if self.drafting is None or not drafts else self.drafting.plan_chunks(chunks, num_prefill)
        return chunk_step(chunks, num_prefill, self.cache.page_size, self._last, plan)

    def draft_step(self, chunk: Chunk) -> StepInput:
        """Returns the step by which a draft model computes a chunk that the model has computed; where it samples, also
        drafts after the token behind it."""
        assert self.drafting is not None
        return draft_step(chunk, self.cache.page_size, self.drafting.plan_chunks([chunk], 1).limits)

    def next_mixed(self, *, drafts: bool = False) -> StepInput | None:
        """A mixed chunk: the next chunks of prompts and ``next_decode``; the latter alone where no prompt waits."""
        decoding = [req for req in self.running if not req.complete]
        num_drafts = self.drafting.expected_drafts(decoding) if drafts and self.drafting is not None else 0
        chunks = self._prefill_chunks(PrefillBudget(self.args, len(decoding) + num_drafts))
        if not chunks:
            return self.next_decode(drafts=drafts)
        return self._chunk_step([*chunks, *self._next_share()], len(chunks), drafts)

    def _prefill_chunks(self, budget: PrefillBudget) -> list[Chunk]:
        chunks: list[Chunk] = []
        for req in self._in_prefill_order():
            taken = budget.take(req)
            start = req.num_computed_tokens
            assert req.page_table is not None
            if taken and (stop := self.cache.allocate_chunk(req.page_table, start, start + taken)) > start:
                chunks.append(Chunk(req, start, stop, stop == req.length))
            if budget.exhausted or len(chunks) == self._max_micro_batch:
                break
        return chunks

    def _in_prefill_order(self) -> Iterator[Req]:
        """Yields prompts in prefill before newly admitted ones, except that more urgent ones are admitted first."""
        for req in sorted(self.prefilling, key=self.priorities.urgency, reverse=True):
            yield from self._admit(above=self.priorities.urgency(req))
            yield req
        yield from self._admit()

    def _admit(self, above: int | None = None) -> Iterator[Req]:
        """Admit waiting requests, those more urgent than ``above``, while pages and slots allow; yields those whose
        prompt is to be computed."""
        while self.has_slot and (req := self.waiting.admit(self.admission, above)) is not None:
            if not self.load_from_tier(req, req.prefix_limit, self._begin_loaded) and self._begin(req):
                yield req

    def load_from_tier(self, req: Req, limit: int, then: Then) -> bool:
        """True where a tier loads pages of the first ``limit`` tokens of ``req``, which has a page table, and ``then``
        is called with it later; until then it is in ``loading``."""
        if self.loads is None or not self.loads.start(req, limit, then):
            return False
        self.queues.loading.append(req)
        self.queues.add_remaining(remaining_output(req))
        return True

    def poll_loads(self, now: float) -> None:
        """Resume requests whose pages a tier has loaded, or whose prefetch they need not wait for any more; once a step
        at time ``now``, also while paused."""
        self.pace.begin(now)
        if self.rates is not None:
            self.rates.poll()
        if self.loads is None:
            return
        finished = self.loads.finished(now)
        for req in [req for req in self.queues.prefetching if self.loads.is_ready(req)]:
            del self.queues.prefetching[req]
            self.loads.waited(req)
            self.waiting.append(req)
        for req, then in finished:
            self.queues.loading.remove(req)
            self.queues.add_remaining(-remaining_output(req))
            then(req)

    def flush_stores(self) -> None:
        """Start the copies to the tier that a step has queued, after its launch."""
        if self.loads is not None:
            self.loads.flush()

    def _begin_loaded(self, req: Req) -> None:
        self._begin(req)
        if self.paused == "retract":
            self.retraction.retract_all()  # this request too

    def _begin(self, req: Req) -> bool:
        """Start an admitted request; True where its prompt is to be computed."""
        self._start_after_prefix(req)
        self.queues.add_remaining(remaining_output(req))
        computes = (req.length - req.num_computed_tokens > 1 or not req.num_output_tokens
                    or not self.page_budget.allocate_next(req))  # else all of it was found
        if computes:
            self.prefilling.append(req)
        else:
            self.queues.start_running(req)
        return computes

    def _start_after_prefix(self, req: Req) -> None:
        """Set the progress of a request with new pages to what the prefix cache, a tier or host memory had of it."""
        assert req.page_table is not None
        req.num_computed_tokens = req.page_table.num_cached_pages * self.cache.page_size
        if not req.num_retractions:
            req.num_cached_tokens = max(req.num_cached_tokens, min(req.num_computed_tokens, req.num_prompt_tokens))
            if not req.reported:
                req.end_span("queue")
        if req.swapped_out is not None:
            assert self.swap is not None
            self.swap.swap_in(req)

    # -- decode ----------------------------------------------------------------------------------

    def next_decode(self, *, drafts: bool = False) -> StepInput | None:
        """One token of every running request that is not complete; ``allocate_running`` must have given them pages.
        ``drafts``: and those that ``drafting`` plans; no token may be pending."""
        if self._pp_size > 1:
            chunks = self._next_share()
            return self._chunk_step(chunks, 0) if chunks else None
        input_batch = self._current_input_batch()
        if input_batch is None:
            return None
        self.page_budget.new_token_ratio.decay()
        if drafts:
            assert self.drafting is not None
            plan = self.drafting.plan_decode(input_batch)
            if plan.drafts or plan.limits:
                return input_batch.draft_step(plan)
        return input_batch.step(self._last)

    def next_chain(self, in_flight: StepInput | None) -> StepInput | NoChain | None:
        """The next decode step as a chain step; None where there is none. ``allocate_running`` must have given requests
        their pages. ``in_flight``: see ChainPlanner."""
        assert self.chains is not None
        input_batch = self._current_input_batch()
        if input_batch is None:
            return None
        found = self.chains.next(input_batch, in_flight)
        if isinstance(found, StepInput):
            self.page_budget.new_token_ratio.decay()
        return found

    def _current_input_batch(self) -> InputBatch | None:
        """The input batch of the next decode step, the last one where its requests are the same; None where all running
        requests are complete."""
        batch = self._input_batch
        if (batch is None or batch.removed_rows or batch.min_remaining <= 0
                or self._running_version != self.queues.running_version):
            self._running_version = self.queues.running_version
            reqs = ([req for req in self.running if not req.complete] if batch is None else
                    batch.unfinished(self.running))
            if not reqs:
                return None
            batch = self._input_batch = InputBatch(reqs, self.cache.page_size, batch)
        return batch

    def _next_share(self) -> list[Chunk]:
        """One token of every running request that is not complete; with a pipeline, an equal share of those that no
        stage computes."""
        reqs = [req for req in self.running if not req.complete]
        if self._pp_size > 1:
            share = -(-len(reqs) // self._pp_size)
            limit = share if self._max_micro_batch is None else min(share, self._max_micro_batch)
            reqs = [req for req in reqs if not req.num_pending][:limit]
        if reqs:
            self.page_budget.new_token_ratio.decay()
        return [Chunk(req, req.num_computed_tokens, req.length, True) for req in reqs]

    def allocate_running(self) -> bool:
        """Allocate the page of every running request's next token; False where there are too few for all."""
        if self._pp_size == 1 and not self.args.enable_mixed_chunk:  # else input batches are few
            input_batch = self._current_input_batch()
            if input_batch is None:
                return True
            rows = input_batch.rows_without_page()
            self._commit_windows([input_batch.reqs[row] for row in rows])
            if not rows or input_batch.pages.append_pages(self.cache, rows):
                return True
            allocated = [self._allocate_row(input_batch, row) for row in rows]
            return all(allocated)
        page_size = self.cache.page_size
        short = [req for req in self.running
                 if req.page_table is None or not req.page_table.covers(-(-req.length // page_size))]
        self._commit_windows(short)
        allocated = [self.page_budget.allocate_next(req) for req in short]
        return all(allocated)

    def _commit_windows(self, reqs: Sequence[Req]) -> None:
        """Publish what ``reqs``, which need a page, have computed, where pages of further groups would be given back
        before a tier has them."""
        for req in reqs if self.cache.writes_windows else ():
            known = min(req.num_computed_tokens + self.cache.lookahead, len(req.tokens))
            if req.page_table is not None and self.cache.leaves_window(req.page_table, known):
                self.cache.commit(req.page_table, req.tokens.view(0, known))

    def _allocate_row(self, input_batch: InputBatch, row: int) -> bool:
        allocated = self.page_budget.allocate_next(input_batch.reqs[row])
        input_batch.pages.update_capacity(row)
        return allocated

    def preempt_for(self, req: Req, num_tokens: int, prefix_limit: int) -> None:
        """Retract less urgent requests until ``req`` can be admitted. No token may be pending."""
        while self.retraction.should_preempt_for(req, num_tokens, prefix_limit, has_slot=self.has_slot):
            self.retraction.preempt_one_for(req)

    # -- results ---------------------------------------------------------------------------------

    def mark_launched(self, step: StepInput) -> None:
        """Record that the step was launched: requests whose prompt it completes join the running ones."""
        self._last = step
        if step.input_batch is not None:
            self.queues.add_remaining(-remaining_decrease(step.input_batch.remaining))
            step.input_batch.advance()
            return
        if step.num_decode_rows:
            self._input_batch = None
        for chunk in step.chunks:
            before = remaining_output(chunk.req)
            chunk.req.num_computed_tokens = chunk.stop
            chunk.req.num_pending += chunk.samples
            self.queues.add_remaining(remaining_output(chunk.req) - before)
        if step.num_prefill:
            self.pace.launch(sum(chunk.stop - chunk.start for chunk in step.prefill_chunks))
        for chunk in step.prefill_chunks:
            req = chunk.req
            assert req.page_table is not None
            self.cache.commit(req.page_table, req.computed(self.cache.lookahead))
            if chunk.samples:
                self.prefilling.remove(req)
                self.queues.start_running(req)

    def mark_verified(self, step: StepInput, counts: np.ndarray, last_tokens: list[int]) -> None:
        """Record that the requests of a step with drafts got ``counts`` tokens, not one each, of which ``last_tokens``
        are the last."""
        batch = step.input_batch
        if batch is None:
            self.queues.invalidate_remaining()
            return
        before = batch.remaining
        batch.accept(counts, last_tokens)
        if batch.has_successor:
            self.queues.invalidate_remaining()
        else:
            self.queues.add_remaining(-remaining_decrease(before, counts - 1))

    def add_transferring(self, req: Req) -> None:
        """Add a request whose reserved pages another server fills; ``start_decode`` follows, or ``finish``."""
        self.transferring.append(req)
        self.queues.add_remaining(remaining_output(req))

    def start_decode(self, req: Req) -> None:
        """Move a transferring request to the running ones: its prompt was computed elsewhere, and its first token is
        known."""
        self.transferring.remove(req)
        self.queues.start_running(req)
        self.queues.invalidate_remaining()  # the caller appends the first token without a step

    def remove(self, reqs: Sequence[Req]) -> None:
        """Remove requests from their queues and from the input batch; they keep their pages, unless a tier is filling
        them."""
        if not reqs:
            return
        if self.loads is not None:
            self.loads.abandon(reqs)
        if self._input_batch is not None:
            self._input_batch.remove(reqs)
        self.queues.remove(reqs)

    def finish(self, req: Req, keep: bool = True) -> None:
        """Remove a request and free its pages; ``keep`` leaves the full ones in the prefix cache."""
        self.finish_all([req], keep)

    def finish_all(self, reqs: Sequence[Req], keep: bool = True) -> None:
        """``finish`` for several requests, which costs little more than for one."""
        self.remove(reqs)
        self.page_budget.release(reqs, keep=keep)
        if self.swap is not None:
            for req in reqs:
                self.swap.discard(req)

    def _order_maker(self) -> Callable[[], Order]:
        return SCHEDULE_POLICIES.get(self.args.schedule_policy)(OrderInputs(
            self.cache.prefix_cache, self._seed, self.pace, self.cache.page_size,
            self.args.default_slo_ttft_ms / 1e3))
