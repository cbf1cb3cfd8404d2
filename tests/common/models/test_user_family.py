"""A family that user code registers in one file, with partial rotary embeddings, LayerNorms and another activation,
against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.activations import ACT2FN

import baton
from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.distributed.tp import TPGroup
from baton.common.layers.activations import ACTIVATIONS, activation_of
from baton.common.layers.mlp import MLP
from baton.common.models.registry import MODELS, family_of, load_model_spec
from baton.common.weights.lazy import InMemory
from baton.common.weights.slots import allocator
from baton.tests.helpers import nemotron_family
from baton.tests.helpers.nemotron_models import save_nemotron
from baton.tests.helpers.small_models import check_chunks, load_runner, server_config

TOLERANCE = 1e-4
CASES = {
    "as_published": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "a_quarter": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.25}},
    "scaled": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_type": "linear",
                                 "factor": 2.0}},
    "whole_heads": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 1.0}},
    "gelu": {"hidden_act": "gelu"},
    "gelu_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "silu": {"hidden_act": "silu", "tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    model = save_nemotron(tmp_path, **CASES[case])
    prompts = [np.random.default_rng(count).integers(0, 131, count) for count in (73, 29, 65)]
    check_chunks(load_runner(server_config(tmp_path)), model, prompts, 23, TOLERANCE)


def test_specification_has_the_core_and_the_familys_own_facts(tmp_path):
    save_nemotron(tmp_path)
    spec = load_model_spec(ModelArgs(str(tmp_path)))
    assert spec.architecture == "OwnNemotronForCausalLM"
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (3, 2, 16)
    assert spec.family.rope.rotary_dim(spec.head_dim) == 8 and spec.family.hidden_act == "relu2"
    facts = spec.facts()
    assert facts["partial_rotary_factor"] == 0.5 and facts["norm_eps"] == 1e-4 and "family" not in facts


def fused_parts(name, tensor):
    """As a family has them whose checkpoints fuse q, k and v, and name layers in another way."""
    name = name.replace("transformer.h.", "model.layers.")
    if not name.endswith("qkv.weight"):
        return [(name, tensor)]
    parts = zip("qkv", (slice(0, 64), slice(64, 96), slice(96, 128)))
    return [(name.replace("qkv.weight", f"{part}_proj.weight"), InMemory(tensor[rows])) for part, rows in parts]


def test_a_familys_checkpoints_may_name_and_fuse_tensors_in_another_way(tmp_path, monkeypatch):
    model = save_nemotron(tmp_path)
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS.entries()))  # the name is forgotten after this test
    baton.register_model("FusedForCausalLM", read=nemotron_family.read, blocks=nemotron_family.blocks,
                         defaults=family_of("OwnNemotronForCausalLM").defaults, tensor_parts=fused_parts)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["FusedForCausalLM"]}))
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        qkv = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"model.layers.{layer}.self_attn.qkv.weight"] = torch.cat(qkv)
    save_file({name.replace("model.layers.", "transformer.h."): tensor for name, tensor in tensors.items()},
              tmp_path / "model.safetensors")
    prompts = [np.random.default_rng(count).integers(0, 131, count) for count in (30, 9)]
    check_chunks(load_runner(server_config(tmp_path)), model, prompts, 23, TOLERANCE)


def test_an_unknown_activation_is_refused(tmp_path):
    save_nemotron(tmp_path, hidden_act="tanh")
    with pytest.raises(ConfigError, match="Activation 'tanh' is not supported: use a checkpoint with hidden_act 'g"):
        load_runner(server_config(tmp_path))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_transformers_own(name):
    x = torch.linspace(-4, 4, 41)
    torch.testing.assert_close(activation_of(name, gated=False)(x), ACT2FN[name](x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "relu2", "silu"])
def test_gates_of_any_activation(name):
    generator = torch.Generator().manual_seed(0)
    mlp = MLP("mlp", 12, 20, False, TPGroup(), allocator(torch.float32, torch.device("cpu")), name)
    weights = {}
    for slot in mlp.slots():
        weights[slot.name.split(".")[1]] = weight = torch.randn(slot.shape, generator=generator)
        slot.fill(weight)
    x = torch.randn(5, 12, generator=generator)
    want = (ACT2FN[name](x @ weights["gate_proj"].T) * (x @ weights["up_proj"].T)) @ weights["down_proj"].T
    for got in (mlp(x), mlp.partial(x), mlp.forward_deferred(x)):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
