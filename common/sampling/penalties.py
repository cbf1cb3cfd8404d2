"""Penalties on tokens that a request holds already, for all rows of a batch at once.

Frequency and presence (OpenAI's) look at the output: ``logit - count * frequency - presence``. Repetition (Keskar et
al., 2019) then divides positive logits and multiplies negative ones of what occurs in prompt or output. A row's tokens
travel as (id, count) pairs; the logits of just these are gathered, changed and put back.

A pending token, whose value only the device knows, joins there. Each logit is computed in one go from its whole count,
and where a token stands twice among a row's pairs both compute the same: results do not depend on what is
pending, nor on the order in which the device writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..forward.host_copies import upload, upload_joined
from ..request.sampling_metadata import SamplingMetadata
from ..request.token_history import TokenHistory


@dataclass(frozen=True)
class _Penalized:
    """P rows that have penalties: ``rows`` [P] of the batch, ``factors`` [3, P]: frequency, presence, repetition."""

    rows: torch.Tensor
    factors: torch.Tensor


@dataclass(frozen=True)
class _Entries:
    """N tokens of the penalized rows: ``place`` [N] is a row's place among these, ``ids`` [N], ``counts`` [N] int32."""

    place: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor


def penalize(logits: torch.Tensor, rows: Sequence[SamplingMetadata], previous: torch.Tensor | None) -> None:
    """Apply the penalties of ``rows`` to ``logits`` [R, vocab] float32, in place.

    ``previous`` [Q] int64 holds the tokens that the step before chose, for rows with a pending one.
    """
    chosen = [(i, row, row.history) for i, row in enumerate(rows) if row.history is not None]
    if not chosen:
        return
    device = logits.device
    params = [row.params for _, row, _ in chosen]
    penalized = _Penalized(
        upload([i for i, _, _ in chosen], torch.int64, device),
        upload([[p.frequency_penalty for p in params], [p.presence_penalty for p in params],
                [p.repetition_penalty for p in params]], torch.float32, device))
    histories = [history for _, _, history in chosen]
    entries = _output_entries(histories, device)
    pending = [(place, row.pending) for place, (_, row, _) in enumerate(chosen) if row.pending is not None]
    if pending:
        assert previous is not None, "a row's token comes from a step that was not given"
        places, sources = upload(pending, torch.int64, device).unbind(-1)
        entries = _with_pending(entries, places, previous[sources], len(chosen))
    if any(p.frequency_penalty or p.presence_penalty for p in params):
        _subtract(logits, penalized, entries)
    repeating = [place for place, p in enumerate(params) if p.repetition_penalty != 1]
    if repeating:
        _divide(logits, penalized, entries, repeating, [histories[place].prompt_ids(device) for place in repeating])


def _output_entries(histories: Sequence[TokenHistory], device: torch.device) -> _Entries:
    for history in histories:
        history.advance()
    ids = [history.ids for history in histories]
    sizes = upload([len(one) for one in ids], torch.int64, device)
    joined = upload_joined(ids, torch.int64, device)
    place = torch.arange(len(ids), device=device).repeat_interleave(sizes, output_size=len(joined))
    return _Entries(place, joined, upload_joined([history.counts for history in histories], torch.int32, device))


def _with_pending(entries: _Entries, places: torch.Tensor, token_ids: torch.Tensor, num_rows: int) -> _Entries:
    """``entries`` and one more token each of the rows at ``places`` [Q]: ``token_ids`` [Q]."""
    newest = torch.full((num_rows,), -1, dtype=torch.int64, device=places.device).scatter_(0, places, token_ids)
    again = entries.ids == newest[entries.place]
    before = torch.zeros(num_rows, dtype=torch.int32, device=places.device)
    before.index_add_(0, entries.place, entries.counts * again)
    return _Entries(torch.cat((entries.place, places)), torch.cat((entries.ids, token_ids)),
                    torch.cat((entries.counts + again, before[places] + 1)))


def _subtract(logits: torch.Tensor, penalized: _Penalized, entries: _Entries) -> None:
    index = penalized.rows[entries.place]
    frequency, presence, _ = penalized.factors[:, entries.place]
    logits[index, entries.ids] = logits[index, entries.ids] - (entries.counts * frequency + presence)


def _divide(logits: torch.Tensor, penalized: _Penalized, entries: _Entries, repeating: Sequence[int],
            prompt_ids: Sequence[torch.Tensor]) -> None:
    """``prompt_ids[i]`` is of the row at place ``repeating[i]``; other rows' repetition penalty is 1."""
    device = logits.device
    sizes = upload([len(ids) for ids in prompt_ids], torch.int64, device)
    prompts = torch.cat(list(prompt_ids))
    place = upload(repeating, torch.int64, device).repeat_interleave(sizes, output_size=len(prompts))
    place, ids = torch.cat((place, entries.place)), torch.cat((prompts, entries.ids))
    index, factor = penalized.rows[place], penalized.factors[2, place]
    values = logits[index, ids]
    logits[index, ids] = torch.where(values < 0, values * factor, values / factor)
