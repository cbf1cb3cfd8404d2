"""DeepSeek-V2 and V3 against transformers: logits over pages, chunks and prefixes, by every way of decoding."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from baton.common.api.errors import ConfigError
from baton.common.attention.mla import select
from baton.common.attention.mla.select import choose_latent_backend, choose_latent_decode_backend
from baton.common.config.mla import MLASpec
from baton.common.config.server import CacheArgs, KernelArgs
from baton.common.models.registry import load_model_spec
from baton.common.quantization.float8 import dequantize_blocks, quantize_blocks
from baton.common.runner.kv_sizing import kv_layout
from baton.tests.common.models.test_models_numerics import TOLERANCE, check_whole_and_decode, tokens_of
from baton.tests.helpers.deepseek_models import BASE as DEEPSEEK
from baton.tests.helpers.deepseek_models import YARN, save_deepseek
from baton.tests.helpers.fp8_checkpoints import FINEGRAINED, save_float8, state
from baton.tests.helpers.small_models import (
    check_chunks,
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)

FLOAT8_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "first_k_dense_replace": 2,
                "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
                "v_head_dim": 64, "num_key_value_heads": 4, "head_dim": 32}
SHAPES = {
    "v2": (2, {}),
    "v2 with query latents": (2, {"q_lora_rank": 40}),
    "v2 with groups": (2, {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "v2 stretched": (2, {"rope_parameters": YARN}),
    "v2 dense": (2, {"first_k_dense_replace": 3}),
    "v3": (3, {}),
    "v3 without query latents": (3, {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "v3 stretched": (3, {"rope_parameters": YARN}),
    "v3 halves turned": (3, {"rope_interleave": False}),
    "v3 biases": (3, {"attention_bias": True}),
    "v3 biases without query latents": (3, {"attention_bias": True, "q_lora_rank": None}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers(tmp_path, shape):
    version, changes = SHAPES[shape]
    model = save_deepseek(tmp_path, version, **changes)
    check_whole_and_decode(load_runner(server_config(tmp_path)), model, count=150)


@pytest.mark.parametrize("page_size,chunk", [(1, 7), (16, 1), (16, 64)])
def test_page_and_chunk_sizes(tmp_path, page_size, chunk):
    """Ragged prompts in chunks that divide neither prompt nor page, then a joint decode step of unequal lengths."""
    model = save_deepseek(tmp_path, 3)
    runner = load_runner(server_config(tmp_path, page_size=page_size))
    check_chunks(runner, model, [tokens_of(count) for count in (73, 2, 29)], chunk, TOLERANCE)


def test_requests_share_a_prefix(tmp_path):
    model = save_deepseek(tmp_path, 2)
    runner = load_runner(server_config(tmp_path, num_layer_groups=2))
    assert runner.layout.groups == (2, 1)
    pages = scattered_pages(runner, 2, 64)
    prefix, tails = tokens_of(32), [tokens_of(9), tokens_of(17)]
    forward(runner, [(prefix, 0, pages[0])])
    shared = np.concatenate((pages[0][:2], pages[1][2:]))
    got = forward(runner, [(tails[0], 32, pages[0]), (tails[1], 32, shared)])
    want = torch.cat([expected_logits(model, np.concatenate((prefix, tail)))[32:] for tail in tails])
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_pages_hold_one_latent_a_token_on_every_rank(tmp_path):
    save_deepseek(tmp_path, 3)
    spec = load_model_spec(server_config(tmp_path).model)
    layouts = [kv_layout(CacheArgs(), spec, size, "bfloat16") for size in (1, 2, 4)]
    assert layouts[0] == layouts[1] == layouts[2]
    assert layouts[0].form == "latent" and layouts[0].page_bytes == 3 * 16 * (24 + 8) * 2
    runner = load_runner(server_config(tmp_path))
    assert sum(group.nbytes for group in runner.pool.groups) == runner.pool.num_pages * runner.layout.page_bytes
    runner.pool.latents(2)[5, 3] = 1
    assert runner.pool.groups[0][5, 2, 0, 0, 3].sum() == 32


def test_layers_of_multi_token_prediction_are_passed_over(tmp_path, caplog):
    model = save_deepseek(tmp_path, 3)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    save_file({**tensors, "model.layers.3.enorm.weight": torch.ones(48), "model.layers.3.eh_proj.weight":
               torch.ones(48, 96)}, file)
    with caplog.at_level(logging.INFO, "baton"):
        check_whole_and_decode(load_runner(server_config(tmp_path)), model)
    (line,) = [record.getMessage() for record in caplog.records if "multi-token" in record.getMessage()]
    assert "2 tensors" in line and "model.layers.3" in line
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    caplog.clear()
    load_runner(server_config(tmp_path))
    assert "model.layers.3.eh_proj.weight, model.layers.3.enorm.weight, which its architecture" in caplog.text


GPU, WIDE = torch.device("cuda"), MLASpec(None, 512, 128, 64, 128, 0.1)
NARROW = dataclasses.replace(WIDE, kv_lora_rank=256)


def test_backends_that_cannot_are_refused():
    cpu = torch.device("cpu")
    assert choose_latent_backend("auto", cpu) == "torch"
    with pytest.raises(ConfigError, match="--attention-backend flashinfer is not for prompts"):
        choose_latent_backend("flashinfer", GPU)
    with pytest.raises(ConfigError, match="--attention-backend triton needs a GPU"):
        choose_latent_backend("triton", cpu)
    with pytest.raises(ConfigError, match="torch does not decode under CUDA graphs"):
        choose_latent_decode_backend(KernelArgs(decode_attention_backend="torch"), GPU, WIDE, "bfloat16", "bfloat16")
    allowed = KernelArgs(decode_attention_backend="torch", disable_cuda_graph=True)
    assert choose_latent_decode_backend(allowed, GPU, WIDE, "bfloat16", "bfloat16") == "torch"


@pytest.mark.parametrize("device,mla,dtype,stored,words", [
    (torch.device("cpu"), WIDE, "bfloat16", "bfloat16", "flashinfer needs a GPU"),
    (GPU, NARROW, "bfloat16", "bfloat16", "flashinfer takes latents of 512 \\+ 64 values, not 256 \\+ 64"),
    (GPU, WIDE, "float32", "float32", "not float32 in a model in float32"),
    (GPU, WIDE, "bfloat16", "float8_e4m3fn", "not float8_e4m3fn in a model in bfloat16"),
    (GPU, WIDE, "bfloat16", "bfloat16", None)])
def test_flashinfer_decodes_what_it_can(monkeypatch, device, mla, dtype, stored, words):
    args = KernelArgs(decode_attention_backend="flashinfer")
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package flashinfer, which is not installed"):
        choose_latent_decode_backend(args, device, mla, dtype, stored)
    monkeypatch.setattr(select, "find_spec", lambda name: object())
    if words is None:
        assert choose_latent_decode_backend(args, device, mla, dtype, stored) == "flashinfer"
    else:
        with pytest.raises(ConfigError, match=words):
            choose_latent_decode_backend(args, device, mla, dtype, stored)


def test_float8_weights(tmp_path):
    """As DeepSeek-V3's own checkpoint holds them. What makes keys and values of latents is made dense again."""
    sizes = {**DEEPSEEK, **FLOAT8_SIZES}
    plain = save_float8(tmp_path / "float8", "blocks", "DeepseekV3", **sizes)
    for layer in plain.model.layers:
        up = layer.self_attn.kv_b_proj
        up.forward = functools.partial(linear, weight=up.weight)  # its inputs are not rounded here
    tokens = tokens_of(30)
    exact = expected_logits(save_model(tmp_path / "exact", "DeepseekV3", **sizes), tokens)
    runner = load_runner(server_config(tmp_path / "float8"))
    weight = runner._model.layers[0].attention.up.weight
    torch.testing.assert_close(weight, plain.model.layers[0].self_attn.kv_b_proj.weight)
    pages = scattered_pages(runner, 1, 30)[0]
    found = torch.cat((forward(runner, [(tokens[:29], 0, pages)]),
                       forward(runner, [(tokens[29:], 29, pages)])))
    assert rms(found - expected_logits(plain, tokens)) < 0.1 * rms(found - exact) < 0.05 * rms(exact)
    before, address = weight.clone(), weight.data_ptr()
    runner.update_weights(str(tmp_path / "float8"), None)
    assert torch.equal(weight, before) and runner._model.layers[0].attention.up.weight.data_ptr() == address


