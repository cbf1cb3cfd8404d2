"""Families whose checkpoints come with code of their own, or with names and layouts of their own, against models of
transformers that compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.common.api.errors import ConfigError
from baton.common.models.registry import load_model_spec, tensor_parts
from baton.common.weights.lazy import InMemory
from baton.tests.helpers.family_parity import SEED, VOCAB, check_family, check_model, randomize, save_random
from baton.tests.helpers.repacked_models import Tensors, fused, renamed, repack
from baton.tests.helpers.small_models import load_runner, server_config

HALF = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
GPT = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": VOCAB, "eos_token_id": 7,
       "bos_token_id": 1}
QKV = ("q_proj", "k_proj", "v_proj")
CASES = {
    "glm": ("Glm", {"head_dim": 16, "rope_parameters": HALF}),
    "glm, norms of outputs": ("Glm4", {"head_dim": 16, "rope_parameters": HALF}),
    "minicpm 3": ("MiniCPM3", {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
                               "num_key_value_heads": 4, "scale_emb": 3, "scale_depth": 0.7, "dim_model_base": 16}),
}
GPT_CASES = {
    "gpt-2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {}),
    "bigcode, all heads": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {"multi_query": False}),
    "gpt-j": ("GPTJForCausalLM", "GPTJConfig", {"rotary_dim": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    name, config = CASES[case]
    check_family(tmp_path, name, **config)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("case", GPT_CASES)
def test_gpt_equals_transformers(tmp_path, case):
    name, config_name, changes = GPT_CASES[case]
    config = getattr(transformers, config_name)(**GPT, **changes)
    config._attn_implementation = "eager"
    torch.manual_seed(SEED)
    model = getattr(transformers, name)(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    check_model(tmp_path, model)


def test_chatglm(tmp_path):
    """As GLM, with names and fused tensors of its own."""
    model = save_random(tmp_path, "Glm", head_dim=16, attention_bias=True,
                        rope_parameters={**HALF, "rope_theta": 20000.0})
    names = {"model.embed_tokens.": "transformer.embedding.word_embeddings.", "lm_head.": "transformer.output_layer.",
             "model.layers.": "transformer.encoder.layers.", "model.norm.": "transformer.encoder.final_layernorm.",
             ".self_attn.o_proj.": ".self_attention.dense.", ".self_attn.": ".self_attention.",
             ".gate_up_proj.": ".dense_h_to_4h.", ".down_proj.": ".dense_4h_to_h."}

    def change(tensors: Tensors) -> Tensors:
        made = renamed(fused(tensors, QKV, "query_key_value"), names)
        return {**made, "transformer.rotary_pos_emb.inv_freq": torch.ones(4)}

    repack(tmp_path, change, {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 3, "padded_vocab_size": VOCAB,
        "ffn_hidden_size": 88, "kv_channels": 16, "seq_length": 256, "layernorm_epsilon": model.config.rms_norm_eps,
        "add_qkv_bias": True, "multi_query_attention": True, "multi_query_group_num": 2, "rope_ratio": 2},
        drop=("num_hidden_layers", "vocab_size", "max_position_embeddings", "rope_parameters", "head_dim"))
    check_model(tmp_path, model)


def test_internlm(tmp_path):
    model = save_random(tmp_path, "Llama", attention_bias=True)
    repack(tmp_path, lambda tensors: tensors, {"architectures": ["InternLMForCausalLM"], "model_type": "internlm",
                                               "bias": True}, drop=("attention_bias", "mlp_bias"))
    check_model(tmp_path, model)


def test_internlm_2(tmp_path):
    """Queries, key and value of each KV head are side by side."""
    model = save_random(tmp_path, "Llama")
    names = {
        "model.embed_tokens.": "model.tok_embeddings.", "lm_head.": "output.",
        ".self_attn.o_proj.": ".attention.wo.", ".self_attn.": ".attention.",
        ".input_layernorm.": ".attention_norm.", ".post_attention_layernorm.": ".ffn_norm.",
        ".mlp.gate_proj.": ".feed_forward.w1.", ".mlp.up_proj.": ".feed_forward.w3.",
        ".mlp.down_proj.": ".feed_forward.w2."}
    repack(tmp_path, lambda tensors: renamed(fused(tensors, QKV, "wqkv", (4, 2, 2)), names),
           {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False})
    check_model(tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["InternLM2ForRewardModel"]}))
    score = torch.randn(1, 48, generator=torch.Generator().manual_seed(1))
    stored = load_file(tmp_path / "model.safetensors")
    del stored["output.weight"]
    save_file({**stored, "v_head.weight": score}, tmp_path / "model.safetensors")
    runner = load_runner(server_config(tmp_path, is_embedding=True))
    hidden = torch.randn(3, 48)
    torch.testing.assert_close(runner.classify(hidden), hidden @ score.T, atol=1e-4, rtol=0)


def test_internlm_3(tmp_path):
    model = save_random(tmp_path, "Llama", attention_bias=True, mlp_bias=True, head_dim=16)
    repack(tmp_path, lambda tensors: tensors, {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3",
                                               "bias": True, "qkv_bias": True}, drop=("attention_bias", "mlp_bias"))
    check_model(tmp_path, model)


def test_baichuan_2(tmp_path, monkeypatch):
    """The rows of its head have length 1 whatever the checkpoint holds."""
    monkeypatch.setattr("baton.common.models.baichuan._VOCAB_OF_2", VOCAB)
    model = save_random(tmp_path, "Llama", num_key_value_heads=4)

    def change(tensors: Tensors) -> Tensors:
        return fused(tensors, QKV, "W_pack")

    repack(tmp_path, change, {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"},
           drop=("num_key_value_heads", "head_dim"))
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight))
    check_model(tmp_path, model)


def test_xverse(tmp_path):
    model = save_random(tmp_path, "Llama")
    repack(tmp_path, lambda tensors: tensors, {"architectures": ["XverseForCausalLM"], "model_type": "xverse"})
    check_model(tmp_path, model)


def test_qwen_1(tmp_path):
    model = save_random(tmp_path, "Qwen2", num_key_value_heads=4)
    names = {"model.embed_tokens.": "transformer.wte.", "model.layers.": "transformer.h.",
             "model.norm.": "transformer.ln_f.", ".self_attn.o_proj.": ".attn.c_proj.", ".self_attn.": ".attn.",
             ".input_layernorm.": ".ln_1.", ".post_attention_layernorm.": ".ln_2.", ".mlp.up_proj.": ".mlp.w1.",
             ".mlp.gate_proj.": ".mlp.w2.", ".mlp.down_proj.": ".mlp.c_proj."}
    repack(tmp_path, lambda tensors: renamed(fused(tensors, QKV, "c_attn"), names), {
        "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "intermediate_size": 2 * 88, "kv_channels": 12,
        "seq_length": 256, "layer_norm_epsilon": 1e-6, "no_bias": True})
    check_model(tmp_path, model)


def test_minicpm(tmp_path):
    """As Granite, with the multipliers stated otherwise."""
    model = save_random(tmp_path, "Granite", embedding_multiplier=3.0, residual_multiplier=1.4 / 3 ** 0.5,
                        logits_scaling=3.0, attention_multiplier=12 ** -0.5, tie_word_embeddings=True)
    repack(tmp_path, lambda tensors: tensors, {
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 3, "scale_depth": 1.4,
        "dim_model_base": 16})
    check_model(tmp_path, model)


def test_mimo(tmp_path):
    """As Qwen2; its draft layers have other names."""
    model = save_random(tmp_path, "Qwen2")
    repack(tmp_path, lambda tensors: {**tensors, "model.mtp_layers.0.input_proj.weight": torch.zeros(48, 96)},
           {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1})
    check_model(tmp_path, model)


def test_draft_layers_of_mimo_are_named_as_deepseek_s(tmp_path):
    """Its projection has the hidden state first."""
    save_random(tmp_path, "Qwen2")
    repack(tmp_path, lambda tensors: tensors, {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1})
    spec = load_model_spec(server_config(tmp_path).model)
    parts = tensor_parts(spec)
    projection = torch.arange(48 * 96.0).view(48, 96)
    [(name, swapped)] = parts("model.mtp_layers.0.input_proj.weight", InMemory(projection))
    assert name == "model.layers.3.eh_proj.weight"
    torch.testing.assert_close(swapped[4:9], torch.cat((projection[4:9, 48:], projection[4:9, :48]), 1))
    found = [next(iter(parts(f"model.mtp_layers.0.{part}.weight", InMemory(projection))))[0] for part in (
        "token_layernorm", "hidden_layernorm", "final_layernorm", "self_attn.q_proj")]
    assert found == [f"model.layers.3.{part}.weight" for part in (
        "enorm", "hnorm", "shared_head.norm", "self_attn.q_proj")]


REFUSED = {
    "13B": ("BaichuanForCausalLM", {"num_hidden_layers": 2}, r"linear biases \(ALiBi\)"),
    "post norm": ("ChatGLMModel", {"post_layer_norm": False}, "post_layer_norm False: only True"),
    "layer scale": ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "wide heads": ("QWenLMHeadModel", {"kv_channels": 64}, "kv_channels 64"),
    "experts": ("MiniCPMForCausalLM", {"num_experts": 8}, "mixtures of experts are not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(tmp_path, case):
    architecture, config, sentence = REFUSED[case]
    write_config(tmp_path, architecture, config)
    with pytest.raises(ConfigError, match=sentence):
        load_model_spec(server_config(tmp_path).model)


def write_config(folder: Path, architecture: str, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
