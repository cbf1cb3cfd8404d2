"""Prefer the worker that has cached most of the prompt, as the workers themselves tell, weighed against its queue.

What is where is exact: workers publish every page that enters or leaves their prefix caches
(``kv_watch``), so evictions, restarts and other routers' traffic are seen. Which pages a prompt comes to is
exact for token ids, which are hashed as the workers hash them; for texts and chats it is learnt from the
workers' answers (``text_pages``). Two shorter memories fill the gaps: where a prompt was sent in the last
seconds (its pages are not stored yet), and where prompts were sent whose worker publishes nothing. Both yield to what
a worker tells: of one that says it holds nothing, they are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from operator import itemgetter
from typing import NamedTuple
from weakref import WeakSet

from ...common.api.kv_events import PROMPT_PAGES_HEADER, Cleared, Event, decode_pages
from ..net.body import Peek
from ..net.request import Request
from ..net.upstream_answer import AnswerHead
from ..workers.kv_index import KVIndex
from ..workers.registry import Worker
from .base import Amendment, Decision, Replication
from .cache_aware import BLOCK, MOST_BLOCKS, PrefixMemory, covered_bytes
from .load_view import LoadView
from .page_costs import TRANSFER, TRANSFER_NEAR, Memory, PageCosts, Share
from .text_pages import TextPages, text_blocks
from .token_pages import Pieces, TokenPages, cut
from .worker_groups import WorkerGroups

_RECENT_BLOCKS = 2**16
_FEW = 8
_ASK = PROMPT_PAGES_HEADER.encode() + b": ask\r\n"
_LINE = b"\r\n" + PROMPT_PAGES_HEADER.encode() + b":"


class Prompt(NamedTuple):
    """What a request's prompt is known by."""

    size: int
    """Bytes of its text."""
    blocks: list[int]
    ids: Pieces | None
    """Token ids, where the prompt came as such."""
    amendment: Amendment | None = None
    """Makes the worker name the prompt's pages in its answer, where the text is new."""

    def share_of(self, blocks: int) -> float:
        """How much of the prompt its first ``blocks`` are."""
        most = max(1, len(self.blocks) - 1)  # The last one is the whole text.
        blocks = min(blocks, most)
        return blocks / most if self.ids is not None else covered_bytes(blocks) / covered_bytes(most)


class PairDecision(NamedTuple):
    prefill: Worker
    decode: Worker
    reason: str


