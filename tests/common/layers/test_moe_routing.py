"""Which experts a token gets and with what weight, against transformers' routers; what of a configuration says so."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from baton.common.api.errors import ConfigError
from baton.common.config.model_config import ModelConfig
from baton.common.config.moe import MoESpec
from baton.common.config.server import ModelArgs
from baton.common.layers.moe.routing import Router
from baton.common.models.registry import family_of
from baton.common.weights.slots import allocator
from baton.kernels.reference import group_scores, limit_to_groups, moe_topk

HIDDEN, EXPERTS = 32, 16
DEEPSEEK = {"hidden_size": HIDDEN, "n_routed_experts": EXPERTS, "num_experts_per_tok": 4, "num_hidden_layers": 3,
            "moe_intermediate_size": 10, "n_shared_experts": 2, "first_k_dense_replace": 1}
ROUTERS = {
    "mixtral": (MixtralTopKRouter, MixtralConfig,
                {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": 12}),
    "qwen3": (Qwen3MoeTopKRouter, Qwen3MoeConfig, {"num_experts": EXPERTS, "num_experts_per_tok": 5}),
    "qwen3_renormalised": (Qwen3MoeTopKRouter, Qwen3MoeConfig,
                           {"num_experts": EXPERTS, "num_experts_per_tok": 5, "norm_topk_prob": True}),
    "deepseek_v2": (DeepseekV2TopkRouter, DeepseekV2Config,
                    {**DEEPSEEK, "routed_scaling_factor": 16.0}),
    "deepseek_v2_groups": (DeepseekV2TopkRouter, DeepseekV2Config,
                           {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "deepseek_v3": (DeepseekV3TopkRouter, DeepseekV3Config,
                    {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "deepseek_v3_one_group": (DeepseekV3TopkRouter, DeepseekV3Config,
                              {**DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
}


def experts_of(family: str, values: dict) -> MoESpec | None:
    """The experts that a family's file reads from a configuration."""
    name = f"{family}ForCausalLM"
    found = family_of(name)
    return found.read(ModelConfig.complete(name, values, None, found.defaults, ModelArgs("none"))).moe


@pytest.mark.parametrize("name", ROUTERS)
@torch.inference_mode()
def test_equals_transformers(name):
    module, config_class, values = ROUTERS[name]
    torch.manual_seed(1)
    config = config_class(**{"hidden_size": HIDDEN, **values})
    theirs = module(config)
    theirs.weight.data.normal_(0, 0.3)
    family = module.__name__.removesuffix("TopkRouter").removesuffix("TopKRouter")
    spec = experts_of(family, config.to_dict())
    assert spec is not None
    ours = Router("gate", spec, HIDDEN, allocator(torch.float32, torch.device("cpu")))
    ours.weight.copy_(theirs.weight)
    if ours.bias is not None:
        theirs.e_score_correction_bias.normal_(0, 0.5)
        ours.bias.copy_(theirs.e_score_correction_bias)
    x = torch.randn(200, HIDDEN)
    _, weights, ids = theirs(x)
    got_ids, got_weights = ours(x)
    dense, got = torch.zeros(200, EXPERTS), torch.zeros(200, EXPERTS)
    torch.testing.assert_close(got.scatter(1, got_ids, got_weights), dense.scatter(1, ids, weights.float()),
                               atol=1e-6, rtol=1e-5)


def spec_of(**changes) -> MoESpec:
    return MoESpec(**{"num_experts": 6, "top_k": 2, "intermediate_size": 8, "layers": (0,), **changes})


def test_groups_are_limited_by_their_best_experts():
    choice = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.2, 0.1]])
    best = spec_of(num_groups=3, top_groups=1)
    assert group_scores(choice, best).tolist() == [pytest.approx([0.9, 0.6, 0.2])]
    assert limit_to_groups(choice, best).isfinite().tolist() == [[True, True, False, False, False, False]]
    pairs = spec_of(num_groups=3, top_groups=1, group_score="top2")
    assert limit_to_groups(choice, pairs).isfinite().tolist() == [[False, False, True, True, False, False]]
    assert limit_to_groups(choice, spec_of()) is choice


def test_a_bias_moves_the_choice_and_not_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0, -3.0]])
    spec = spec_of(scoring="sigmoid", renormalize=False, correction_bias=True, scaling_factor=2.0)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 9.0])
    ids, weights = moe_topk(logits, bias, spec)
    assert ids.tolist() == [[5, 0]]
    torch.testing.assert_close(weights, 2 * torch.tensor([[-3.0, 2.0]]).sigmoid())


def test_layers_with_experts():
    values = {"num_hidden_layers": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    qwen = {**values, "num_experts": 4}
    assert experts_of("Qwen3Moe", qwen).layers == (0, 1, 2, 3, 4, 5)
    assert experts_of("Qwen3Moe", {**qwen, "mlp_only_layers": [0, 5]}).layers == (1, 2, 3, 4)
    assert experts_of("Qwen3Moe", {**qwen, "decoder_sparse_step": 2}).layers == (1, 3, 5)
    assert experts_of("Qwen3Moe", {**qwen, "num_experts": 0}) is None
    assert experts_of("Qwen3Moe", {**values, "num_experts": None, "num_local_experts": 4}).num_experts == 4
    shared = experts_of("Qwen3Moe", {**qwen, "shared_expert_intermediate_size": 16})
    assert (shared.shared_size, shared.shared_gate, shared.shared_name) == (16, True, "shared_expert")
    deepseek = experts_of("DeepseekV3", DEEPSEEK)
    assert deepseek.layers == (1, 2) and deepseek.shared_size == 20 and not deepseek.shared_gate
    assert experts_of("DeepseekV2", {**DEEPSEEK, "n_routed_experts": None}) is None
    scaled = {**DEEPSEEK, "norm_topk_prob": True, "routed_scaling_factor": 16.0}
    assert experts_of("DeepseekV2", scaled).scaling_factor == 1.0


@pytest.mark.parametrize("changes,sentence", [
    ({"top_k": 7}, "gives a token 7 of 6 experts"),
    ({"num_groups": 4}, "2 experts from 1 of 4 groups of 6 experts"),
    ({"num_groups": 3, "top_groups": 1, "top_k": 3}, "3 experts from 1 of 3 groups"),
])
def test_impossible_choices_are_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        spec_of(**changes)
