"""Twins of kernels that place and accept chains of drafts."""

from __future__ import annotations

import torch

from ..arguments import (
    CHAIN_COUNT,
    CHAIN_DRAFTS,
    CHAIN_POSITION,
    CHAIN_TOKENS,
    AcceptedChains,
    ChainPages,
    ChainState,
    DraftPasses,
    KnownChains,
    PlacedChains,
    PlacedRows,
    SimulatedCounts,
)
from ..splitmix import SIGNED_GOLDEN, mix_tensor, shift


def place_chains(state: ChainState, sources: torch.Tensor, known: KnownChains, limits: torch.Tensor,
                 pages: ChainPages) -> PlacedChains:
    """Twin of ``speculative.place_chains.place_chains``."""
    width = known.tokens.shape[1]
    follows, rows = sources >= 0, sources.clamp(min=0)
    starts = torch.where(follows, state.positions[rows], known.positions)
    num_drafts = torch.where(follows, state.num_drafts[rows], known.num_drafts)
    columns = torch.arange(width, device=sources.device)
    left = state.tokens[rows[:, None], columns.clamp(max=state.max_drafts)]
    tokens = torch.where(follows[:, None], left, known.tokens)
    valid = torch.minimum((num_drafts + 1).clamp(max=width), limits - starts).clamp(min=0)
    placed = place_rows(starts, torch.where(columns < valid[:, None], tokens, 0), pages)
    return PlacedChains(placed, valid, (starts[:, None] + columns + 1).flatten())


def place_rows(starts: torch.Tensor, tokens: torch.Tensor, pages: ChainPages) -> PlacedRows:
    """Twin of ``speculative.place_chains.place_rows``."""
    positions = starts[:, None] + torch.arange(tokens.shape[1], device=starts.device)
    page, offset = _slots(positions, pages)
    return PlacedRows(starts.clone(), tokens.flatten().clone(), positions.clamp(max=pages.max_length - 1).flatten(),
                      page.flatten(), offset.flatten(), _last_page_len(starts + tokens.shape[1], pages))


def _slots(positions: torch.Tensor, pages: ChainPages) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pages and offsets of ``positions`` [B, n]."""
    first, count = pages.kv_indptr[:-1].long()[:, None], pages.kv_indptr.diff()[:, None]
    index = positions // pages.page_size
    page = pages.kv_indices[first + torch.minimum(index, count - 1)].long()
    return torch.where(index < count, page, pages.scratch_page), positions % pages.page_size


def _last_page_len(lengths: torch.Tensor, pages: ChainPages) -> torch.Tensor:
    """Returns the tokens [B] int32 in the last pages of requests of ``lengths`` [B], which read none beyond."""
    count, size = pages.kv_indptr.diff().long(), pages.page_size
    return (torch.minimum(lengths, count * size) - (count - 1) * size).int()


def accept_chains(samples: torch.Tensor, placed: PlacedChains, state: ChainState, pages: ChainPages, num_drafts: int,
                  simulated: SimulatedCounts | None = None) -> AcceptedChains:
    """Twin of ``speculative.accept_chains.accept_chains``."""
    requests, starts, valid = len(placed.valid), placed.rows.starts, placed.valid
    ids, sampled = placed.rows.input_ids.view(requests, -1), samples.view(requests, -1)
    width = ids.shape[1]
    columns = torch.arange(width, device=ids.device)
    if simulated is not None:
        sampled = _simulated(sampled, ids, starts, valid, simulated)
    matches = torch.zeros_like(sampled, dtype=torch.bool)
    matches[:, 1:] = ids[:, 1:] == sampled[:, :-1]
    matches &= (columns < valid[:, None]) & (sampled >= 0)
    matches[:, 0] = valid > 0
    counts = matches.long().cumprod(-1).sum(-1)
    last = (counts - 1).clamp(min=0)
    newest = torch.where(counts > 0, sampled.gather(-1, last[:, None])[:, 0], ids[:, 0]).clamp(min=0)
    positions = starts + counts
    own = state.packed[:requests]
    for column, values in ((CHAIN_COUNT, counts), (CHAIN_POSITION, positions), (CHAIN_DRAFTS, num_drafts),
                           (CHAIN_TOKENS, newest)):
        own[:, column] = values
    state.samples[:requests, :width] = sampled
    next_ids = sampled.clamp(min=0)
    number = torch.arange(requests, device=ids.device)
    return AcceptedChains(next_ids.flatten(), torch.cat([ids[:, :1], next_ids], -1), counts, number * width + last,
                          number * (width + 1) + counts, newest, positions, _last_page_len(positions, pages),
                          _passes(positions, num_drafts, pages))


def _passes(positions: torch.Tensor, num_drafts: int, pages: ChainPages) -> DraftPasses:
    ahead = positions[:, None] + torch.arange(num_drafts + 1, device=positions.device)
    lengths = torch.stack([_last_page_len(each + 1, pages) for each in ahead.unbind(-1)])
    page, offset = _slots(ahead, pages)
    return DraftPasses(ahead.clamp(max=pages.max_length - 1).T.contiguous(), page.T.contiguous(),
                       offset.T.contiguous(), lengths)


def _simulated(samples: torch.Tensor, ids: torch.Tensor, starts: torch.Tensor, valid: torch.Tensor,
               simulated: SimulatedCounts) -> torch.Tensor:
    """Returns ``samples`` [B, width] that accept the drawn numbers of drafts."""
    bits = mix_tensor(simulated.keys[:len(starts)] + starts * SIGNED_GOLDEN)
    drawn = (shift(bits, 11)[:, None] < simulated.thresholds).sum(-1)
    drawn = torch.minimum(drawn, valid - 1)[:, None]
    columns = torch.arange(ids.shape[1], device=ids.device)
    drafts = torch.zeros_like(ids)
    drafts[:, :-1] = ids[:, 1:]
    rejects = (columns == drawn) & (columns + 1 < valid[:, None]) & (samples == drafts)
    return torch.where(columns < drawn, drafts, torch.where(rejects, (drafts == 0).long(), samples))
