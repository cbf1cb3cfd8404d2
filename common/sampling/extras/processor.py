"""Logit processors: apply those that requests name to their rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...forward.host_copies import upload
from ...request.extras import EXTRAS, Extra, Members, RowState
from ...request.logit_processors import PARAM, RowProcessor, summarize
from ...request.req import Req


class PendingProcessor(NamedTuple):
    """A row's processor; ``pending`` and ``path``: see RowState."""

    processor: RowProcessor
    pending: int | None = None
    path: tuple[int, ...] = ()


class _Call(NamedTuple):
    """A row with its processor, and the parameters that it gets."""

    row: int
    processor: RowProcessor
    params: dict[str, Any]


def apply_processors(logits: torch.Tensor, members: Members, previous: torch.Tensor | None) -> dict[int, str]:
    """Applies the PendingProcessor of each member to its row of ``logits`` [R, vocab], in place; returns why rows have
    failed, by row.

    ``previous`` holds the tokens that the step before sampled, for rows with a pending one. Rows after drafts come
    after the rows before them.
    """
    failed: dict[int, str] = {}
    for depth in sorted({len(member.path) for _, member in members}):
        by_path: dict[str, list[_Call]] = {}
        for row, member in members:
            if len(member.path) == depth:
                try:
                    call = _Call(row, member.processor, _params_of(member, previous))
                except Exception as error:
                    failed[row] = f"{PARAM} {member.processor.path!r}: {summarize(error)}."
                else:
                    by_path.setdefault(member.processor.path, []).append(call)
        for same in by_path.values():
            failed |= _apply(logits, same)
    return failed


def _params_of(member: PendingProcessor, previous: torch.Tensor | None) -> dict[str, Any]:
    """Raises where a request's parameters cannot be copied."""
    processor, pending, path = member
    if path:
        return processor.branch(path)
    processor.settle()
    processor.tokens.pending = None if pending is None or previous is None else previous[pending]
    return processor.params


def _apply(logits: torch.Tensor, calls: list[_Call]) -> dict[int, str]:
    first = calls[0].processor
    index = upload([call.row for call in calls], torch.int64, logits.device)
    selected = logits[index]
    try:
        result = first.processor(selected, [call.params for call in calls])
        if not isinstance(result, torch.Tensor) or result.shape != selected.shape:
            raise TypeError(f"it returned {_shape(result)} in place of logits of shape {list(selected.shape)}")
        logits[index] = result.to(logits)
    except Exception as error:
        if len(calls) == 1:
            return {calls[0].row: f"{PARAM} {first.path!r} failed: {summarize(error)}."}
    else:
        return {}
    alone = [_apply(logits, [call]) for call in calls]  # one request's parameters must not fail another's
    return {i: reason for failed in alone for i, reason in failed.items()}


def _shape(result: object) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {list(result.shape)}"
    return f"a {type(result).__name__}"


def _processor(req: Req, state: RowState) -> PendingProcessor | None:
    return None if req.processor is None else PendingProcessor(req.processor, state.pending, state.path)


PROCESSOR = EXTRAS.register("custom_logit_processor")(Extra(
    frozenset(("processor",)), lambda req: req.processor is not None, 50, _processor, apply_processors))
