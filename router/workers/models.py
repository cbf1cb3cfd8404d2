"""The models that the workers serve, and the workers that serve a request's ``model``: plain state, no I/O.

A request costs one lookup in a dictionary, whatever the number of workers and models; all else is derived when workers
join, leave, or report other names.

- All workers serve the same names (or report none): the router takes any ``model``, as sglang-router does, and the
  worker decides. So clients that send "default" or "gpt-4" to a router of one model are served.
- Names differ: a request goes to workers that serve its model, or that do not report what they serve. Without a model,
  or with an unknown one where names differ by adapters alone, it goes to those of the first name.
- No worker serves it, and all workers' models are known: 404 ``model_not_found``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...common.api.errors import NotFound
from ..config.workers import WorkerArgs
from ..net.request import Group
from .roles import PAIR

if TYPE_CHECKING:
    from .registry import Worker


class ModelNotFound(NotFound):
    """OpenAI's answer to the name of a model that no worker serves."""

    code = "model_not_found"


class Models:
    """The names of all workers' models. ``checked``: a request's ``model`` matters now; ``grouped``: each model has
    workers of its own."""

    def __init__(self, aliases: Mapping[str, str] | None = None, *, strict: bool = False):
        """``aliases``: further names of models. ``strict``: the name is checked also where there is one model."""
        self._aliases = dict(aliases or {})
        self._strict = strict
        self.checked = False
        self._cards: dict[str, dict[str, Any]] = {}
        self.grouped = False
        self._lenient = True
        self._unknown = False
        self._default: Group = None
        self.update((), pairs=False)

    @classmethod
    def from_args(cls, args: WorkerArgs) -> Models:
        """The models of a router that has no workers yet."""
        return cls(args.aliases, strict=args.enable_igw)

    def update(self, workers: Sequence[Worker], *, pairs: bool) -> None:
        """Takes in the models that the workers serve now. ``pairs``: a model needs prefill and decode workers."""
        named = [worker for worker in workers if worker.model_ids]
        sets = list(dict.fromkeys(frozenset(worker.model_ids) for worker in named))
        self._cards = {}
        for worker in named:
            cards = {card.get("id"): card for card in worker.model_cards}
            for name in worker.model_ids:
                self._cards.setdefault(name, cards.get(name) or _card(name))
        self._unknown = len(named) < len(workers)
        self.grouped = bool(named) and (self._strict or len(sets) > 1)
        self._lenient = not self._strict and _connected(sets)
        self._default = _default(named, self._cards, pairs) if self.grouped else None
        self.checked = self.grouped or bool(self._aliases)

    @property
    def groups(self) -> list[str]:
        """The groups that requests are placed in, besides that of all workers."""
        return [*self._cards, ""] if self.grouped else []

    def knows(self, name: str) -> bool:
        """Returns True if a worker serves a model, by this name or the real name of this alias."""
        return self.real_name(name) in self._cards

    def serves(self, worker: Worker, group: Group) -> bool:
        """Returns True if a worker is in a group."""
        return group is None or not worker.model_ids or group in worker.model_ids

    def real_name(self, name: str) -> str:
        """Returns the real name of an alias, and any other name as it is."""
        return self._aliases.get(name, name)

    def group(self, name: str) -> Group:
        """Returns the group of a request for a model ("": it names none); raises ModelNotFound."""
        if not self.grouped:
            return None
        if name in self._cards:
            return name
        if not name or self._lenient:
            return self._default
        if self._unknown:
            return ""
        raise self._missing(name)

    def cards(self) -> list[dict[str, Any]]:
        """Returns what ``/v1/models`` shows: the models of all workers, each as a worker shows it, and the aliases."""
        aliased = {name: self._cards[real] for name, real in self._aliases.items() if real in self._cards}
        return [*self._cards.values(),
                *({**card, "id": name, "root": self._aliases[name]} for name, card in aliased.items())]

    def card(self, name: str) -> dict[str, Any]:
        """Returns what ``/v1/models/{name}`` shows; raises ModelNotFound."""
        for card in self.cards():
            if card["id"] == name:
                return card
        raise self._missing(name)

    def _missing(self, name: str) -> ModelNotFound:
        known = ", ".join(card["id"] for card in self.cards()[:20])
        return ModelNotFound(f"The model `{name}` does not exist. There are: {known}.", param="model")


def _card(name: str) -> dict[str, Any]:
    """Returns the card of a model of which only the name is known."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "baton"}


def _connected(sets: Iterable[frozenset[str]]) -> bool:
    """Returns True if the names are those of one model and its adapters: every set of names is linked to the others by
    common names."""
    first, *others = [*sets] or [frozenset()]
    joined = set(first)
    while touching := [names for names in others if not joined.isdisjoint(names)]:
        joined.update(*touching)
        others = [names for names in others if joined.isdisjoint(names)]
    return not others


def _default(named: Sequence[Worker], names: Iterable[str], pairs: bool) -> Group:
    """Returns the first model in the workers' order, of those that a pair serves where there are pairs."""
    names = list(names)
    if pairs:
        by_role = [{name for worker in named if worker.role == role for name in worker.model_ids}
                   for role in PAIR]
        names = [name for name in names if all(name in served for served in by_role)] or names
    return names[0]
