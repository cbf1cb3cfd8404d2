"""What prefill keeps of requests that it has computed, until decode has told that they go on.

A decode server may die between the last page's arrival and its first token. The router then pairs another decode
server with this prefill server and names the room of the attempt before: the pages are sent once more, with the same
first token and log-probabilities, and no forward pass runs. Whole pages stay in the radix tree and the partly filled
last one beside it, so everything kept gives way to requests that need the memory; what is missing then is computed
again.

A kept token goes to nobody but the request that it was drawn for: a request of equal content draws its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec
import numpy as np

from ..common.distributed.agreement import Agreeing
from ..common.kvcache.manager import KVCacheManager
from ..common.kvcache.partial_pages import PartialPage
from ..common.request.req import Req
from ..kvtransfer.protocol.messages import PrefillResult
from ..kvtransfer.sender.kv_sender import KVSender


@dataclass
class RetainedPrompt:
    """A computed prompt. ``until``: when it is let go; None while its first transfer is under way. ``watched``: the
    transfer is done, and decode's word is awaited."""

    prompt: np.ndarray
    asked: tuple[object, ...]
    tail: PartialPage | None
    result: PrefillResult
    number: int
    until: float | None = None
    watched: bool = False


class RetainedPrompts:
    """By room. All ranks of a group, fed the same calls, hold equal ones."""

    def __init__(self, cache: KVCacheManager, sender: KVSender, group: Agreeing, seconds: float):
        self._cache = cache
        self._sender = sender
        self._group = group
        self._numbers = itertools.count()
        self._seconds = seconds
        self._kept: dict[int, RetainedPrompt] = {}
        self.num_reused = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, room: int, req: Req, result: PrefillResult) -> None:
        """``req`` is computed and its transfer under way. Hidden states and embeddings in place of tokens are not kept:
        the ones are large, and the radix tree knows pages by their tokens."""
        assert req.page_table is not None
        if self._seconds == 0 or req.page_table.node is None or req.hidden is not None:
            return
        tail = req.page_table.partial_page or self._cache.keep_partial_page(req.page_table, req.prompt)
        self._kept[room] = RetainedPrompt(req.prompt, _asked(req), tail, result, next(self._numbers))

    def failed(self, room: int, now: float, *, wanted: bool) -> None:
        """The transfer failed; ``wanted``: another attempt may come."""
        if (kept := self._kept.get(room)) is not None:
            if wanted:
                kept.until = now + self._seconds
            else:
                self.drop(room)

    def done(self, room: int, now: float) -> None:
        """The transfer is done; instead of the sender's ``forget``."""
        if (kept := self._kept.get(room)) is None:
            self._sender.forget(room)
            return
        self._sender.watch(room)
        kept.watched, kept.until = True, now + self._seconds

    def reuse(self, req: Req) -> PrefillResult | None:
        """What the attempt before ``req`` has computed; its pages are the request's hold then."""
        assert req.bootstrap is not None
        room = req.bootstrap.previous
        if room is None or (kept := self._kept.get(room)) is None:
            return None
        if not np.array_equal(kept.prompt, req.prompt) or kept.asked != _asked(req):
            return None
        if (hold := self._cache.match_full_prompt(req.prompt, kept.tail)) is None:
            self.drop(room)
            return None
        self._remove(room)
        req.page_table = hold
        self.num_reused += 1
        return msgspec.structs.replace(kept.result, num_cached_tokens=req.num_prompt_tokens)

    def drop(self, room: int) -> None:
        """Nobody will ask for it again. Harmless when it is not there."""
        if (kept := self._kept.get(room)) is not None:
            self._remove(room)
            if kept.tail is not None:
                self._cache.drop_partial_page(kept.tail)

    def clear(self) -> None:
        """Forget all: their first tokens, and what is in their pages, are of other weights than the next attempt's."""
        for room in list(self._kept):
            self.drop(room)

    def sweep(self, now: float) -> None:
        """Let go of what decode has taken over on all ranks, and of what is overdue."""
        watched = [room for room, kept in self._kept.items() if kept.watched]
        if watched:
            taken = self._group.least("kept", [self._kept[room].number for room in watched],
                                      np.array([[self._sender.taken(room)] for room in watched], np.int64), (False,))
            for room, (gone,) in zip(watched, taken):
                if gone:
                    self.drop(room)
        for room in [room for room, kept in self._kept.items() if kept.until is not None and kept.until <= now]:
            self.drop(room)

    def _remove(self, room: int) -> None:
        if self._kept.pop(room).watched:
            self._sender.unwatch(room)


def _asked(req: Req) -> tuple[object, ...]:
    """All of a request beside its prompt that its first token's choice and report depend on."""
    processor = None if req.processor is None else req.processor.path
    return req.sampling, req.stop_ids, req.logprobs, req.logprob_start, processor
