"""Reads a mixture of experts from a checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..api.errors import ConfigError

Stacked = Literal["rows", "interleaved"]


@dataclass(frozen=True)
class MoESpec:
    """The experts of a model, and the routing of a token to ``top_k`` of ``num_experts``.

    ``layers`` are those whose MLP is a mixture; the others are dense. ``intermediate_size`` is one expert's. A token
    scores every expert by ``scoring`` of the router's logits. It chooses by the scores (plus the router's own bias with
    ``correction_bias``), among the ``top_groups`` of ``num_groups`` groups of neighbouring experts whose best expert
    (``group_score`` max) or two best ones (top2) score highest. Chosen experts weigh their scores, with ``renormalize``
    scaled to add up to 1, times ``scaling_factor``. In addition to the chosen experts, an MLP of ``shared_size`` runs
    for every token: ``shared_name`` in the checkpoint, with ``shared_gate`` times a sigmoid of its own. The router is
    ``router_name`` in the checkpoint, with ``router_bias`` added to its logits. ``expert_bias``: both products of an
    expert have one. ``gate_limit``: an expert's gate and up are clamped by it, see ``kernels.moe_experts``; 0 for a
    plain silu. ``stacked``: how a checkpoint holds a layer's experts in one tensor, as [E, out, in] each gate's rows
    before its up's, or [E, in, out], gate's and up's columns ``interleaved``.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[int, ...]
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
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
    stacked: Stacked = "rows"

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"config.json gives a token {self.top_k} of {self.num_experts} experts.")
        groups, chosen = self.num_groups, self.top_groups
        if self.num_experts % groups or not 1 <= chosen <= groups or self.top_k > self.num_experts // groups * chosen:
            raise ConfigError(f"config.json chooses {self.top_k} experts from {chosen} of {groups} groups of "
                              f"{self.num_experts} experts, which does not come out even.")


def mixtral_experts(config: Mapping[str, Any]) -> MoESpec:
    return MoESpec(num_experts=config["num_experts"], top_k=config["num_experts_per_tok"],
                   intermediate_size=config["intermediate_size"], layers=tuple(range(config["num_hidden_layers"])))


def gpt_oss_experts(config: Mapping[str, Any]) -> MoESpec:
    """A softmax over the chosen experts' logits is that over all of them, renormalized."""
    top_k = config.get("experts_per_token") or config["num_experts_per_tok"]  # the first is OpenAI's own name
    return MoESpec(num_experts=config["num_experts"], top_k=top_k,
                   intermediate_size=config["intermediate_size"], layers=tuple(range(config["num_hidden_layers"])),
                   router_name="router", router_bias=True, expert_bias=True,
                   gate_limit=float(config.get("swiglu_limit") or 7.0), stacked="interleaved")


def qwen_experts(config: Mapping[str, Any]) -> MoESpec | None:
    """Reads Qwen2-MoE's or Qwen3-MoE's experts; None where no layer has any."""
    dense, step = config.get("mlp_only_layers") or (), config["decoder_sparse_step"]
    layers = tuple(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
    if not layers or not config["num_experts"]:
        return None
    return MoESpec(num_experts=config["num_experts"], top_k=config["num_experts_per_tok"],
                   intermediate_size=config["moe_intermediate_size"], layers=layers,
                   renormalize=bool(config["norm_topk_prob"]),
                   shared_size=config.get("shared_expert_intermediate_size") or 0, shared_name="shared_expert",
                   shared_gate=bool(config.get("shared_expert_intermediate_size")))


def deepseek_experts(config: Mapping[str, Any], *, version: Literal[2, 3]) -> MoESpec | None:
    """Reads DeepSeek-V2's or V3's experts; None where no layer has any.

    V2 scores by softmax and its groups by their best expert, V3 by sigmoid, with a bias, and by their two best. V2 as
    published scales weights only where it does not renormalise them.
    """
    first, step = config["first_k_dense_replace"] or 0, config.get("moe_layer_freq") or 1
    layers = tuple(i for i in range(config["num_hidden_layers"]) if i >= first and i % step == 0)
    if not layers or not config["num_experts"]:
        return None
    renormalize = bool(config["norm_topk_prob"])
    scaling = float(config["routed_scaling_factor"])
    grouped = version == 3 or config["topk_method"] == "group_limited_greedy"
    return MoESpec(
        num_experts=config["num_experts"], top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"], layers=layers,
        scoring="sigmoid" if version == 3 else "softmax", renormalize=renormalize,
        scaling_factor=1.0 if version == 2 and renormalize else scaling,
        num_groups=(config.get("n_group") or 1) if grouped else 1,
        top_groups=(config.get("topk_group") or 1) if grouped else 1,
        group_score="top2" if version == 3 else "max", correction_bias=version == 3,
        shared_size=(config.get("n_shared_experts") or 0) * config["moe_intermediate_size"])
