"""Row extras: what rows of some requests need beyond plain sampling, one feature a file of ``sampling/extras``.

A row without extras is plain: its next token depends on its logits and sampling parameters alone, and its token is all
that a step reports. Rows of both kinds are in one batch; only rows with extras pay for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..registry import Registry

if TYPE_CHECKING:
    import torch

    from .req import Req
    from .sampling_metadata import FillAllowed
    from .step_output import RowOutput


class RowState(NamedTuple):
    """A sampled row in one step. ``position`` counts the tokens before the sampled one; ``pending`` is the index of the
    request's newest token among those that the previous step sampled, where only the device knows it; ``allowed`` fills
    the mask of its grammar. ``path``: the drafts between the request's tokens and the sampled one, whose row follows
    the last of them."""

    position: int
    pending: int | None = None
    allowed: FillAllowed | None = None
    path: tuple[int, ...] = ()


Members = Sequence[tuple[int, Any]]
"""Rows with one extra: their index in the logits, and the extra's value for them."""


class Report(Protocol):
    """A report of a step besides tokens, while the device computes it."""

    def add_to(self, outputs: dict[int, RowOutput]) -> None:
        """Waits for the device, and sets a field of the outputs of some requests, by their index in the step. Called
        once, possibly in another thread; changes no request."""


@dataclass(frozen=True, eq=False)
class Extra:
    """A feature. ``fields`` of Req and SamplingParams decide on it; ``wanted`` says whether a request uses it, equally
    on all ranks.

    ``of_row`` returns its value for a row, None where the row needs nothing now. ``apply(logits, members, previous)``
    changes logits [R, vocab] float32 in place, and returns why rows have failed, by index; extras of a lower ``order``
    come first. ``previous`` are the tokens that the step before sampled. The forward pass itself has the others: they
    need further rows of it, or embeddings.
    """

    fields: frozenset[str]
    wanted: Callable[[Req], bool]
    order: int = 0
    of_row: Callable[[Req, RowState], Any] | None = None
    apply: Callable[[torch.Tensor, Members, torch.Tensor | None], Mapping[int, str]] | None = None

    def on(self, value: Any) -> RowExtra:
        return RowExtra(self, value)


class RowExtra(NamedTuple):
    """An extra with its value for one row."""

    extra: Extra
    value: Any


EXTRAS: Registry[Extra] = Registry("row extra", "baton.common.sampling.extras")


@functools.cache
def all_extras() -> tuple[Extra, ...]:
    """All extras by their order."""
    return tuple(sorted(map(EXTRAS.get, sorted(EXTRAS.all_names)), key=lambda extra: extra.order))


def extras_of(req: Req) -> tuple[Extra, ...]:
    """The extras that a request uses; none for a plain one."""
    return tuple(extra for extra in all_extras() if extra.wanted(req))


def row_extras(req: Req, state: RowState) -> tuple[RowExtra, ...]:
    """The extras of one row of ``req`` that the sampler applies."""
    found = [(extra, extra.of_row(req, state)) for extra in req.extras if extra.of_row is not None]
    return tuple(RowExtra(extra, value) for extra, value in found if value is not None)