def test_a_float8_checkpoint_with_experts(tmp_path):
    """The form of DeepSeek-V3's own: every projection, experts' too, in blocks; router, norms and embeddings plain.
    Against transformers with the same weights made dense; activations are rounded in ours alone."""
    # All experts for every token: a choice between two that are close would turn small differences into large ones.
    sizes = {**FLOAT8_SIZES, "first_k_dense_replace": 1, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1,
             "num_experts_per_tok": 8}
    model = save_deepseek(tmp_path, 3, **sizes)
    file, dense = tmp_path / "model.safetensors", {}
    written = {}
    for name, tensor in load_file(file).items():
        written[name] = tensor
        if "_proj" in name:
            written[name], scale = quantize_blocks(tensor, (128, 128))
            written[f"{name}_scale_inv"] = scale
            dense[name] = dequantize_blocks(written[name], scale, (128, 128))
    assert sum(".experts." in name for name in dense) == 8 * 3
    file.unlink()
    save_file(written, file)
    state(tmp_path, FINEGRAINED)
    tokens = tokens_of(30)
    exact = expected_logits(model, tokens)
    rounded = tmp_path / "rounded"
    model.save_pretrained(rounded)
    save_file(load_file(rounded / "model.safetensors") | dense, rounded / "model.safetensors")
    plain = expected_logits(type(model).from_pretrained(rounded, attn_implementation="eager").eval(), tokens)
    runner = load_runner(server_config(tmp_path))
    pages = scattered_pages(runner, 1, 30)[0]
    found = torch.cat((forward(runner, [(tokens[:29], 0, pages)]),
                       forward(runner, [(tokens[29:], 29, pages)])))
    assert 0.01 < rms(plain - exact) / rms(exact) < 0.15
    assert rms(found - plain) < 1.5 * rms(plain - exact)


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())
