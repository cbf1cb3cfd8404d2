"""Rows of requests with extras: where each stands in its request, and the mask of its grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..grammar.store import GrammarStore
from ..request.output_matcher import OutputMatcher
from ..request.req import Req
from ..request.sampling_metadata import FillAllowed, nothing_allowed
from ..request.step_input import StepInput


class ExtraRow(NamedTuple):
    """A sampled row of a request: ``position`` counts the tokens before the sampled one, the last of which are the
    drafts ``path``."""

    req: Req
    position: int
    path: tuple[int, ...] = ()


def extra_rows(step: StepInput) -> dict[int, ExtraRow]:
    """Returns the rows of requests with extras, by their sample."""
    ends, stops = step.num_samples.cumsum(), step.starts + step.q_lens
    rows: dict[int, ExtraRow] = {}
    for index in step.extra_index:
        count = int(step.num_samples[index])
        if count:
            drafts = step.drafts.get(index)
            first, position = int(ends[index]) - count, int(stops[index]) - count + 1
            for row, path in enumerate([(), *(drafts.paths() if drafts else ())], first):
                rows[row] = ExtraRow(step.reqs[index], position + len(path), path)
    return rows


def fill_masks(rows: Mapping[int, ExtraRow], pending: Mapping[int, int], previous: Callable[[], list[int]],
               grammars: GrammarStore | None) -> dict[int, FillAllowed]:
    """Fills the masks of rows with a grammar, by row. ``pending`` and ``previous``: the tokens that the step before
    sampled, and where a row's newest token is among them, if the host does not know it."""
    waiting: list[tuple[OutputMatcher, list[tuple[int, tuple[int, ...]]]]] = []
    for row, (req, _, path) in rows.items():
        if req.matcher is None:
            continue
        if path:  # after the row of the newest token
            if waiting and waiting[-1][0] is req.matcher:
                waiting[-1][1].append((row, path))
        elif req.matcher.advance(max(previous()[pending[row]], 0) if row in pending else None):
            waiting.append((req.matcher, [(row, path)]))
    masks: dict[int, FillAllowed] = {}
    for turn in range(max((len(own) for _, own in waiting), default=0)):  # a matcher is in one place at a time
        filling: list[tuple[int, OutputMatcher]] = []
        for matcher, own in waiting:
            if turn < len(own):
                row, path = own[turn]
                masks[row] = nothing_allowed
                if matcher.move(path):
                    filling.append((row, matcher))
        assert grammars is not None
        for (row, _), fill in zip(filling, grammars.fill([matcher for _, matcher in filling])):
            masks[row] = fill or nothing_allowed
    return masks