class CacheExact:
    """The lowest cost (page_costs.py), of one worker or of a pair together.

    Loads that drift apart by ``balance_abs_threshold`` and ``balance_rel_threshold`` overrule it all.
    """

    def __init__(self, *, balance_abs_threshold: int = 32, balance_rel_threshold: float = 1.0001,
                 max_tree_size: int = 2**24, beside: CacheExact | None = None):
        """``beside``: it is told what the workers have; this one looks it up there."""
        self._abs = balance_abs_threshold
        self._rel = balance_rel_threshold
        self._blocks_per_worker = max_tree_size // BLOCK
        self.residency: KVIndex = beside.residency if beside is not None else KVIndex()
        self.texts = TextPages(4 * self._blocks_per_worker)
        self.tokens: TokenPages = beside.tokens if beside is not None else TokenPages()
        self.followed: set[int] = beside.followed if beside is not None else set()
        """Ids of workers whose events are followed now."""
        self._of_all_models: WeakSet[CacheExact] = beside._of_all_models if beside is not None else WeakSet()
        self._of_all_models.add(self)
        self.costs = PageCosts(self.residency)
        if beside is not None:
            self.costs.memory = beside.costs.memory
        self.most_blocks = MOST_BLOCKS // 2
        self._loads = LoadView()
        self._decode_loads = LoadView()
        self._fleets = WorkerGroups()
        self._joined: tuple[frozenset[int], frozenset[int], frozenset[int]] = (frozenset(), frozenset(), frozenset())
        self.recent = PrefixMemory(1)  # Small, so in one piece: each would number all workers anew.
        self.recent_decode = PrefixMemory(1)
        """Apart from the others: a set of holders for each pair would be made anew with every decision."""
        self.sent = PrefixMemory()

    def of_another_model(self) -> CacheExact:
        """A policy for prompts of another model, whose texts come to other pages: what workers tell is shared."""
        return CacheExact(balance_abs_threshold=self._abs, balance_rel_threshold=self._rel,
                          max_tree_size=self._blocks_per_worker * BLOCK, beside=self)

    def on_followed(self, worker: Worker) -> None:
        """A worker's events are followed from now on: what is remembered of it without them counts no more."""
        self.followed.add(worker.id)
        for policy in self._of_all_models:
            policy.sent.forget(worker.id)

    def on_events(self, worker: Worker, events: Sequence[Event], *, native: bool = True) -> None:
        """Takes in a worker's events; ``native`` where its hashes are ``page_hashes``."""
        self.residency.apply(worker.id, events, native=native)
        if any(isinstance(event, Cleared) for event in events):
            self._forget_sent(worker)

    def on_cleared(self, worker: Worker) -> None:
        """A worker has no pages, or its pages are unknown."""
        self.residency.clear(worker.id)
        self._forget_sent(worker)

    def _forget_sent(self, worker: Worker) -> None:
        for policy in self._of_all_models:
            policy.recent.forget(worker.id)
            policy.recent_decode.forget(worker.id)

    def on_lost(self, worker: Worker) -> None:
        """A worker's events are not followed any more."""
        self.followed.discard(worker.id)
        self.residency.clear(worker.id)

    def on_memory(self, worker: Worker, used_tokens: int, total_tokens: int) -> None:
        """Notes a worker's report of its KV memory."""
        page_size = self.residency.page_sizes.get(worker.id, 16)
        self.costs.memory[worker.id] = Memory(used_tokens / page_size, total_tokens / page_size)

    def on_no_memory(self, worker: Worker) -> None:
        """A worker does not report its KV memory."""
        self.costs.memory.pop(worker.id, None)

    def on_removed(self, worker: Worker) -> None:
        """Forgets a worker that left."""
        self.residency.forget(worker.id)
        self.followed.discard(worker.id)
        self.costs.memory.pop(worker.id, None)

    def cached_tokens(self, worker: Worker) -> int:
        """Tokens in a followed worker's prefix cache."""
        return self.residency.sizes.get(worker.id, 0) * self.residency.page_sizes.get(worker.id, 0)

    def replicate(self, replication: Replication) -> None:
        for memory in (self.recent, self.recent_decode, self.sent, self.texts):
            memory.replicate(replication)

    def sweep(self, now: float) -> None:
        """Called every second or so: what was sent two calls ago is cached by now, or is not."""
        self.recent.turn()
        self.recent_decode.turn()

    # ------------------------------------------------------------------ what a request is

    def read(self, request: Request, found: Peek | None) -> Prompt | None:
        """Returns the prompt; where its text is new, with the amendment that asks for its pages."""
        text = found.routing_text if found is not None else b""
        if not text:
            return None
        assert found is not None
        if _is_ids(text):
            ids = cut(text)
            return Prompt(len(text), ids.keys, ids)
        blocks = text_blocks(text)
        if self.texts.knows(blocks):
            return Prompt(len(text), blocks, None)
        return Prompt(len(text), blocks, None, Amendment(_ASK, _PromptPagesReader(self.texts, blocks, len(text))))

    # ------------------------------------------------------------------ decisions

    def choose(self, workers: Sequence[Worker], subject: Prompt | None) -> Decision:
        if len(workers) == 1:
            return Decision(workers[0], "only")
        loads = self._view(workers)
        loads.look(workers)
        if subject is None or self._drifted(loads):
            worker = loads.lightest(self.residency.sizes)
            if subject is not None:
                self._record(subject, worker, len(workers))
            return Decision(worker, "cache_miss" if subject is None else "balance")
        share = self._share(subject, self._fleets.of(workers).ids)
        worker = self._cheapest(workers, loads, share)
        cached = share.cached.get(worker.id, 0)
        self.costs.note(share, cached)
        self._record(subject, worker, len(workers))
        return Decision(worker, "cache_hit" if cached else "cache_miss")

    def cached_share(self, workers: Sequence[Worker], subject: Prompt | None) -> float:
        """The share of the prompt, 0 to 1, that the worker it would go to has cached; decides nothing."""
        loads = self._view(workers)
        loads.look(workers)
        if subject is None or self._drifted(loads):
            return 0.0
        share = self._share(subject, self._fleets.of(workers).ids)
        worker = self._cheapest(workers, loads, share)
        return min(1.0, share.cached.get(worker.id, 0) / max(1.0, share.pages))

    def choose_pair(self, prefills: Sequence[Worker], decodes: Sequence[Worker],
                    subject: Prompt | None) -> PairDecision:
        """A prefill and a decode worker for one prompt, chosen together (neither sequence is empty)."""
        costs = self.costs
        share = Share(costs.mean_pages, {})
        if subject is not None:
            share = self._share(subject, self._both(prefills, decodes))
        far, near = self._cheapest_decodes(decodes, share)
        best: tuple[float, Worker, Worker] | None = None
        for prefill in self._candidates(self._loads, prefills, share):
            transfer, decode = min(far, near.get(prefill.endpoint.host, far), key=itemgetter(0))
            cost = costs.computing(prefill, share) + transfer
            if best is None or cost < best[0]:
                best = cost, prefill, decode
        assert best is not None
        _, prefill, decode = best
        cached = share.cached.get(prefill.id, 0)
        self.costs.note(share, cached)
        if subject is not None:
            self._record(subject, prefill, len(prefills))
            self._record(subject, decode, len(decodes))
        hit = cached or share.cached.get(decode.id, 0)
        return PairDecision(prefill, decode, "cache_hit" if hit else "cache_miss")

    def _cheapest_decodes(self, decodes: Sequence[Worker],
                          share: Share) -> tuple[tuple[float, Worker], dict[str, tuple[float, Worker]]]:
        """Costs of the cheapest decode worker for any prefill worker, and of the cheapest one for those on its host.

        What a decode worker costs beside a prefill worker depends on their hosts alone: the best pair of 10 by 10
        candidates is found in 20 steps.
        """
        far: tuple[float, Worker] | None = None
        near: dict[str, tuple[float, Worker]] = {}
        for worker in self._candidates(self._decode_loads, decodes, share):
            host, cost = worker.endpoint.host, self.costs.decoding(worker, share, TRANSFER_NEAR)
            if host not in near or cost < near[host][0]:
                near[host] = cost, worker
            cost = self.costs.decoding(worker, share, TRANSFER)
            if far is None or cost < far[0]:
                far = cost, worker
        assert far is not None
        return far, near

    def _candidates(self, loads: LoadView, workers: Sequence[Worker], share: Share) -> list[Worker]:
        """Those that could be in the best pair: all of a few, else the holders of most and some of the lightest."""
        loads.look(workers)
        if self._drifted(loads):
            return [loads.lightest(self.residency.sizes)]
        if len(workers) <= _FEW:
            return sorted(workers, key=lambda worker: self.residency.sizes.get(worker.id, 0))
        light = loads.light(_FEW // 4, self.residency.sizes)
        by_id = self._fleets.of(workers).by_id
        held = nlargest(_FEW, (item for item in share.cached.items() if item[0] in by_id), key=itemgetter(1))
        return [*light, *(by_id[worker_id] for worker_id, _ in held)]

    def _cheapest(self, workers: Sequence[Worker], loads: LoadView, share: Share) -> Worker:
        """By cost, then by how empty the cache is.

        Workers that hold nothing of the prompt differ by load alone, so only the lightest of all is
        looked at beside those that hold some: a thousand workers cost no more than their holders.
        """
        best = loads.lightest(self.residency.sizes)
        least, holds = self.costs.computing(best, share), best.id in share.cached
        by_id = self._fleets.of(workers).by_id
        for worker_id in share.cached:
            worker = by_id.get(worker_id)
            if worker is not None:
                cost = self.costs.computing(worker, share)
                if cost < least or (cost == least and not holds):
                    best, least, holds = worker, cost, True
        return best

    # ------------------------------------------------------------------ inside

    def _view(self, workers: Sequence[Worker]) -> LoadView:
        return self._decode_loads if workers[0].role == "decode" else self._loads

    def _drifted(self, loads: LoadView) -> bool:
        return loads.most - loads.least > self._abs and loads.most > loads.least * self._rel

    def _both(self, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> frozenset[int]:
        """The ids of two fleets; joining those of a thousand workers takes 30 us."""
        one, other = self._fleets.of(prefills).ids, self._fleets.of(decodes).ids
        if self._joined[:2] != (one, other):
            self._joined = one, other, one | other
        return self._joined[2]

    def _share(self, prompt: Prompt, among: frozenset[int]) -> Share:
        pages, cached = self._resident(prompt)
        for memory in (self.recent, self.recent_decode, self.sent):
            owners, depth = memory.longest(prompt.blocks, among)
            if depth:
                for worker_id in owners:
                    cached[worker_id] = max(cached.get(worker_id, 0), round(pages * prompt.share_of(depth)))
        return Share(pages, cached, max(cached.values(), default=0))

    def _resident(self, prompt: Prompt) -> tuple[float, dict[int, int]]:
        """The prompt's pages (an estimate for text), and those of them that workers hold."""
        if prompt.ids is None:
            chain = self.texts.pages_of(prompt.blocks)
            estimate = prompt.size / self.texts.bytes_per_page
            pages = max(estimate, chain[-1][0]) if chain else estimate
            return pages, self.residency.depths((page, (hashed,)) for page, hashed in chain)
        cached: dict[int, int] = {}
        sizes = set(self.residency.page_sizes.values())
        for size in sizes:
            cached.update(self.residency.depths(self.tokens.runs(prompt.ids, size)))
        return prompt.ids.num_tokens / max(sizes, default=16), cached

    def _record(self, prompt: Prompt, worker: Worker, fleet: int) -> None:
        recent = self.recent_decode if worker.role == "decode" else self.recent
        recent.record(prompt.blocks, worker.id, _RECENT_BLOCKS)
        if worker.id not in self.followed:
            self.sent.record(prompt.blocks, worker.id, min(self.most_blocks, self._blocks_per_worker * fleet))


class _PromptPagesReader:
    """Learns a text's pages from an answer's head, and removes their line from it."""

    __slots__ = ("_texts", "_blocks", "_size")

    def __init__(self, texts: TextPages, blocks: list[int], size: int):
        self._texts = texts
        self._blocks = blocks
        self._size = size

    def __call__(self, head: AnswerHead) -> AnswerHead:
        start = head.data[:head.size].lower().find(_LINE)
        if start < 0:
            return head
        end = head.data.index(b"\r\n", start + 2)
        try:
            pages = decode_pages(head.data[start + len(_LINE):end].decode("latin-1").strip())
        except ValueError:
            return head
        self._texts.learn(self._blocks, self._size, pages)
        return AnswerHead(head.facts, head.data[:start] + head.data[end:], head.size - (end - start))


def _is_ids(text: bytes) -> bool:
    """Whether a prompt is a list of token ids, by its beginning."""
    return text.startswith(b"[") and text[1:9].lstrip()[:1].isdigit()
