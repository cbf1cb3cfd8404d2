"""Local prefill: a decode server prefills a prompt itself if it lacks so little of it that a transfer costs more."""

from __future__ import annotations

from typing import Any

from ..net.body import RoutingFields
from ..net.request import Request
from ..policies import Subject
from .dispatcher import Dispatcher


class LocalPrefill:
    """The rule of ``--local-prefill-tokens``.

    The uncached part of a prompt counts. The policy estimates how much of it is cached by the decode server that it
    would choose (``cached_share``: cache_exact from the workers' events, cache_aware from what it sent them); for a
    policy that knows nothing of caches, the whole prompt counts.
    """

    def __init__(self, dispatcher: Dispatcher, max_tokens: int):
        self._dispatcher = dispatcher
        self._max_tokens = max_tokens

    def subject(self, request: Request, fields: RoutingFields | None) -> list[Subject]:
        """The decode policy's view of the request, in a list; empty if the request needs a pair.

        It does for other engines' decode servers, and if it names a prefill server itself.
        """
        if fields is None or fields.has_bootstrap:
            return []
        workers = self._dispatcher.candidates("decode", None, request.group, baton_only=True)
        if not workers:
            return []
        policy: Any = self._dispatcher.policies.of(request.group)["decode"]
        subject = self._dispatcher.subject("decode", request, fields)
        tokens: float = _estimate_num_tokens(fields)
        if tokens > self._max_tokens and hasattr(policy, "cached_share"):
            tokens *= 1.0 - policy.cached_share(workers, subject)
        return [subject] if tokens <= self._max_tokens else []


def _estimate_num_tokens(fields: RoutingFields) -> int:
    """The estimated length of a prompt in tokens: ids are counted, text has four bytes a token."""
    text = fields.routing_text
    ids = text.startswith(b"[") and text[1:9].lstrip()[:1].isdigit()
    return text.count(b",") + 1 if ids else len(text) // 4
