"""Twins of mixture-of-experts kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..arguments import Choice, ExpertBiases, Int8Format, Scales
from ..elementwise import by_element
from ..gated_activation import GateActivation, clamped_gate
from .float8 import quantize_groups
from .gemm import block_matmul, scaled_matmul
from .gemm import product as unscaled_product
from .int8 import int8_matmul, quantize_int8
from .rows import silu_and_mul

ExpertProduct = Callable[[torch.Tensor, int], torch.Tensor]
"""``product(rows, expert)`` multiplies rows by the expert's matrix."""


def moe_experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, topk_ids: torch.Tensor,
                weights: torch.Tensor, scales: Scales | None = None, biases: ExpertBiases | None = None,
                limit: float = 0.0, activate: GateActivation | None = None) -> torch.Tensor:
    """Twin of ``moe.moe_experts.moe_experts``: computes expert by expert of those that have a token."""
    def product(rows: torch.Tensor, stack: torch.Tensor, scale: torch.Tensor | None, expert: int) -> torch.Tensor:
        matrix = stack[expert]
        if scale is None:
            return unscaled_product(rows, matrix)
        if matrix.dtype == torch.int8:
            return int8_matmul(quantize_int8(rows, Int8Format()), matrix, scale[expert])
        if scale.ndim == 2:
            return scaled_matmul(*quantize_groups(rows, rows.shape[1]), matrix, scale[expert], rows.dtype)
        return block_matmul(*quantize_groups(rows, 128), matrix, scale[expert], (128, 128), rows.dtype)

    up_scale, down_scale = (None, None) if scales is None else (scales.gate_up, scales.down)
    return gated_experts(x, len(gate_up), topk_ids, weights,
                         lambda rows, expert: product(rows, gate_up, up_scale, expert),
                         lambda rows, expert: product(rows, down, down_scale, expert), biases, limit, activate)


def gated_experts(x: torch.Tensor, num_experts: int, topk_ids: torch.Tensor, weights: torch.Tensor,
                  gate_up: ExpertProduct, down: ExpertProduct, biases: ExpertBiases | None,
                  limit: float, activate: GateActivation | None = None) -> torch.Tensor:
    """The gated MLPs of S experts by two products, as ``moe.moe_experts.moe_experts`` says."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    is_local = (topk_ids >= 0) & (topk_ids < num_experts)
    for expert in topk_ids[is_local].unique().tolist():
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        hidden = gate_up(x[tokens], expert)
        hidden = hidden if biases is None else hidden + biases.gate_up[expert]
        hidden = clamped_gate(hidden, limit) if limit else (activate or silu_and_mul)(hidden)
        made = down(hidden, expert)
        made = made if biases is None else made + biases.down[expert]
        total.index_add_(0, tokens, made.float() * weights[tokens, choices, None])
    return total.to(x.dtype)


def moe_align(topk_ids: torch.Tensor, num_experts: int,
              block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Twin of ``moe.moe_align.moe_align``: ``(sorted_choices, expert_of_block, positions)`` of its ``Alignment``,
    without the blocks after the last; positions of choices that are left out are -1."""
    flat = topk_ids.flatten()
    sorted_choices, expert_of_block = [], []
    for expert in range(num_experts):
        choices = (flat == expert).nonzero()[:, 0]
        blocks = -(-len(choices) // block)
        sorted_choices.append(torch.nn.functional.pad(choices, (0, blocks * block - len(choices)), value=len(flat)))
        expert_of_block += [expert] * blocks
    joined = torch.cat(sorted_choices) if sorted_choices else flat[:0]
    positions = torch.full((len(flat) + 1,), -1, dtype=torch.int32, device=topk_ids.device)
    positions[joined] = torch.arange(len(joined), dtype=torch.int32, device=topk_ids.device)
    experts = torch.tensor(expert_of_block, dtype=torch.int32, device=topk_ids.device)
    return joined.int(), experts, positions[:-1]


def moe_spans(expert_of_block: torch.Tensor, max_blocks: int) -> torch.Tensor:
    """The ``spans`` of blocks with these experts, of which none is -1, without those after the last."""
    spans, first = [], 0
    for expert, blocks in zip(*torch.unique_consecutive(expert_of_block, return_counts=True), strict=True):
        tiles = -(-int(blocks) // max_blocks)
        for tile in range(tiles):
            begin, end = (at * int(blocks) // tiles for at in (tile, tile + 1))
            spans.append((first + begin, end - begin, int(expert)))
        first += int(blocks)
    return torch.tensor(spans, dtype=torch.int32, device=expert_of_block.device).reshape(-1, 3)


def moe_topk(logits: torch.Tensor, bias: torch.Tensor | None, how: Choice,
             live: torch.Tensor | None = None, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``moe.moe_topk.moe_topk``."""
    if how.scoring == "sparsemixer":
        ids, weights = _sparsemixer(logits.float(), how.jitter)
    else:
        ids, weights = _best(logits, bias, how)
    if live is not None:
        ids = ids.masked_fill((live == 0)[:, None], -1)
    return ids - first, weights * how.scaling_factor


def _best(logits: torch.Tensor, bias: torch.Tensor | None, how: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the experts of the best scores, and their weights."""
    scores = logits.float().softmax(-1) if how.scoring == "softmax" else by_element(torch.sigmoid, logits.float())
    choice = limit_to_groups(scores if bias is None else scores + bias, how)
    ids = choice.topk(how.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if how.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights


def _sparsemixer(logits: torch.Tensor, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """SparseMixer-v2 (arXiv:2409.12136) as it is at inference: the two largest of ``logits`` [T, experts], each weighed
    by its softmax among the logits that are less than ``2 * jitter`` below it, relative to the larger magnitude of the
    two. The second ignores the first."""
    left, ids, weights = logits, [], []
    for _ in range(2):
        best, index = left.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        ids.append(index)
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, index))
        left = left.scatter(1, index, float("-inf"))
    return torch.cat(ids, 1), torch.cat(weights, 1)


def limit_to_groups(choice: torch.Tensor, how: Choice) -> torch.Tensor:
    """Masks ``choice`` [T, experts] with minus infinity for the experts of all but the ``top_groups`` best groups."""
    if how.top_groups == how.num_groups:
        return choice
    best = group_scores(choice, how).topk(how.top_groups, dim=-1).indices
    outside = torch.ones(choice.shape[0], how.num_groups, dtype=torch.bool, device=choice.device)
    outside = outside.scatter(1, best, False)[:, :, None].expand(-1, -1, choice.shape[1] // how.num_groups)
    return choice.masked_fill(outside.flatten(1), float("-inf"))


def group_scores(choice: torch.Tensor, how: Choice) -> torch.Tensor:
    """Scores ``[T, num_groups]`` of the groups: each group's best expert, or the sum of its two best."""
    grouped = choice.unflatten(-1, (how.num_groups, -1))
    return grouped.topk(2, dim=-1).values.sum(-1) if how.group_score == "top2" else grouped.amax(-1)
