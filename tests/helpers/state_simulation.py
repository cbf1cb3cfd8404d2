"""Schedulers over a prefix cache with a state group, with a model that is a hash: the state after a token is a number
that follows from all tokens up to it, and cannot be made of anything but the state before. So a state that is lost,
stale, owned twice or of other tokens is seen when it is read."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy as np
import torch

from baton.common.api.drafts import Drafts
from baton.common.api.messages import Generate
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import ScheduleArgs
from baton.common.config.server.tiers import WRITE_POLICIES
from baton.common.distributed.tp import TPGroup
from baton.common.kvcache.cache_group import ABSENT
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.pool import KVPool
from baton.common.kvcache.state_group import StateGroup
from baton.common.kvcache.tiers import host
from baton.common.kvcache.tiers.base import TierContext
from baton.common.kvcache.tiers.with_states import HybridHostTier
from baton.common.request.req import Req
from baton.common.request.step_input import StepInput
from baton.common.request.step_output import StepOutput
from baton.common.scheduler.batcher import Batcher
from baton.common.scheduler.drafting import Drafting
from baton.common.scheduler.preemption.copy_rates import AgreedRates
from baton.common.scheduler.tier_loads import TierLoads
from baton.tests.helpers.late_copies import LateCopies

MODULUS = (1 << 61) - 1
_LOST = -7  # in a page that was freed


class SimulatedServer:
    """One server. A step is computed when the next one is launched, as with overlapped scheduling, so that what is
    freed in between is overwritten first (``overwrites``: another process may write into free pages at once)."""

    def __init__(self, seed: int, *, page_size: int, pages: int, states: int, overwrites: bool,
                 drafts: bool = False, tier: bool = False):
        """``tier``: pages and states are kept in host memory, whose copies end late."""
        self.rng, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.page_size = page_size
        self.group = StateGroup(states, page_size, in_flight=overwrites)
        self.cache = KVCacheManager(pages, page_size, True, [self.group])
        layouts = (KVLayout((1,), 1, 1, page_size, "float32"),
                   KVLayout((1,), 1, -(-2 // page_size), page_size, "float32", "state", retained_tokens=2))
        pools = [KVPool(layout, count, "cpu") for layout, count in zip(layouts, (pages, states))]
        self.states = pools[1].groups[0].view(states, -1)[:, :2].view(torch.int64).numpy()[:, 0]
        self.states[:] = _LOST
        self.tier, self.copies = None, []
        loads = None
        if tier:
            def late_copies(context: TierContext, memory: Any) -> LateCopies:
                self.copies.append(LateCopies(context, memory))
                return self.copies[-1]

            with mock.patch.object(host, "HostPageCopies", late_copies):
                self.tier = HybridHostTier(TierContext(
                    pools[0], sum(pool.groups[0].nbytes for pool in pools), "-", further=pools[1:]))
            self.cache.attach_tier(self.tier, WRITE_POLICIES.get("write_through")(), shared=False)
            loads = TierLoads(self.cache, self.tier, TPGroup(), AgreedRates(1e9, TPGroup()))
        self.overwrites = overwrites
        self.batcher = Batcher(self.cache, ScheduleArgs(
            max_running_requests=6, chunked_prefill_size=self.rng.choice((5, 16, 23)), schedule_conservativeness=0.0),
            drafting=Drafting(_Drafter(self.rng), self.cache, 5) if drafts else None, loads=loads)
        self.num_checked = 0
        self._in_flight: list[_Work] = []

    def launch(self, step: StepInput) -> None:
        """Records what a step reads and writes, by the page tables of now, and computes the step before."""
        work = [_Work(chunk.req, chunk.start, chunk.stop, self._table(chunk.req), step.drafts.get(index))
                for index, chunk in enumerate(step.chunks)]
        self.finish_step()
        self._in_flight = work

    def _table(self, req: Req) -> dict[int, int]:
        assert req.page_table is not None
        own, = req.page_table.groups
        return {own.first + i: int(page) for i, page in enumerate(own.ids) if page != ABSENT}

    def end_iteration(self) -> None:
        """Begins the copies of what the step has computed."""
        if self.tier is not None:
            self.finish_step()
            self.batcher.flush_stores()
            for copies in self.copies:
                copies.run_some(self.numbers)

    def finish_step(self) -> None:
        work, self._in_flight = self._in_flight, []
        if self.overwrites:
            for page in np.flatnonzero(self.group.allocator._is_free):
                self.states[page] = _LOST
        for each in work:
            self._compute(each)

    def _compute(self, work: _Work) -> None:
        """Goes on from the state before the chunk as the model's layers do: it is cut at the end of the page that it
        begins in, and of its last full page."""
        size = self.page_size
        if work.drafts is not None:
            assert work.stop == work.start + 1 and len(work.draft_pages) == len(work.drafts)
        state = 1 if work.start == 0 else int(self.states[work.pages[(work.start - 1) // size]])
        expected = state_after(work.tokens[:work.start])
        assert state == expected, f"{work.rid} goes on after {work.start} tokens from a state of others"
        self.num_checked += 1
        cuts = {-(-work.start // size) * size, work.stop // size * size, work.stop}
        at = work.start
        for end in sorted(cuts):
            page = (end - 1) // size
            if at < end <= work.stop and (end == work.stop or page in work.pages):
                state = state_after(work.tokens[at:end], state)
                self.states[work.pages[page]] = state
                at = end
        for token, page in zip(work.drafts.tokens if work.drafts else (), work.draft_pages):
            state = state_after([token], state)
            self.states[page] = state

    def check_snapshots(self) -> None:
        """All states of the prefix cache are those after the tokens of their nodes."""
        prefix_cache = self.cache.prefix_cache
        assert prefix_cache is not None
        stack = [(root, np.empty(0, np.int32)) for root in prefix_cache._roots.values()]
        while stack:
            node, tokens = stack.pop()
            for index, page in enumerate(node.group_pages[0] if node.group_pages else ()):
                if page != ABSENT:
                    known = np.concatenate((tokens, node.tokens[:(index + 1) * self.page_size]))
                    assert self.states[page] == state_after(known.tolist()), "a snapshot is of other tokens"
                    self.num_checked += 1
            stack += [(child, np.concatenate((tokens, node.tokens))) for child in node.children.values()]


class _Drafter:
    """Drafts what follows, and errs now and then."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def propose(self, reqs: list[Req], limits: list[int]) -> list[Drafts | None]:
        return [self._propose(req.tokens.view().tolist(), self.rng.randrange(limit + 1))
                for req, limit in zip(reqs, limits)]

    def _propose(self, tokens: list[int], count: int) -> Drafts | None:
        drafts: list[int] = []
        for _ in range(count):
            drafts.append((state_after(tokens + drafts) + (self.rng.random() < 0.2)) % 3)
        return Drafts(tuple(drafts)) if drafts else None

    def on_verified(self, req: Req, drafts: Drafts, num_accepted: int) -> None: ...

    def on_end(self, reqs: list[Req]) -> None: ...


