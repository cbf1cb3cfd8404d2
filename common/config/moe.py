"""A mixture of experts, as the engine and the layers see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..api.errors import ConfigError


@dataclass(frozen=True)
class MoESpec:
    """The experts of a model, and the routing of a token to ``top_k`` of ``num_experts``.

    ``layers`` are those whose MLP is a mixture; the others are dense. ``intermediate_size`` is one expert's. A
    token scores every expert by ``scoring`` of the router's logits; by "sparsemixer" (arXiv:2409.12136) it chooses
    the two largest logits, and each weighs its softmax among the logits within ``jitter`` of it. It chooses by the
    scores (plus the router's own bias with ``correction_bias``), among the ``top_groups`` of ``num_groups`` groups
    of neighbouring experts whose best expert (``group_score`` max) or two best ones (top2) score highest. Chosen
    experts weigh their scores, with ``renormalize`` scaled to add up to 1, times ``scaling_factor``; with
    ``weighs_inputs`` a token's one expert gets it times its weight, instead of its result. In addition to the
    chosen experts, an MLP of ``shared_size`` runs for every token: ``shared_name`` in the checkpoint, with
    ``shared_gate`` times a sigmoid of its own. The router is ``router_name`` in the checkpoint, with
    ``router_bias`` added to its logits. ``expert_bias``: both products of an expert have one. ``gate_limit``: an
    expert's gate and up are clamped by it, see ``kernels.moe_experts``; 0 for a plain ``activation``, by its name in
    ``layers.activations``. With a ``router_softcap`` the router's logits are ``softcap * tanh(logits / softcap)``.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[int, ...]
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    jitter: float = 0.0
    renormalize: bool = True
    scaling_factor: float = 1.0
    weighs_inputs: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    correction_bias: bool = False
    shared_size: int = 0
    shared_name: str = "shared_experts"
    shared_gate: bool = False
    router_name: str = "gate"
    router_bias: bool = False
    expert_bias: bool = False
    gate_limit: float = 0.0
    activation: str = "silu"
    router_softcap: float = 0.0

    @classmethod
    def in_every_layer(cls, values: Mapping[str, Any], **facts: Any) -> MoESpec:
        """Reads a mixture in every layer by the names of Mixtral's config.json; ``facts`` are further fields."""
        return cls(num_experts=values["num_experts"], top_k=values["num_experts_per_tok"],
                   intermediate_size=values["intermediate_size"], layers=tuple(range(values["num_hidden_layers"])),
                   **facts)

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"config.json gives a token {self.top_k} of {self.num_experts} experts.")
        if self.scoring == "sparsemixer" and self.top_k != 2:
            raise ConfigError(f"config.json gives a token {self.top_k} experts: routing by sparsemixer chooses 2.")
        if self.weighs_inputs and self.top_k != 1:
            raise ConfigError(f"config.json gives a token {self.top_k} experts whose inputs are weighed: only 1 is "
                              "supported.")
        groups, chosen = self.num_groups, self.top_groups
        if self.num_experts % groups or not 1 <= chosen <= groups or self.top_k > self.num_experts // groups * chosen:
            raise ConfigError(f"config.json chooses {self.top_k} experts from {chosen} of {groups} groups of "
                              f"{self.num_experts} experts, which does not come out even.")
