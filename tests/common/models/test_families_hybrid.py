"""Hybrid families, with recurrent layers, against transformers on tiny random weights."""

from __future__ import annotations

import pytest

from baton.tests.helpers.family_parity import check_family
from baton.tests.helpers.hybrid_models import MAMBA

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
          "num_hidden_layers": 4, "head_dim": 16, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 20, "decoder_sparse_step": 2}
KINDS = ["linear_attention", "full_attention"] * 2


def test_qwen3_next(tmp_path):
    check_family(tmp_path, "Qwen3Next", **LINEAR, **EXPERTS, layer_types=KINDS)


def test_qwen3_5(tmp_path):
    check_family(tmp_path, "Qwen3_5", config_name="Qwen3_5Text", **LINEAR, layer_types=KINDS)


def test_qwen3_5_moe(tmp_path):
    experts = {**EXPERTS, "decoder_sparse_step": 1}
    check_family(tmp_path, "Qwen3_5Moe", config_name="Qwen3_5MoeText", **LINEAR, **experts, layer_types=KINDS, tp=0)


@pytest.mark.parametrize("changes", [{"mamba_rms_norm": True}, {"mamba_conv_bias": False}])
def test_falcon_h1(tmp_path, changes):
    check_family(tmp_path, "FalconH1", **MAMBA, **changes, tp=2 if "mamba_rms_norm" in changes else 0)


NEMOTRON = {"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 12, "n_groups": 2, "head_dim": 12,
            "num_hidden_layers": None}


@pytest.mark.parametrize("pattern", ["M-M*-M", "-*--MM-"])
def test_nemotron_h(tmp_path, pattern):
    """Layers without an MLP, and MLPs alone."""
    check_family(tmp_path, "NemotronH", **NEMOTRON, hybrid_override_pattern=pattern)


GRANITE = {"mamba_n_heads": 8, "mamba_d_state": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
           "shared_intermediate_size": 40, "embedding_multiplier": 2.0, "residual_multiplier": 0.3,
           "attention_multiplier": 0.5, "logits_scaling": 3.0, "layer_types": ["mamba", "attention", "mamba"]}


@pytest.mark.parametrize("changes", [{}, {"num_local_experts": 0, "position_embedding_type": "rope"}])
def test_granite_4(tmp_path, changes):
    check_family(tmp_path, "GraniteMoeHybrid", **GRANITE | changes, tp=0)