class _Work:
    """A chunk of a request, with what its tables were when it was launched."""

    def __init__(self, req: Req, start: int, stop: int, pages: dict[int, int], drafts: Drafts | None):
        self.rid, self.start, self.stop, self.pages, self.drafts = req.rid, start, stop, pages, drafts
        self.draft_pages = req.page_table.groups[0].drafts.tolist()
        self.tokens = req.tokens.view(0, stop).tolist()


def state_after(tokens: list[int], state: int = 1) -> int:
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % MODULUS
    return state


class StateTraffic:
    """Random requests whose prompts begin as earlier answers ended: at a unified server, or at a pair of servers, where
    the state after the prompt is handed over."""

    def __init__(self, seed: int, *, pair: bool, tier: bool = False):
        self.rng = random.Random(seed)
        size = self.rng.choice((1, 2, 4, 8))
        sizes = {"page_size": size, "pages": -(-240 // size) + 8}
        self.decode = SimulatedServer(seed, states=self.rng.choice((16, 24, 60)), overwrites=pair, drafts=True,
                                      tier=tier, **sizes)
        self.prefill = SimulatedServer(seed + 1, states=12, overwrites=False, **sizes) if pair else None
        self.transcripts: list[list[int]] = [[]]
        self.live: dict[str, Req] = {}
        self.prompts: dict[str, Req] = {}
        self.count = self.num_handed_over = self.num_retracted = self.num_hits = self.num_ended = 0
        self.num_accepted = self.num_refused = 0

    @property
    def num_checked(self) -> int:
        return self.decode.num_checked + (self.prefill.num_checked if self.prefill else 0)

    @property
    def num_loaded(self) -> int:
        """States that came back from host memory."""
        return self.decode.tier.states.counters.loaded if self.decode.tier else 0

    def step(self) -> None:
        rng, batcher = self.rng, self.decode.batcher
        if len(self.live) < 9 and rng.random() < 0.25:
            self._arrive()
        if self.live and rng.random() < 0.02:
            self._abort(rng.choice(list(self.live)))
        if rng.random() < 0.02:
            group = self.decode.group
            self.decode.cache._free_in_group(0, min(group.num_available, group.num_free + rng.randrange(1, 9)))
        if rng.random() < 0.004:
            self.decode.finish_step()
            batcher.retraction.retract_all()
            self.num_retracted += 1
        self._iterate()

    def _iterate(self) -> None:
        self.decode.batcher.poll_loads(0.0)
        if self.prefill is not None:
            self._prefill_step(self.prefill)
        self._decode_step()
        self.decode.end_iteration()

    def _message(self, prompt: list[int], count: int) -> Req:
        message = Generate(f"r{self.count}", prompt, SamplingParams(max_new_tokens=count))
        return Req.from_message(message, eos_ids=frozenset(), now=0.0, timeout=1e9)

    def _arrive(self) -> None:
        rng = self.rng
        stem = rng.choice(self.transcripts)
        prompt = [*stem[:rng.randrange(len(stem) + 1)][:70], *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))]
        self.count += 1
        req = self._message(prompt, rng.randrange(1, 30))
        if self.prefill is None:
            self.decode.batcher.enqueue(req)
        elif not self._reserve(req):
            return
        self.live[req.rid] = req

    def _reserve(self, req: Req) -> bool:
        """Decode reserves pages for the prompt and the first token, and prefill computes it."""
        assert self.prefill is not None
        cache, count = self.decode.cache, req.num_prompt_tokens
        if not self.decode.batcher.has_slot:
            return False
        table = cache.match_incoming(req.prompt)
        if not cache.reserve(table, req.max_tokens) or not cache.allocate_incoming(table, count, 1):
            cache.release(table)
            return False
        req.page_table, req.num_computed_tokens = table, count
        self.decode.batcher.add_transferring(req)
        half = self.prompts[req.rid] = self._message(req.prompt.tolist(), 1)
        self.prefill.batcher.enqueue(half)
        return True

    def _prefill_step(self, server: SimulatedServer) -> None:
        batch = server.batcher.next_prefill()
        if batch is None:
            server.finish_step()
            return
        server.launch(batch)
        server.batcher.mark_launched(batch)
        for chunk in batch.chunks:
            if chunk.samples:
                server.finish_step()
                self._hand_over(server, chunk.req)

    def _hand_over(self, server: SimulatedServer, half: Req) -> None:
        """Copies the state after a prompt to decode's page, unless decode has aborted the request."""
        page = (half.num_prompt_tokens - 1) // server.page_size
        req = self.live.get(half.rid)
        if req is not None:
            source, = half.page_table.groups[0].span(page, page + 1)
            own = req.page_table.groups[0]
            target, = own.span(page, page + 1)
            if own.owned[page - own.first]:
                self.decode.states[target] = server.states[source]
            self._first_token(req)
            self.num_handed_over += 1
        del self.prompts[half.rid]
        server.batcher.finish(half)

    def _first_token(self, req: Req) -> None:
        batcher = self.decode.batcher
        batcher.start_decode(req)
        req.append_token(self._token(req))
        if req.finish is not None:
            self._end(req)

    def _token(self, req: Req) -> int:
        return state_after(req.tokens.view().tolist()) % 3

    def _decode_step(self) -> None:
        server, batcher = self.decode, self.decode.batcher
        batch = batcher.next_prefill()
        if batch is None:
            if not batcher.allocate_running():
                server.finish_step()
                batcher.retraction.retract_decode()
                self.num_retracted += 1
            batch = batcher.next_decode(drafts=self.rng.random() < 0.6)
        if batch is None:
            server.finish_step()
            return
        chunks = list(batch.chunks)
        for chunk in chunks:
            self.num_hits += chunk.start > 0 and chunk.req.num_output_tokens == 0
        server.launch(batch)
        batcher.mark_launched(batch)
        if batch.drafts:
            self._verify(batch)
            return
        for chunk in chunks:
            if chunk.samples:
                chunk.req.append_pending(self._token(chunk.req))
                if chunk.req.finish is not None:
                    self._end(chunk.req)

    def _verify(self, step: StepInput) -> None:
        """Accepts drafts up to the first that is wrong, once the step has run."""
        self.decode.finish_step()
        runs = []
        for index, req in enumerate(step.reqs):
            run = [self._token(req)]
            for draft in step.drafts[index].tokens if index in step.drafts else ():
                if draft != run[-1]:
                    self.num_refused += 1
                    break
                run.append(state_after([*req.tokens.view().tolist(), *run]) % 3)
            self.num_accepted += len(run) - 1
            runs.append(run)
        counts = np.array([len(run) for run in runs])
        output = StepOutput(list(range(len(runs))), counts.tolist(), [token for run in runs for token in run],
                            num_drafts=[len(step.drafts.get(index, ())) for index in range(len(runs))])
        batcher = self.decode.batcher
        batcher.drafting.count(step, output, counts)
        for req, run in zip(step.reqs, runs):
            req.append_pending(*run)
        batcher.mark_verified(step, counts, [run[-1] for run in runs])
        for req in step.reqs:
            if req.finish is not None:
                self._end(req)

    def _end(self, req: Req) -> None:
        self.decode.finish_step()
        del self.live[req.rid]
        self.num_ended += 1
        self.transcripts = [*self.transcripts[-30:], req.tokens.view().tolist()]
        self.decode.batcher.finish(req)

    def _abort(self, rid: str) -> None:
        if rid not in self.prompts:  # else late writes would have to be waited for
            self.decode.finish_step()
            self.decode.batcher.finish(self.live.pop(rid))

    def end(self) -> None:
        """Ends all requests, and checks that no page is left."""
        for _ in range(5000):
            if not self.live and not self.prompts:
                break
            self._iterate()
        for server in filter(None, (self.decode, self.prefill)):
            server.finish_step()
            assert server.batcher.idle
            server.cache.check_integrity()
            assert server.group.num_allocated == server.group.num_in_tables == server.group.num_reserved == 0
            server.check_snapshots()
