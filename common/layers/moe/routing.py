"""Which experts compute a token, and with what weight: small pure functions over ``[T, num_experts]`` scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

from ...config.moe import MoESpec
from ...weights.slots import Allocate, Slot


def scores_of(logits: torch.Tensor, spec: MoESpec) -> torch.Tensor:
    """Float32 scores, each between 0 and 1, of router logits."""
    return logits.float().softmax(-1) if spec.scoring == "softmax" else logits.float().sigmoid()


def group_scores(choice: torch.Tensor, spec: MoESpec) -> torch.Tensor:
    """``[T, num_groups]`` of what tokens choose by: each group's best expert, or its two best added."""
    grouped = choice.unflatten(-1, (spec.num_groups, -1))
    return grouped.topk(2, dim=-1).values.sum(-1) if spec.group_score == "top2" else grouped.amax(-1)


def limit_to_groups(choice: torch.Tensor, spec: MoESpec) -> torch.Tensor:
    """``choice`` with minus infinity for the experts of all but the ``top_groups`` best groups."""
    if spec.top_groups == spec.num_groups:
        return choice
    best = group_scores(choice, spec).topk(spec.top_groups, dim=-1).indices
    outside = torch.ones(choice.shape[0], spec.num_groups, dtype=torch.bool, device=choice.device)
    outside = outside.scatter(1, best, False)[:, :, None].expand(-1, -1, choice.shape[1] // spec.num_groups)
    return choice.masked_fill(outside.flatten(1), float("-inf"))


def choose(logits: torch.Tensor, bias: torch.Tensor | None, spec: MoESpec) -> tuple[torch.Tensor, torch.Tensor]:
    """``(expert ids [T, top_k] int64, weights [T, top_k] float32)`` of router logits, see ``MoESpec``.

    ``bias`` [num_experts] moves the choice and not the weights (DeepSeek-V3's balancing without a loss, section 2.1.2
    of its report).
    """
    scores = scores_of(logits, spec)
    choice = scores if bias is None else scores + bias
    ids = limit_to_groups(choice, spec).topk(spec.top_k, dim=-1).indices
    return ids, weigh(scores.gather(1, ids), spec)


def weigh(chosen: torch.Tensor, spec: MoESpec) -> torch.Tensor:
    """The weights of experts with scores ``chosen`` [T, top_k]."""
    if spec.renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen if spec.scaling_factor == 1.0 else chosen * spec.scaling_factor


class Router:
    """Whole on every rank: its choice must be the same on all of them."""

    def __init__(self, name: str, spec: MoESpec, hidden_size: int, allocate: Allocate):
        self.name = name
        self.spec = spec
        self.weight = allocate(spec.num_experts, hidden_size)
        self.bias = allocate(spec.num_experts, dtype=torch.float32) if spec.correction_bias else None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``choose`` of hidden states ``[T, hidden]``."""
        return choose(self.logits(x), self.bias, self.spec)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, num_experts]``. Sigmoid scores of many experts lie close together, so that DeepSeek-V3 asks for
        float32 in the product too; softmax models were trained with it in the model's type."""
        if self.spec.scoring == "sigmoid":
            return linear(x.float(), self.weight.float())
        return linear(x, self.weight)

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight, tuple(self.weight.shape))
        if self.bias is not None:
            yield Slot(f"{self.name}.e_score_correction_bias", self.bias, tuple(self.bias.shape))
