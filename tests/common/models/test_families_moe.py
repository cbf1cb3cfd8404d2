"""Families with mixtures of experts, against transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

from baton.common.api.errors import ConfigError
from baton.common.models import llama4
from baton.common.models.registry import load_model_spec
from baton.tests.helpers.family_parity import (
    SEED,
    SMALL,
    TOLERANCE,
    VOCAB,
    check_family,
    check_greedy,
    check_model,
    check_prefix,
    check_ranks,
    randomize,
    save_random,
    tokens,
)
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.repacked_models import change_config
from baton.tests.helpers.small_models import check_chunks, load_runner, server_config
from baton.tests.helpers.toy_proposer import RepeatLastTokens

EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
MULTIPLIERS = {"attention_multiplier": 0.5, "logits_scaling": 3.0, "embedding_multiplier": 2.0,
               "residual_multiplier": 0.3}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3}
ALPHA = {"rope_type": "dynamic", "alpha": 3.0, "factor": 1.0, "rope_theta": 10000.0}

CASES = {
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.7, "norm_topk_prob": True}),
    "minimax": ("MiniMaxM2", {**LOCAL, "head_dim": 16, "rope_parameters": {
        "rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    "granite": ("GraniteMoe", {**LOCAL, **MULTIPLIERS}),
    "granite, shared": ("GraniteMoeShared", {**LOCAL, "shared_intermediate_size": 40, "attention_multiplier": 0.5}),
    "hunyuan, dense": ("HunYuanDenseV1", {"head_dim": 12, "rope_parameters": ALPHA}),
    "hunyuan": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 3, "head_dim": 12}),
    "ernie, dense": ("Ernie4_5", {"use_bias": True, "head_dim": 16}),
    "ernie": ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24,
                               "moe_num_shared_experts": 2}),
    "phi": ("Phimoe", {"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True,
                       "router_jitter_noise": 0.3}),
    "glm": ("Glm4Moe", {**EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "use_qk_norm": True,
                        "head_dim": 16, "routed_scaling_factor": 1.5, "attention_bias": True, "num_mtp_layers": 0}),
    "dots": ("Dots1", {**EXPERTS, "n_shared_experts": 2, "head_dim": 16, "sliding_window": 12,
                       "max_window_layers": 1}),
}
LLAMA_4 = {**LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "num_hidden_layers": 4, "head_dim": 12,
           "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "floor_scale": 10, "attn_scale": 0.5,
           "attention_chunk_size": 128}
DBRX = {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "vocab_size": VOCAB, "eos_token_id": 7,
        "attn_config": {"clip_qkv": 0.6, "kv_n_heads": 2, "rope_theta": 5000.0},
        "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3}}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    name, config = CASES[case]
    check_family(tmp_path, name, **config)


def test_llama_4_within_a_chunk(tmp_path):
    """Layers with and without rope, dense ones and mixtures."""
    check_family(tmp_path, "Llama4", config_name="Llama4Text", **LLAMA_4)


def test_llama_4_in_chunks(tmp_path, monkeypatch):
    """Prompts of several chunks in each of their steps, prefixes that end within a chunk, and drafts."""
    config = LLAMA_4 | {"attention_chunk_size": 16}
    model = save_random(tmp_path, "Llama4", config_name="Llama4Text", **config)
    monkeypatch.setattr(llama4, "_DEFAULT_CHUNKS", 16)
    prompts = [tokens(count) for count in (45, 2, 33, 17)]
    for page_size, chunk in ((1, 7), (16, 23), (8, 64)):
        check_chunks(load_runner(server_config(tmp_path, page_size=page_size)), model, prompts, chunk, TOLERANCE)
    check_prefix(tmp_path, model, VOCAB, TOLERANCE)
    check_greedy(tmp_path, model, VOCAB)
    check_ranks(tmp_path, model, VOCAB, 2, TOLERANCE)
    found = []
    for proposer in (None, RepeatLastTokens()):
        engine = Engine(tmp_path, proposer=proposer)
        engine.start("0", prompts[0].tolist(), max_new_tokens=30, ignore_eos=True)
        found.append(tokens_of(engine.run()))
    assert found[0] == found[1] and engine.drafting.num_steps > 0
    with pytest.raises(ConfigError, match="--page-size 64 must divide the 16 tokens of a chunk"):
        load_runner(server_config(tmp_path, page_size=64))


def test_contexts_of_llama_4(tmp_path):
    changes = {"attention_chunk_size": 16, "max_position_embeddings": 1 << 20}
    save_random(tmp_path, "Llama4", config_name="Llama4Text", **LLAMA_4 | changes)
    assert load_model_spec(server_config(tmp_path).model).context_length == 16
    assert load_model_spec(server_config(tmp_path, context_length=200_000).model).context_length == 200_000


def test_dbrx(tmp_path):
    config = transformers.DbrxConfig(**DBRX)
    config._attn_implementation = "eager"
    torch.manual_seed(SEED)
    model = transformers.DbrxForCausalLM(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    check_model(tmp_path, model)


def test_glm_4_7_flash(tmp_path):
    check_family(tmp_path, "Glm4MoeLite", q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
                 v_head_dim=16, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3,
                 moe_intermediate_size=24, mlp_layer_types=["dense", "sparse", "sparse"])


def test_deepseek_moe(tmp_path):
    """DeepSeek's first mixtures: Llama, with DeepSeek-V2's experts."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(**SMALL, architectures=["DeepseekForCausalLM"])
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).eval()
    experts = transformers.DeepseekV2Config(**SMALL, **EXPERTS, n_shared_experts=2, routed_scaling_factor=1.0)
    for layer in model.model.layers[1:]:
        layer.mlp = DeepseekV2Moe(experts)
    randomize(model)
    model.save_pretrained(tmp_path)
    change_config(tmp_path, {"model_type": "deepseek", "architectures": ["DeepseekForCausalLM"], **EXPERTS,
                             "n_shared_experts": 2})
    check_model(tmp_path, model)


@pytest.mark.parametrize("name,changes,sentence", [
    ("HunYuanMoEV1", {"moe_topk": [1, 2, 2]}, r"moe_topk \[1, 2, 2\]: layers that differ"),
    ("Phimoe", {"num_experts_per_tok": 1}, "sparsemixer chooses 2"),
    ("Ernie4_5_Moe", {"use_bias": True}, "supported without biases"),
    ("Ernie4_5_Moe", {"moe_num_experts": [64, 64]}, "experts for images"),
], ids=lambda value: value if isinstance(value, str) and value.isalnum() else "")
def test_what_is_not_supported_is_named(tmp_path, name, changes, sentence):
    getattr(transformers, f"{name}Config")(**SMALL, architectures=[f"{name}ForCausalLM"]).save_pretrained(tmp_path)
    change_config(tmp_path, changes)
    with pytest.raises(ConfigError, match=sentence):
        load_model_spec(server_config(tmp_path).model)
