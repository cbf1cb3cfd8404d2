"""Penalties on tokens that a request has already, for all rows of a batch at once.

Frequency and presence penalties (OpenAI's) apply to the output: ``logit - count * frequency - presence``. The
repetition penalty (Keskar et al., 2019) then divides positive logits and multiplies negative ones of tokens in prompt
or output. A row's tokens are uploaded as (id, count) pairs; only their logits are gathered, changed and scattered back.

A pending token, whose value only the device knows, is added there. Each logit is computed at once from its whole count,
and where a token occurs twice among a row's pairs both compute the same: results depend neither on what is pending, nor
on the order in which the device writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...api.sampling import SamplingParams
from ...forward.host_copies import upload, upload_joined
from ...request.extras import EXTRAS, Extra, Members, RowState
from ...request.req import Req
from ...request.token_history import TokenHistory


class Penalties(NamedTuple):
    """The penalties of ``params`` on the tokens of ``history``, on the drafts ``path`` after them, and on the token at
    index ``pending`` of those that the previous step sampled, where only the device has it."""

    params: SamplingParams
    history: TokenHistory
    pending: int | None = None
    path: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Penalized:
    """The P rows with penalties: ``rows`` [P] of the batch, ``factors`` [3, P]: frequency, presence, repetition."""

    rows: torch.Tensor
    factors: torch.Tensor


@dataclass(frozen=True)
class _Entries:
    """N tokens of the penalized rows: ``row`` [N] indexes ``_Penalized.rows``, ``ids`` [N], ``counts`` [N] int32."""

    row: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor


def apply_penalties(logits: torch.Tensor, members: Members, previous: torch.Tensor | None) -> dict[int, str]:
    """Applies the Penalties of each member to its row of ``logits`` [R, vocab] float32, in place.

    ``previous`` [Q] int64 holds the tokens that the step before sampled, for rows with a pending one.
    """
    device = logits.device
    params = [penalties.params for _, penalties in members]
    penalized = _Penalized(
        upload([row for row, _ in members], torch.int64, device),
        upload([[p.frequency_penalty for p in params], [p.presence_penalty for p in params],
                [p.repetition_penalty for p in params]], torch.float32, device))
    entries = _output_entries([penalties for _, penalties in members], device)
    pending = [(index, penalties.pending) for index, (_, penalties) in enumerate(members)
               if penalties.pending is not None]
    if pending:
        assert previous is not None, "a row's token comes from a step that was not passed"
        pending_rows, sources = upload(pending, torch.int64, device).unbind(-1)
        entries = _with_pending(entries, pending_rows, previous[sources], len(members))
    if any(p.frequency_penalty or p.presence_penalty for p in params):
        _subtract(logits, penalized, entries)
    repeating = [row_index for row_index, p in enumerate(params) if p.repetition_penalty != 1]
    if repeating:
        prompts = [members[index][1].history.prompt_ids(device) for index in repeating]
        _divide(logits, penalized, entries, repeating, prompts)
    return {}


def _output_entries(members: Sequence[Penalties], device: torch.device) -> _Entries:
    for member in members:
        member.history.advance()
    ids, counts = zip(*[member.history.after(member.path) for member in members])
    sizes = upload([len(one) for one in ids], torch.int64, device)
    joined = upload_joined(ids, torch.int64, device)
    row = torch.arange(len(ids), device=device).repeat_interleave(sizes, output_size=len(joined))
    return _Entries(row, joined, upload_joined(counts, torch.int32, device))


def _with_pending(entries: _Entries, rows: torch.Tensor, token_ids: torch.Tensor, num_rows: int) -> _Entries:
    """Returns ``entries`` with another token ``token_ids`` [Q] of each of the ``rows`` [Q]."""
    newest = torch.full((num_rows,), -1, dtype=torch.int64, device=rows.device).scatter_(0, rows, token_ids)
    is_repeated = entries.ids == newest[entries.row]
    before = torch.zeros(num_rows, dtype=torch.int32, device=rows.device)
    before.index_add_(0, entries.row, entries.counts * is_repeated)
    return _Entries(torch.cat((entries.row, rows)), torch.cat((entries.ids, token_ids)),
                    torch.cat((entries.counts + is_repeated, before[rows] + 1)))


def _subtract(logits: torch.Tensor, penalized: _Penalized, entries: _Entries) -> None:
    index = penalized.rows[entries.row]
    frequency, presence, _ = penalized.factors[:, entries.row]
    logits[index, entries.ids] = logits[index, entries.ids] - (entries.counts * frequency + presence)


def _divide(logits: torch.Tensor, penalized: _Penalized, entries: _Entries, repeating: Sequence[int],
            prompt_ids: Sequence[torch.Tensor]) -> None:
    """Applies repetition penalties. ``prompt_ids[i]`` are those of row ``repeating[i]``; other rows' penalty is 1."""
    device = logits.device
    sizes = upload([len(ids) for ids in prompt_ids], torch.int64, device)
    prompts = torch.cat(list(prompt_ids))
    row = upload(repeating, torch.int64, device).repeat_interleave(sizes, output_size=len(prompts))
    row, ids = torch.cat((row, entries.row)), torch.cat((prompts, entries.ids))
    index, factor = penalized.rows[row], penalized.factors[2, row]
    values = logits[index, ids]
    logits[index, ids] = torch.where(values < 0, values * factor, values / factor)


def _penalties(req: Req, state: RowState) -> Penalties | None:
    return None if req.history is None else Penalties(req.sampling, req.history, state.pending, state.path)


PENALTIES = EXTRAS.register("penalties")(Extra(
    frozenset(("history", "frequency_penalty", "presence_penalty", "repetition_penalty")),
    lambda req: req.history is not None, 20, _penalties, apply_penalties))
