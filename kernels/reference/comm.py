"""Twins of kernels that read and write other ranks' memory: their operands are all ranks'."""

from __future__ import annotations

import torch

from .rows import rmsnorm


def all_reduce(parts: list[torch.Tensor]) -> torch.Tensor:
    """Twin of ``comm.all_reduce.all_reduce``; ``parts`` are the ranks' in their order."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def all_reduce_rmsnorm(parts: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor,
                       eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``comm.all_reduce.all_reduce_rmsnorm``."""
    return rmsnorm(all_reduce(parts), weight, eps, residual)


def rmsnorm_all_gather(parts: list[torch.Tensor], residuals: list[torch.Tensor], weight: torch.Tensor,
                       eps: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Twin of ``comm.gather_scatter_norm.rmsnorm_all_gather``; the second result is all ranks'."""
    made = [rmsnorm(part, weight, eps, residual) for part, residual in zip(parts, residuals)]
    return torch.cat([normed for normed, _ in made]), [total for _, total in made]


def reduce_scatter_rmsnorm(parts: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float,
                           rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``comm.gather_scatter_norm.reduce_scatter_rmsnorm``; ``parts`` [ranks * n, width] are the summands."""
    return rmsnorm(all_reduce(parts).chunk(len(parts))[rank], weight, eps, residual)


def all_to_all_dispatch(rows: list[torch.Tensor], topk_ids: list[torch.Tensor], most: int, num_local_experts: int,
                        rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``comm.all_to_all.all_to_all_dispatch``: the rows [ranks * most, width] and local expert ids
    [ranks * most, K] that ``rank`` receives, zeros and -1 where it receives nothing."""
    tokens, expert_ids = rows[0].new_zeros(len(rows), most, rows[0].shape[1]), []
    for source, (own, topk_id) in enumerate(zip(rows, topk_ids)):
        expert = topk_id - rank * num_local_experts
        expert = torch.where((expert >= 0) & (expert < num_local_experts), expert, -1)
        has_expert = (expert >= 0).any(1)
        tokens[source, :len(own)][has_expert] = own[has_expert]
        expert_ids.append(torch.nn.functional.pad(expert, (0, 0, 0, most - len(own)), value=-1))
    return tokens.flatten(0, 1), torch.cat(expert_ids)


def all_to_all_combine(made: torch.Tensor, positions: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor,
                       num_local_experts: int) -> torch.Tensor:
    """Twin of ``comm.all_to_all.all_to_all_combine``: the sums ``[tokens, width]`` that a rank sends, zeros for tokens
    without one of its experts."""
    total = torch.zeros(len(ids), made.shape[1], device=made.device)
    rows = torch.arange(ids.numel(), device=ids.device) if positions is None else positions.long()
    for choice in range(ids.shape[1]):
        here = (ids[:, choice] >= 0) & (ids[:, choice] < num_local_experts)
        total[here] += made[rows.view(ids.shape)[here, choice]].float() * weights[here, choice, None]
    return total.to(made.dtype)
