"""The calls by which a model computes what modules of transformers' model compute, so that they can be observed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class ModuleCall(NamedTuple):
    """The ``method`` of ``owner`` that computes the output of the modules ``names``, the first of which is
    transformers'. ``one_sequence``: its rows [1, T, ...] are those of one sequence."""

    names: tuple[str, ...]
    owner: Any
    method: str
    one_sequence: bool = False

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces the method by what ``wrapper`` makes of it, for this owner alone."""
        setattr(self.owner, self.method, wrapper(getattr(self.owner, self.method)))
