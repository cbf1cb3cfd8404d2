"""Which models the workers serve, and the workers that a request's ``model`` leaves: plain state, no I/O.

A request costs one look into a dictionary, whatever the number of workers and models; all else is derived when workers
come, go, or tell other names.

- All workers serve the same names (or tell none): the router takes any ``model``, as sglang-router does, and the worker
  decides. So clients that send "default" or "gpt-4" to a router of one model are served.
- Names differ: a request goes to workers that serve its model, or that do not tell what they serve. Without a model, or
  with an unknown one where names differ by adapters alone, it goes to those of the first name.
- Nobody serves it, and all workers' models are known: 404 ``model_not_found``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...common.api.errors import NotFound
from ..config.workers import WorkerArgs
from ..net.request import Group

if TYPE_CHECKING:
    from .registry import Worker


class ModelNotFound(NotFound):
    """OpenAI's answer to a name that nobody serves."""

    code = "model_not_found"


class Models:
    """The names of all workers. ``checked``: whether a request's ``model`` matters now; ``apart``: whether each has
    workers of its own."""

    def __init__(self, aliases: Mapping[str, str] | None = None, *, strict: bool = False):
        """``aliases``: further names of models. ``strict``: also the only model's name is checked."""
        self._aliases = dict(aliases or {})
        self._strict = strict
        self.checked = False
        self._cards: dict[str, dict[str, Any]] = {}
        self.apart = False
        self._lenient = True
        self._unknown = False
        self._default: Group = None
        self.update((), pairs=False)

    @classmethod
    def from_args(cls, args: WorkerArgs) -> Models:
        """The models of a router that has no workers yet."""
        return cls(args.aliases, strict=args.enable_igw)

    def update(self, workers: Sequence[Worker], *, pairs: bool) -> None:
        """Take in what the workers serve now. ``pairs``: a model needs prefill and decode workers."""
        told = [worker for worker in workers if worker.model_ids]
        sets = list(dict.fromkeys(frozenset(worker.model_ids) for worker in told))
        self._cards = {}
        for worker in told:
            cards = {card.get("id"): card for card in worker.model_cards}
            for name in worker.model_ids:
                self._cards.setdefault(name, cards.get(name) or _card(name))
        self._unknown = len(told) < len(workers)
        self.apart = bool(told) and (self._strict or len(sets) > 1)
        self._lenient = not self._strict and _connected(sets)
        self._default = _default(told, self._cards, pairs) if self.apart else None
        self.checked = self.apart or bool(self._aliases)

    @property
    def groups(self) -> list[str]:
        """The groups that requests are placed in, beside that of all workers."""
        return [*self._cards, ""] if self.apart else []

    def knows(self, name: str) -> bool:
        """Whether a worker serves it, by this name or the one behind it."""
        return self.real_name(name) in self._cards

    def serves(self, worker: Worker, group: Group) -> bool:
        """Whether a worker is in a group."""
        return group is None or not worker.model_ids or group in worker.model_ids

    def real_name(self, name: str) -> str:
        """The name behind an alias, and any other as it is."""
        return self._aliases.get(name, name)

    def group(self, name: str) -> Group:
        """Where a request for a model goes ("": it names none); raises ModelNotFound."""
        if not self.apart:
            return None
        if name in self._cards:
            return name
        if not name or self._lenient:
            return self._default
        if self._unknown:
            return ""
        raise self._missing(name)

    def cards(self) -> list[dict[str, Any]]:
        """What ``/v1/models`` shows: the models of all workers, each as a worker of it shows it, and the aliases."""
        behind = {name: self._cards[real] for name, real in self._aliases.items() if real in self._cards}
        return [*self._cards.values(),
                *({**card, "id": name, "root": self._aliases[name]} for name, card in behind.items())]

    def card(self, name: str) -> dict[str, Any]:
        """What ``/v1/models/{name}`` shows; raises ModelNotFound."""
        for card in self.cards():
            if card["id"] == name:
                return card
        raise self._missing(name)

    def _missing(self, name: str) -> ModelNotFound:
        known = ", ".join(card["id"] for card in self.cards()[:20])
        return ModelNotFound(f"The model `{name}` does not exist. There are: {known}.", param="model")


def _card(name: str) -> dict[str, Any]:
    """A model of which nothing but its name is known."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "baton"}


def _connected(sets: Iterable[frozenset[str]]) -> bool:
    """Whether the names are those of one model and its adapters: no set of names stands apart from the others."""
    first, *others = [*sets] or [frozenset()]
    joined = set(first)
    while touching := [names for names in others if not joined.isdisjoint(names)]:
        joined.update(*touching)
        others = [names for names in others if joined.isdisjoint(names)]
    return not others


def _default(told: Sequence[Worker], names: Iterable[str], pairs: bool) -> Group:
    """The first model by the workers' order, of those that a pair serves where there are pairs."""
    names = list(names)
    if pairs:
        halves = [{name for worker in told if worker.role == role for name in worker.model_ids}
                  for role in ("prefill", "decode")]
        names = [name for name in names if all(name in half for half in halves)] or names
    return names[0]
