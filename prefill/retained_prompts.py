"""Retains prompts that prefill has computed, until decode has acknowledged their first token.

A decode server may die between the last page's arrival and its first token. The router then pairs another decode
server with this prefill server and names the room of the earlier attempt: the pages are sent again, with the same first
token and log-probabilities, and no forward pass runs. Whole pages stay in the radix tree, and the last one, filled in
part, outside of it, so requests that need the memory may evict all of them; a missing prompt is computed again.

A retained token is used only for the request that it was sampled for: a request of equal content samples its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec
import numpy as np

from ..common.distributed.agreement import RankAgreement
from ..common.kvcache.manager import KVCacheManager
from ..common.kvcache.partial_pages import PartialPage
from ..common.request.req import Req
from ..kvtransfer.protocol.messages import PrefillResult
from ..kvtransfer.sender.kv_sender import KVSender


@dataclass
class RetainedPrompt:
    """A computed prompt. It is dropped at time ``expires``; None while its first transfer is in flight.
    ``transferred``: the transfer is done, and decode's acknowledgement is awaited."""

    token_ids: np.ndarray
    parameters: tuple[object, ...]
    partial_page: PartialPage | None
    result: PrefillResult
    number: int
    expires: float | None = None
    transferred: bool = False


class RetainedPrompts:
    """Retained prompts by bootstrap room. All ranks of a group, given the same calls, have the same ones."""

    def __init__(self, cache: KVCacheManager, sender: KVSender, group: RankAgreement, seconds: float):
        self._cache = cache
        self._sender = sender
        self._group = group
        self._numbers = itertools.count()
        self._seconds = seconds
        self._prompts: dict[int, RetainedPrompt] = {}
        self.num_reused = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, room: int, req: Req, result: PrefillResult) -> None:
        """Retains ``req``, which is computed and whose transfer is in flight. Requests with hidden states or experts,
        which are large, or with embeddings in place of tokens, which the radix tree cannot index, are not retained."""
        assert req.page_table is not None
        if self._seconds == 0 or req.page_table.node is None or req.hidden is not None or req.routed is not None:
            return
        self._cache.commit(req.page_table, req.tokens.view(0, req.num_prompt_tokens + self._cache.lookahead))
        partial_page = req.page_table.partial_page or self._cache.keep_partial_page(req.page_table, req.prompt)
        self._prompts[room] = RetainedPrompt(req.prompt, _parameters_of(req), partial_page, result, next(self._numbers))

    def on_failed(self, room: int, now: float, *, may_retry: bool) -> None:
        """Handles the failure of a transfer; ``may_retry``: another attempt may come."""
        if (prompt := self._prompts.get(room)) is not None:
            if may_retry:
                prompt.expires = now + self._seconds
            else:
                self.drop(room)

    def on_done(self, room: int, now: float) -> None:
        """Handles the end of a transfer that is DONE, in place of the sender's ``forget``."""
        if (prompt := self._prompts.get(room)) is None:
            self._sender.forget(room)
            return
        self._sender.await_ack(room)
        prompt.transferred, prompt.expires = True, now + self._seconds

    def reuse(self, req: Req) -> PrefillResult | None:
        """Returns the result of the attempt before ``req``, whose pages are then allocated to ``req``; None where there
        is none."""
        assert req.bootstrap is not None
        room = req.bootstrap.previous
        if room is None or (prompt := self._prompts.get(room)) is None:
            return None
        if not np.array_equal(prompt.token_ids, req.prompt) or prompt.parameters != _parameters_of(req):
            return None
        if (page_table := self._cache.match_full_prompt(req.prompt, prompt.partial_page, req.namespace,
                                                        prompt.result.token_id)) is None:
            self.drop(room)
            return None
        self._remove(room)
        req.page_table = page_table
        self.num_reused += 1
        return msgspec.structs.replace(prompt.result, num_cached_tokens=req.num_prompt_tokens, loaded=None)

    def drop(self, room: int) -> None:
        """Drops the prompt of a room, if there is one."""
        if (prompt := self._prompts.get(room)) is not None:
            self._remove(room)
            if prompt.partial_page is not None:
                self._cache.drop_partial_page(prompt.partial_page)

    def clear(self) -> None:
        """Drops all prompts: their first tokens and pages are of other weights than the next attempt's."""
        for room in list(self._prompts):
            self.drop(room)

    def sweep(self, now: float) -> None:
        """Drops the prompts that decode has acknowledged on all ranks, and those that have expired."""
        rooms = [room for room, prompt in self._prompts.items() if prompt.transferred]
        if rooms:
            acknowledged = self._group.min_by_key(
                "retained", [self._prompts[room].number for room in rooms], self._acknowledged, (False,))
            for room, (by_all,) in zip(rooms, acknowledged):
                if by_all:
                    self.drop(room)
        for room in [room for room, prompt in self._prompts.items()
                     if prompt.expires is not None and prompt.expires <= now]:
            self.drop(room)

    def _acknowledged(self) -> dict[int, tuple[int]]:
        return {prompt.number: (self._sender.is_acknowledged(room),) for room, prompt in self._prompts.items()
                if prompt.transferred}

    def _remove(self, room: int) -> None:
        if self._prompts.pop(room).transferred:
            self._sender.stop_awaiting_ack(room)


def _parameters_of(req: Req) -> tuple[object, ...]:
    """Returns all parameters of a request, apart from its prompt, on which its first token and result depend."""
    processor = None if req.processor is None else req.processor.path
    return req.sampling, req.stop_ids, req.logprobs, req.logprob_start, processor, req.namespace
