"""Grok-1, which transformers does not have, against Gemma 2 of transformers with experts in place of its MLPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import gelu

from baton.common.api.errors import ConfigError
from baton.common.config.moe import MoESpec
from baton.common.config.quantization import LayerFormat
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.tp import TPGroup
from baton.common.layers.moe.experts import Experts
from baton.common.models.registry import load_model_spec
from baton.common.quantization.bitsandbytes import BitsAndBytes
from baton.common.quantization.fp8 import Fp8
from baton.common.quantization.int8 import Int8
from baton.common.quantization.int_weight_only import IntWeightOnly
from baton.common.quantization.mxfp4 import Mxfp4
from baton.common.weights.slots import allocator
from baton.tests.helpers.dummy_weights import fill_dummy
from baton.tests.helpers.family_parity import SEED, SMALL, check_model, randomize
from baton.tests.helpers.repacked_models import Tensors, renamed, repack
from baton.tests.helpers.small_models import server_config

NORMS = {".input_layernorm.": ".pre_attn_norm.", ".post_attention_layernorm.": ".post_attn_norm.",
         ".pre_feedforward_layernorm.": ".pre_moe_norm.", ".post_feedforward_layernorm.": ".post_moe_norm."}
CONVERTED = {"norm.weight": "norm.scale", ".mlp.": ".moe_block.", ".self_attn.": ".attn."}
AS_MIXTRAL = {".linear_1.": ".w2.", ".linear_v.": ".w3.", ".linear.": ".w1.", ".mlp.": ".block_sparse_moe."}


class Mixture(torch.nn.Module):
    """Experts and router of Grok-1; a router's logits are capped by 2, so that random ones show it."""

    def __init__(self, hidden: int, size: int):
        super().__init__()
        self.gate = torch.nn.Linear(hidden, 8, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.ModuleDict({
            "linear": torch.nn.Linear(hidden, size, bias=False), "linear_v": torch.nn.Linear(hidden, size, bias=False),
            "linear_1": torch.nn.Linear(size, hidden, bias=False)}) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (2 * torch.tanh(self.gate(x) / 2)).softmax(-1)
        weights, ids = scores.topk(2)
        shares = torch.zeros_like(scores).scatter(-1, ids, weights)
        return sum(shares[..., i, None] * expert["linear_1"](
            gelu(expert["linear"](x), approximate="tanh") * expert["linear_v"](x))
            for i, expert in enumerate(self.experts))


def save_grok(folder: Path, names: dict[str, str], **changes: Any) -> Any:
    torch.manual_seed(SEED)
    config = transformers.Gemma2Config(**{
        **SMALL, "head_dim": 12, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0, "num_hidden_layers": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-5})
    config._attn_implementation = "eager"
    model = transformers.Gemma2ForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.mlp = Mixture(48, 40)
    randomize(model)
    model.save_pretrained(folder)

    def change(tensors: Tensors) -> Tensors:
        made = {name: tensor + 1 if "norm" in name else tensor for name, tensor in tensors.items()}
        return renamed({**made, "lm_head.weight": made["lm_head.weight"] * 2}, {**NORMS, **names})

    repack(folder, change, {
        "architectures": ["Grok1ModelForCausalLM"], "model_type": "grok-1", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "embedding_multiplier_scale": 48 ** 0.5, "output_multiplier_scale": 0.5,
        "router_logit_softcapping": 2.0, **changes}, drop=("hidden_activation", "sliding_window", "layer_types"))
    return model


def test_equals_a_reference(tmp_path):
    check_model(tmp_path, save_grok(tmp_path, CONVERTED))


def test_names_as_mixtral_s(tmp_path):
    check_model(tmp_path, save_grok(tmp_path, AS_MIXTRAL, architectures=["Grok1ForCausalLM"]), tp=0)


@pytest.mark.parametrize("scheme", [None, Fp8("channel"), Fp8("block"), Int8(), BitsAndBytes(), BitsAndBytes("int8"),
                                    IntWeightOnly(8, -1), Mxfp4()],
                         ids=["none", "fp8", "fp8 blocks", "int8", "nf4", "LLM.int8", "int8 weights", "mxfp4"])
def test_every_expert_is_gated_by_gelu(scheme):
    """The grouped product of stacks is what the layers that the stacks consist of compute one by one."""
    made = experts(scheme)
    torch.manual_seed(0)
    x, places, weights = torch.randn(9, 128), torch.stack([torch.randperm(4)[:2] for _ in range(9)]), torch.rand(9, 2)
    want = torch.zeros(9, 128)
    for token in range(9):
        for place, weight in zip(places[token].tolist(), weights[token]):
            gate, up = made.gate_up.methods[place](x[token:token + 1]).chunk(2, -1)
            want[token] += weight * made.down.methods[place](gelu(gate, approximate="tanh") * up)[0]
    torch.testing.assert_close(made(x, places, weights), want, atol=1e-5, rtol=1e-4)
    assert want.std() > 0


def experts(scheme: LayerFormat | None) -> Experts:
    spec = MoESpec(num_experts=4, top_k=2, intermediate_size=128, layers=(0,), activation="gelu_pytorch_tanh")
    made = Experts("mlp.experts", spec, 128, ExpertParallel(TPGroup()),
                   allocator(torch.float32, torch.device("cpu"), scheme))
    fill_dummy(made.slots(), 3)
    return made


@pytest.mark.parametrize("changes", [{"residual_moe": True}, {"rope_type": "yarn_log"}, {"attn_temperature_len": 1024}])
def test_what_later_groks_have_is_refused(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Grok1ForCausalLM"], **changes}))
    with pytest.raises(ConfigError, match=f"config.json states {next(iter(changes))}"):
        load_model_spec(server_config(tmp_path).model)
