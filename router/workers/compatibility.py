"""Compatibility of prefill and decode workers, as decisions need it.

Servers of one kind (equal ``pair_key``: checkpoint, KV layout, backend, cluster secret) fit with the same others, so
the kinds of decode workers that fit describe a prefill worker's partners, a few words however many workers there are.
``Pairs`` derives tuples from that whenever workers change; a request costs one test of a flag while all fit with all.
``pair_trials`` finds out which kinds fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from .registry import Worker


class Misfit(msgspec.Struct, frozen=True):
    """A kind of worker that does not fit: the URL of one of them, and a sentence with the reason."""

    worker: str
    why: str


class Pairs:
    """The pairs among workers that take requests. ``all_fit``: each prefill worker with each decode worker.

    ``prefills`` and ``decodes`` are those with a partner; if all have one, the same objects that were given.
    """

    __slots__ = ("all_fit", "prefills", "decodes", "_partners")

    def __init__(self, prefills: tuple[Worker, ...], decodes: tuple[Worker, ...]):
        self._partners = {kinds: _fitting(kinds, decodes) for kinds in {worker.fitting for worker in prefills}}
        self.all_fit = all(found is decodes for found in self._partners.values())
        paired = set().union(*self._partners.values())
        self.prefills = _select(prefills, lambda worker: self.all_fit or bool(self._partners[worker.fitting]))
        self.decodes = _select(decodes, paired.__contains__)

    def with_partner(self, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> Sequence[Worker]:
        """Prefill workers that fit with at least one of the decode workers."""
        if decodes is self.decodes:
            return prefills
        fits = {kinds: bool(_fitting(kinds, decodes)) for kinds in self._partners}
        return [worker for worker in prefills if fits.get(worker.fitting)]

    def partners(self, prefill: Worker, decodes: Sequence[Worker]) -> Sequence[Worker]:
        """The decode workers that fit with a prefill worker; the same tuple each time if ``decodes`` are all."""
        if decodes is self.decodes and prefill.fitting in self._partners:
            return self._partners[prefill.fitting]
        return _fitting(prefill.fitting, decodes)

    @property
    def count(self) -> int:
        """The number of pairs."""
        return sum(len(self._partners[worker.fitting]) for worker in self.prefills)


def _select(workers: tuple[Worker, ...], predicate: Callable[[Worker], bool]) -> tuple[Worker, ...]:
    """The workers for which the predicate is true; the same object if it is for all."""
    found = tuple(filter(predicate, workers))
    return workers if len(found) == len(workers) else found


def _fitting(kinds: frozenset[str] | None, decodes: Sequence[Worker]) -> Sequence[Worker]:
    """The workers of these kinds, or of an unknown kind; the same object if they all are."""
    if kinds is None or all(worker.pair_key is None or worker.pair_key in kinds for worker in decodes):
        return decodes
    return tuple(worker for worker in decodes if worker.pair_key is None or worker.pair_key in kinds)


def misfits_of(workers: Iterable[Worker], limit: int = 8) -> list[dict[str, str]]:
    """The reasons why prefill workers do not fit, for ``/readiness``."""
    found = [{"prefill": worker.url, "decode": misfit.worker, "why": misfit.why}
             for worker in workers if worker.facts.sends_kv for misfit in worker.misfits]
    return found[:limit]
