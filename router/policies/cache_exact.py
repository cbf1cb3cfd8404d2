"""Prefers the worker that has cached most of the prompt, by the workers' own KV events, weighed against its queue.

The KV index is exact: workers publish every page that enters or leaves their prefix caches
(``kv_event_watch``), so evictions, restarts and other routers' traffic are seen. The pages of a prompt are
exact for token ids, which are hashed as the workers hash them; for texts and chats they are learnt from the
workers' answers (``text_pages``). Two shorter memories fill the gaps: where a prompt was sent in the last
seconds (its pages are not stored yet), and where prompts were sent whose worker publishes nothing. Events overrule
both: of a worker that clears its cache, they forget everything. Pages that a worker has in host memory or storage count
at the cost of loading them (``--host-page-cost``, ``--storage-page-cost``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import nlargest
from operator import itemgetter
from random import Random
from typing import NamedTuple
from weakref import WeakSet

from ...common.api.kv_events import PROMPT_PAGES_HEADER, Cleared, Event, decode_pages
from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..net.body import RoutingFields
from ..net.request import Request
from ..net.upstream_response import ResponseHead
from ..workers.memory_report import MemoryReport
from ..workers.registry import Worker
from ..workers.roles import RECEIVER
from ..workers.tier_index import TierIndex, TierMatch
from .base import Amendment, Decision, Replication
from .cache_aware import BLOCK, MAX_BLOCKS, PrefixMemory, covered_bytes
from .load_view import LoadView
from .page_costs import (
    SAME_HOST_TRANSFER_COST,
    TRANSFER_COST,
    KVMemory,
    PageCosts,
    PrefixMatch,
)
from .text_pages import TextPages, text_blocks
from .token_pages import TokenPages, TokenSegments, split
from .worker_groups import WorkerGroups

_RECENT_BLOCKS = 2**16
_MAX_CANDIDATES = 8
"""Up to this many workers are all candidates for a pair; of more, this many with most of the prompt cached."""
_ASK_HEADER = PROMPT_PAGES_HEADER.encode() + b": ask\r\n"
_LINE = b"\r\n" + PROMPT_PAGES_HEADER.encode() + b":"


class Prompt(NamedTuple):
    """A request's prompt: its size and hashes."""

    size: int
    """Bytes of its text."""
    blocks: list[int]
    ids: TokenSegments | None
    """Its token ids, where the prompt came as such."""
    amendment: Amendment | None = None
    """Makes the worker name the prompt's pages in its answer, where the text is new."""

    def share_of(self, blocks: int) -> float:
        """Returns the share of the prompt, 0 to 1, that its first ``blocks`` are."""
        most = max(1, len(self.blocks) - 1)  # The last one is the whole text.
        blocks = min(blocks, most)
        return blocks / most if self.ids is not None else covered_bytes(blocks) / covered_bytes(most)


class PairDecision(NamedTuple):
    prefill: Worker
    decode: Worker
    reason: str


