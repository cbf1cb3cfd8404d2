"""Twins of kernels that read and write other ranks' memory: their operands are all ranks'."""

from __future__ import annotations

import torch

from .rows import rmsnorm


def peer_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """``parts`` are the ranks' in their order; see ``kernels.peer_sum.peer_sum``."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def peer_sum_norm(parts: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor,
                  eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.peer_sum.peer_sum_norm``."""
    return rmsnorm(peer_sum(parts), weight, eps, residual)


def peer_norm_gather(parts: list[torch.Tensor], residuals: list[torch.Tensor], weight: torch.Tensor,
                     eps: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """See ``kernels.peer_rows.peer_norm_gather``; the second result is all ranks'."""
    made = [rmsnorm(part, weight, eps, residual) for part, residual in zip(parts, residuals)]
    return torch.cat([normed for normed, _ in made]), [total for _, total in made]


def peer_scatter_norm(parts: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float,
                      rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.peer_rows.peer_scatter_norm``; ``parts`` [ranks * n, width] are the ranks' summands."""
    return rmsnorm(peer_sum(parts).chunk(len(parts))[rank], weight, eps, residual)


def peer_dispatch(rows: list[torch.Tensor], numbers: list[torch.Tensor], most: int, places: int,
                  rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [ranks * most, width] and places [ranks * most, K] that come to ``rank``, zeros and -1 where nothing does;
    see ``kernels.peer_tokens.peer_dispatch``."""
    tokens, found = rows[0].new_zeros(len(rows), most, rows[0].shape[1]), []
    for source, (own, number) in enumerate(zip(rows, numbers)):
        place = number - rank * places
        place = torch.where((place >= 0) & (place < places), place, -1)
        wanted = (place >= 0).any(1)
        tokens[source, :len(own)][wanted] = own[wanted]
        found.append(torch.nn.functional.pad(place, (0, 0, 0, most - len(own)), value=-1))
    return tokens.flatten(0, 1), torch.cat(found)


def peer_combine(made: torch.Tensor, positions: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor,
                 places: int) -> torch.Tensor:
    """``[tokens, width]``: the sums that a rank sends, zeros of those it has no part in; see
    ``kernels.peer_tokens.peer_combine``."""
    total = torch.zeros(len(ids), made.shape[1], device=made.device)
    rows = torch.arange(ids.numel(), device=ids.device) if positions is None else positions.long()
    for choice in range(ids.shape[1]):
        here = (ids[:, choice] >= 0) & (ids[:, choice] < places)
        total[here] += made[rows.view(ids.shape)[here, choice]].float() * weights[here, choice, None]
    return total.to(made.dtype)
