"""Twins of kernels of a mixture's experts."""

from __future__ import annotations

import torch

from ..arguments import Choice, ExpertBiases, Scales
from ..gated_activation import clamped_gate
from .float8 import quantize_groups
from .gemm import block_matmul, scaled_matmul
from .rows import silu_and_mul


def moe_experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, places: torch.Tensor,
                weights: torch.Tensor, scales: Scales | None = None, biases: ExpertBiases | None = None,
                limit: float = 0.0) -> torch.Tensor:
    """Expert by expert of those that have a token; see ``kernels.moe_experts.moe_experts``."""
    def product(rows: torch.Tensor, matrix: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return torch.nn.functional.linear(rows, matrix)
        if scale.ndim == 1:
            return scaled_matmul(*quantize_groups(rows, rows.shape[1]), matrix, scale, rows.dtype)
        return block_matmul(*quantize_groups(rows, 128), matrix, scale, (128, 128), rows.dtype)

    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    held = (places >= 0) & (places < gate_up.shape[0])
    for place in places[held].unique().tolist():
        tokens, choices = (places == place).nonzero(as_tuple=True)
        hidden = product(x[tokens], gate_up[place], None if scales is None else scales.gate_up[place])
        hidden = hidden if biases is None else hidden + biases.gate_up[place]
        hidden = clamped_gate(hidden, limit) if limit else silu_and_mul(hidden)
        made = product(hidden, down[place], None if scales is None else scales.down[place])
        made = made if biases is None else made + biases.down[place]
        total.index_add_(0, tokens, made.float() * weights[tokens, choices, None])
    return total.to(x.dtype)


def moe_align(places: torch.Tensor, num_places: int,
              block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(rows, place, positions)`` of the ``Alignment`` that ``kernels.moe_align.moe_align`` makes, without the blocks
    behind the last; positions of choices that are left out are -1."""
    flat = places.flatten()
    rows, place = [], []
    for expert in range(num_places):
        found = (flat == expert).nonzero()[:, 0]
        blocks = -(-len(found) // block)
        rows.append(torch.nn.functional.pad(found, (0, blocks * block - len(found)), value=len(flat)))
        place += [expert] * blocks
    joined = torch.cat(rows) if rows else flat[:0]
    positions = torch.full((len(flat) + 1,), -1, dtype=torch.int32, device=places.device)
    positions[joined] = torch.arange(len(joined), dtype=torch.int32, device=places.device)
    return joined.int(), torch.tensor(place, dtype=torch.int32, device=places.device), positions[:-1]


def moe_spans(place: torch.Tensor, tall: int) -> torch.Tensor:
    """The ``spans`` of blocks with these places, of which none is -1, without those behind the last."""
    found, first = [], 0
    for expert, blocks in zip(*torch.unique_consecutive(place, return_counts=True), strict=True):
        tiles = -(-int(blocks) // tall)
        for tile in range(tiles):
            begin, end = (at * int(blocks) // tiles for at in (tile, tile + 1))
            found.append((first + begin, end - begin, int(expert)))
        first += int(blocks)
    return torch.tensor(found, dtype=torch.int32, device=place.device).reshape(-1, 3)


def moe_topk(logits: torch.Tensor, bias: torch.Tensor | None, how: Choice,
             live: torch.Tensor | None = None, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.moe_topk.moe_topk``."""
    scores = logits.float().softmax(-1) if how.scoring == "softmax" else logits.float().sigmoid()
    choice = limit_to_groups(scores if bias is None else scores + bias, how)
    ids = choice.topk(how.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if how.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if live is not None:
        ids = ids.masked_fill((live == 0)[:, None], -1)
    return ids - first, weights * how.scaling_factor


def limit_to_groups(choice: torch.Tensor, how: Choice) -> torch.Tensor:
    """``choice`` [T, experts] with minus infinity for the experts of all but the ``top_groups`` best groups."""
    if how.top_groups == how.num_groups:
        return choice
    best = group_scores(choice, how).topk(how.top_groups, dim=-1).indices
    outside = torch.ones(choice.shape[0], how.num_groups, dtype=torch.bool, device=choice.device)
    outside = outside.scatter(1, best, False)[:, :, None].expand(-1, -1, choice.shape[1] // how.num_groups)
    return choice.masked_fill(outside.flatten(1), float("-inf"))


def group_scores(choice: torch.Tensor, how: Choice) -> torch.Tensor:
    """``[T, num_groups]`` of what tokens choose by: each group's best expert, or its two best added."""
    grouped = choice.unflatten(-1, (how.num_groups, -1))
    return grouped.topk(2, dim=-1).values.sum(-1) if how.group_score == "top2" else grouped.amax(-1)
