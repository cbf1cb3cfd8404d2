"""Which prompts a decode server prefills by itself: those of which it lacks so little that sending costs more."""

from __future__ import annotations

from typing import Any

from ..net.body import Peek
from ..net.request import Request
from ..policies import Subject
from .dispatcher import Dispatcher


class LocalPrefill:
    """The rule of ``--local-prefill-tokens``.

    What counts is the part of a prompt that the decode server lacks: the policy tells how much of it the one that it
    would choose has cached (``held_share``: cache_exact from the workers' events, cache_aware from what it sent them);
    a policy that knows nothing of caches leaves the whole prompt to count.
    """

    def __init__(self, dispatcher: Dispatcher, most_tokens: int):
        self._dispatcher = dispatcher
        self._most = most_tokens

    def subject(self, request: Request, found: Peek | None) -> list[Subject]:
        """What the decode policy decides the request by, in a list; empty where the request needs a pair.

        Other engines' decode servers need their prefill half, and so does whoever names one.
        """
        if found is None or found.has_bootstrap:
            return []
        workers = self._dispatcher.candidates("decode", None, request.group, own=True)
        if not workers:
            return []
        policy: Any = self._dispatcher.policies.of(request.group)["decode"]
        subject = policy.read(request, found)
        tokens: float = _num_tokens(found)
        if tokens > self._most and hasattr(policy, "held_share"):
            tokens *= 1.0 - policy.held_share(workers, subject)
        return [subject] if tokens <= self._most else []


def _num_tokens(found: Peek) -> int:
    """About how many tokens a prompt has: ids are counted, text has four bytes a token."""
    text = found.routing_text
    ids = text.startswith(b"[") and text[1:9].lstrip()[:1].isdigit()
    return text.count(b",") + 1 if ids else len(text) // 4
