"""Hybrid families, with recurrent layers, against transformers on tiny random weights."""

from __future__ import annotations

from baton.tests.helpers.family_parity import check_family

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
          "num_hidden_layers": 4, "head_dim": 16, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 20, "decoder_sparse_step": 2}
KINDS = ["linear_attention", "full_attention"] * 2


def test_qwen3_next(tmp_path):
    check_family(tmp_path, "Qwen3Next", **LINEAR, **EXPERTS, layer_types=KINDS)


def test_qwen3_5(tmp_path):
    check_family(tmp_path, "Qwen3_5", config_name="Qwen3_5Text", **LINEAR, layer_types=KINDS)