class CacheExact:
    """The lowest cost (page_costs.py), of one worker or of a pair together.

    Loads that differ by ``balance_abs_threshold`` and ``balance_rel_threshold`` overrule all else.
    """

    def __init__(self, *, balance_abs_threshold: int = 32, balance_rel_threshold: float = 1.0001,
                 max_tree_size: int = 2**24, host_cost: float | None = None, storage_cost: float | None = None,
                 shared: CacheExact | None = None):
        """``host_cost`` and ``storage_cost`` are those of loading a page, in pages computed; None: as workers report.
        ``shared``: another model's policy, whose KV index this one uses."""
        self._abs = balance_abs_threshold
        self._rel = balance_rel_threshold
        self._blocks_per_worker = max_tree_size // BLOCK
        self.tier_index: TierIndex = shared.tier_index if shared is not None else TierIndex()
        self.kv_index = self.tier_index.gpu
        self.texts = TextPages(4 * self._blocks_per_worker)
        self.tokens: TokenPages = shared.tokens if shared is not None else TokenPages()
        self.followed: set[int] = shared.followed if shared is not None else set()
        """Ids of workers whose KV events are followed now."""
        self._of_all_models: WeakSet[CacheExact] = shared._of_all_models if shared is not None else WeakSet()
        self._of_all_models.add(self)
        self._load_costs = host_cost, storage_cost
        self.costs = PageCosts(self.kv_index, host_cost, storage_cost)
        if shared is not None:
            self.costs.memory, self.costs.load_costs = shared.costs.memory, shared.costs.load_costs
        self.max_blocks = MAX_BLOCKS // 2
        self._loads = LoadView()
        self._decode_loads = LoadView()
        self._groups = WorkerGroups()
        self._pair_ids: tuple[frozenset[int], frozenset[int], frozenset[int]] = (frozenset(), frozenset(), frozenset())
        self.recent = PrefixMemory(1)  # Small, so one shard: each would number all workers again.
        self.recent_decode = PrefixMemory(1)
        """Separate from ``recent``: else every decision would make a new set of workers for its pair."""
        self.sent = PrefixMemory()

    def of_another_model(self) -> CacheExact:
        """Returns a policy for prompts of another model, whose texts have other pages; it shares the KV index."""
        return CacheExact(balance_abs_threshold=self._abs, balance_rel_threshold=self._rel,
                          max_tree_size=self._blocks_per_worker * BLOCK, host_cost=self._load_costs[0],
                          storage_cost=self._load_costs[1], shared=self)

    def on_followed(self, worker: Worker) -> None:
        """A worker's events are followed from now on: what is remembered of it without them counts no more."""
        self.followed.add(worker.id)
        for policy in self._of_all_models:
            policy.sent.forget(worker.id)

    def on_events(self, worker: Worker, events: Sequence[Event], *, native: bool = True) -> None:
        """Takes in a worker's events; ``native`` where its hashes are ``page_hashes``."""
        self.tier_index.apply(worker.id, events, native=native)
        if any(isinstance(event, Cleared) for event in events):
            self._forget_recent(worker)

    def on_cleared(self, worker: Worker) -> None:
        """A worker has no pages, or its pages are unknown."""
        self.tier_index.clear(worker.id)
        self._forget_recent(worker)

    def on_storage(self, worker: Worker, present: bool) -> None:
        """A followed worker reads and writes a storage of pages, or has none."""
        (self.tier_index.with_storage.add if present else self.tier_index.with_storage.discard)(worker.id)

    def _forget_recent(self, worker: Worker) -> None:
        for policy in self._of_all_models:
            policy.recent.forget(worker.id)
            policy.recent_decode.forget(worker.id)

    def on_lost(self, worker: Worker) -> None:
        """A worker's events are not followed any more."""
        self.followed.discard(worker.id)
        self.tier_index.clear(worker.id)

    def on_memory(self, worker: Worker, report: MemoryReport) -> None:
        """Notes a worker's report of its KV memory."""
        page_size = self.kv_index.page_sizes.get(worker.id, 16)
        self.costs.memory[worker.id] = KVMemory(report.used_tokens / page_size, report.total_tokens / page_size,
                                                report.num_requests, worker.peak_load)
        self.costs.on_load_costs(worker, report.host_page_cost, report.storage_page_cost)
        worker.peak_load = worker.load

    def on_no_memory(self, worker: Worker) -> None:
        """A worker does not report its KV memory."""
        self.costs.memory.pop(worker.id, None)
        self.costs.load_costs.pop(worker.id, None)

    def on_removed(self, worker: Worker) -> None:
        """Forgets a worker that left."""
        self.tier_index.forget(worker.id)
        self.followed.discard(worker.id)
        self.on_no_memory(worker)

    def cached_tokens(self, worker: Worker) -> int:
        """Tokens in a followed worker's prefix cache."""
        return self.kv_index.sizes.get(worker.id, 0) * self.kv_index.page_sizes.get(worker.id, 0)

    def replicate(self, replication: Replication) -> None:
        for memory in (self.recent, self.recent_decode, self.sent, self.texts):
            memory.replicate(replication)

    def sweep(self, now: float) -> None:
        """Called every second or so: what was sent two calls ago is cached by now, or is not."""
        self.recent.age()
        self.recent_decode.age()

    # ------------------------------------------------------------------ reading

    def read(self, request: Request, fields: RoutingFields | None) -> Prompt | None:
        """Returns the prompt; where its text is new, with the amendment that asks for its pages."""
        text = fields.routing_text if fields is not None else b""
        if not text:
            return None
        assert fields is not None
        seed = fields.namespace.seed
        if _is_token_ids(text):
            ids = split(text, seed)
            return Prompt(len(text), ids.keys, ids)
        blocks = text_blocks(text, seed)
        if self.texts.knows(blocks):
            return Prompt(len(text), blocks, None)
        reader = _PromptPagesReader(self.texts, blocks, len(text))
        return Prompt(len(text), blocks, None, Amendment(_ASK_HEADER, reader))

    # ------------------------------------------------------------------ decisions

    def choose(self, workers: Sequence[Worker], subject: Prompt | None) -> Decision:
        if len(workers) == 1:
            return Decision(workers[0], "only")
        loads = self._view(workers)
        loads.refresh(workers)
        if subject is None or self._imbalanced(loads):
            worker = loads.least_loaded(self.kv_index.sizes)
            if subject is not None:
                self._record(subject, worker, len(workers))
            return Decision(worker, "cache_miss" if subject is None else "balance")
        match = self._match(subject, self._groups.of(workers).ids)
        worker = self._cheapest(workers, loads, match)
        cached = match.cached.get(worker.id, 0)
        self.costs.record(match, cached)
        self._record(subject, worker, len(workers))
        return Decision(worker, "cache_hit" if cached else "cache_miss")

    def cached_share(self, workers: Sequence[Worker], subject: Prompt | None) -> float:
        """Returns the share of the prompt, 0 to 1, that the worker it would go to has cached; decides nothing."""
        loads = self._view(workers)
        loads.refresh(workers)
        if subject is None or self._imbalanced(loads):
            return 0.0
        match = self._match(subject, self._groups.of(workers).ids)
        worker = self._cheapest(workers, loads, match)
        return min(1.0, match.cached.get(worker.id, 0) / max(1.0, match.pages))

    def choose_pair(self, prefills: Sequence[Worker], decodes: Sequence[Worker],
                    subject: Prompt | None) -> PairDecision:
        """Chooses a prefill and a decode worker for one prompt together (neither sequence is empty)."""
        costs = self.costs
        match = PrefixMatch(costs.mean_pages, {})
        if subject is not None:
            match = self._match(subject, self._ids_of(prefills, decodes))
        anywhere, by_host = self._cheapest_decodes(decodes, match)
        best: tuple[float, Worker, Worker] | None = None
        for prefill in self._candidates(self._loads, prefills, match):
            transfer, decode = min(anywhere, by_host.get(prefill.endpoint.host, anywhere), key=itemgetter(0))
            cost = costs.prefill_cost(prefill, match) + transfer
            if best is None or cost < best[0]:
                best = cost, prefill, decode
        assert best is not None
        _, prefill, decode = best
        cached = match.cached.get(prefill.id, 0)
        self.costs.record(match, cached)
        if subject is not None:
            self._record(subject, prefill, len(prefills))
            self._record(subject, decode, len(decodes))
        hit = cached or match.cached.get(decode.id, 0)
        return PairDecision(prefill, decode, "cache_hit" if hit else "cache_miss")

    def _cheapest_decodes(self, decodes: Sequence[Worker],
                          match: PrefixMatch) -> tuple[tuple[float, Worker], dict[str, tuple[float, Worker]]]:
        """Returns the cheapest decode worker with its cost for prefill workers of any host, and by host the cheapest
        for prefill workers there.

        The cost of a decode worker depends on the prefill worker's host only: the best pair of 10 by 10 candidates
        takes 20 steps.
        """
        anywhere: tuple[float, Worker] | None = None
        by_host: dict[str, tuple[float, Worker]] = {}
        for worker in self._candidates(self._decode_loads, decodes, match):
            host, cost = worker.endpoint.host, self.costs.decode_cost(worker, match, SAME_HOST_TRANSFER_COST)
            if host not in by_host or cost < by_host[host][0]:
                by_host[host] = cost, worker
            cost = self.costs.decode_cost(worker, match, TRANSFER_COST)
            if anywhere is None or cost < anywhere[0]:
                anywhere = cost, worker
        assert anywhere is not None
        return anywhere, by_host

    def _candidates(self, loads: LoadView, workers: Sequence[Worker], match: PrefixMatch) -> list[Worker]:
        """Returns workers that could be in the best pair: all of a few, else those with most cached and some of the
        least loaded."""
        loads.refresh(workers)
        if self._imbalanced(loads):
            return [loads.least_loaded(self.kv_index.sizes)]
        if len(workers) <= _MAX_CANDIDATES:
            return sorted(workers, key=lambda worker: self.kv_index.sizes.get(worker.id, 0))
        least_loaded = loads.some_least_loaded(_MAX_CANDIDATES // 4, self.kv_index.sizes)
        by_id = self._groups.of(workers).by_id
        available = (item for item in match.cached.items() if item[0] in by_id)
        cached = nlargest(_MAX_CANDIDATES, available, key=itemgetter(1))
        return [*least_loaded, *(by_id[worker_id] for worker_id, _ in cached)]

    def _cheapest(self, workers: Sequence[Worker], loads: LoadView, match: PrefixMatch) -> Worker:
        """Returns the worker of the least cost; of equals one with some of the prompt cached, else the emptiest.

        Workers without any of the prompt differ by load alone, so only the least loaded of all is compared with those
        that have some: a thousand workers cost no more than those.
        """
        best = loads.least_loaded(self.kv_index.sizes)
        least, has_some = self.costs.prefill_cost(best, match), best.id in match.cached
        by_id = self._groups.of(workers).by_id
        for worker_id in match.cached:
            worker = by_id.get(worker_id)
            if worker is not None:
                cost = self.costs.prefill_cost(worker, match)
                if cost < least or (cost == least and not has_some):
                    best, least, has_some = worker, cost, True
        return best

    # ------------------------------------------------------------------ inside

    def _view(self, workers: Sequence[Worker]) -> LoadView:
        return self._decode_loads if workers[0].role == RECEIVER else self._loads

    def _imbalanced(self, loads: LoadView) -> bool:
        return loads.max_load - loads.min_load > self._abs and loads.max_load > loads.min_load * self._rel

    def _ids_of(self, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> frozenset[int]:
        """Returns the ids of both roles' workers; joining those of a thousand workers takes 30 us."""
        one, other = self._groups.of(prefills).ids, self._groups.of(decodes).ids
        if self._pair_ids[:2] != (one, other):
            self._pair_ids = one, other, one | other
        return self._pair_ids[2]

    def _match(self, prompt: Prompt, among: frozenset[int]) -> PrefixMatch:
        pages, cached, loads = self._cached_pages(prompt)
        for memory in (self.recent, self.recent_decode, self.sent):
            workers, depth = memory.longest_match(prompt.blocks, among)
            if depth:
                sent = round(pages * prompt.share_of(depth))
                for worker_id in workers:
                    cached[worker_id] = max(cached.get(worker_id, 0), sent)
                    if (load := loads.get(worker_id)) is not None:
                        loads[worker_id] = TierMatch(*(max(place, sent) for place in load))
        return PrefixMatch(pages, cached, max(cached.values(), default=0), loads)

    def _cached_pages(self, prompt: Prompt) -> tuple[float, dict[int, int], dict[int, TierMatch]]:
        """Returns the prompt's pages (an estimate for text), and how many leading ones each worker has, and where."""
        if prompt.ids is None:
            known = self.texts.pages_of(prompt.blocks)
            estimate = prompt.size / self.texts.bytes_per_page
            pages = max(estimate, known[-1][0]) if known else estimate
            return pages, *self.tier_index.match(lambda: ((page, (page_hash,)) for page, page_hash in known))
        ids = prompt.ids
        cached: dict[int, int] = {}
        loads: dict[int, TierMatch] = {}
        sizes = self.tier_index.page_sizes
        for size in sizes:
            of_size, loads_of_size = self.tier_index.match(partial(self.tokens.runs, ids, size))
            cached.update(of_size)
            loads.update(loads_of_size)
        return ids.num_tokens / max(sizes, default=16), cached, loads

    def _record(self, prompt: Prompt, worker: Worker, num_workers: int) -> None:
        recent = self.recent_decode if worker.role == RECEIVER else self.recent
        recent.record(prompt.blocks, worker.id, _RECENT_BLOCKS)
        if worker.id not in self.followed:
            self.sent.record(prompt.blocks, worker.id, min(self.max_blocks, self._blocks_per_worker * num_workers))


class _PromptPagesReader:
    """Learns a text's pages from an answer's head, and removes their line from it."""

    __slots__ = ("_texts", "_blocks", "_size")

    def __init__(self, texts: TextPages, blocks: list[int], size: int):
        self._texts = texts
        self._blocks = blocks
        self._size = size

    def __call__(self, head: ResponseHead) -> ResponseHead:
        start = head.data[:head.size].lower().find(_LINE)
        if start < 0:
            return head
        end = head.data.index(b"\r\n", start + 2)
        try:
            pages = decode_pages(head.data[start + len(_LINE):end].decode("latin-1").strip())
        except ValueError:
            return head
        self._texts.learn(self._blocks, self._size, pages)
        return ResponseHead(head.facts, head.data[:start] + head.data[end:], head.size - (end - start))


def _is_token_ids(text: bytes) -> bool:
    """Returns True if a prompt is a list of token ids, by its beginning."""
    return text.startswith(b"[") and text[1:9].lstrip()[:1].isdigit()


@ROUTING_POLICIES.register("cache_exact")
def make(args: PolicyArgs, rng: Random) -> CacheExact:
    return CacheExact(balance_abs_threshold=args.balance_abs_threshold,
                      balance_rel_threshold=args.balance_rel_threshold, max_tree_size=args.max_tree_size,
                      host_cost=args.host_page_cost, storage_cost=args.storage_page_cost)
