"""Chooses each token's experts by its router logits: scores, groups, top-k and weights in one kernel."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import Choice


@triton.jit
def _moe_topk_kernel(logits_ptr, bias_ptr, live_ptr, ids_ptr, weights_ptr, stride, groups, each, scaling,
                     TOP_K: tl.constexpr,
                     TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, PAIRS: tl.constexpr,
                     LIMITED: tl.constexpr, BIASED: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
                     BLOCK_EACH: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    member = tl.arange(0, BLOCK_EACH)
    expert = group[:, None] * each + member[None, :]
    inside = (group < groups)[:, None] & (member < each)[None, :]
    logits = tl.load(logits_ptr + token * stride + expert, inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores
    if BIASED:
        choice += tl.load(bias_ptr + expert, inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    if LIMITED:
        best = tl.max(choice, 1)
        if PAIRS:
            first = tl.argmax(choice, 1)
            best += tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), choice), 1)
        selected = tl.zeros((BLOCK_GROUPS,), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            chosen = group == tl.argmax(best, 0)
            selected = tl.where(chosen, 1, selected)
            best = tl.where(chosen, float("-inf"), best)
        choice = tl.where((selected != 0)[:, None], choice, float("-inf"))
    choice = tl.reshape(choice, (BLOCK_GROUPS * BLOCK_EACH,))
    scores = tl.reshape(scores, (BLOCK_GROUPS * BLOCK_EACH,))
    expert = tl.reshape(expert, (BLOCK_GROUPS * BLOCK_EACH,))
    index = tl.arange(0, BLOCK_GROUPS * BLOCK_EACH)
    rank = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(TOP_K):
        chosen = index == tl.argmax(choice, 0)
        ids = tl.where(rank == k, tl.sum(tl.where(chosen, expert, 0), 0), ids)
        weights = tl.where(rank == k, tl.sum(tl.where(chosen, scores, 0.0), 0), weights)
        choice = tl.where(chosen, float("-inf"), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    if live_ptr is not None:
        ids = tl.where(tl.load(live_ptr + token) != 0, ids, -1)
    at = token * TOP_K + rank
    tl.store(ids_ptr + at, ids.to(tl.int64) - FIRST, rank < TOP_K)
    tl.store(weights_ptr + at, weights * scaling, rank < TOP_K)


def moe_topk(logits: torch.Tensor, bias: torch.Tensor | None, how: Choice,
             live: torch.Tensor | None = None, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``(expert ids [T, top_k] int64, weights [T, top_k] float32)``, the best first.

    Rows where ``live`` [T] (of any type) is 0 are padding and get the id -1, which no rank has. ``first`` is subtracted
    from all ids: those of a rank's own experts then begin with 0.

    ``logits`` [T, experts]; a token chooses by its scores plus ``bias`` [experts] float32 and weighs by the scores
    alone (DeepSeek-V3's balancing without a loss, arXiv:2412.19437, 2.1.2).
    """
    if not runs_triton(logits) or how.scoring == "sparsemixer":  # two experts of few: no model's time goes there
        return reference.moe_topk(logits, bias, how, live, first)
    tokens, experts = logits.shape
    ids = torch.empty((tokens, how.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, how.top_k), dtype=torch.float32, device=logits.device)
    limited = how.top_groups < how.num_groups
    groups = how.num_groups if limited else 1
    block_groups, block_each = triton.next_power_of_2(groups), triton.next_power_of_2(experts // groups)
    if tokens:
        _moe_topk_kernel[(tokens,)](
            logits, bias, live, ids, weights, logits.stride(0), groups, experts // groups, how.scaling_factor,
            TOP_K=how.top_k, TOP_GROUPS=how.top_groups, SIGMOID=how.scoring == "sigmoid",
            RENORMALIZE=how.renormalize, PAIRS=how.group_score == "top2", LIMITED=limited, BIASED=bias is not None,
            BLOCK_GROUPS=block_groups, BLOCK_EACH=block_each, BLOCK_K=triton.next_power_of_2(how.top_k), FIRST=first,
            num_warps=max(1, min(8, block_groups * block_each // 128)), **pdl(logits))
    return ids, weights
