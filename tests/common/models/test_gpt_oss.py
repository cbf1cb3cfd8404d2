"""gpt-oss against transformers: sinks, windows and full layers in turns, clamped experts with biases, its checkpoints;
and the windows of other families."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.common.api.errors import ConfigError
from baton.common.attention.per_layer_backend import PerLayerBackend
from baton.common.attention.torch_backend import TorchBackend
from baton.common.kvcache.cache_group import SlidingWindow
from baton.common.models.registry import load_model_spec
from baton.common.quantization.mxfp4 import Mxfp4
from baton.common.quantization.mxfp4_experts import from_mxfp4
from baton.common.runner.kv_sizing import _pages_within, page_counts
from baton.common.runner.preflight import pool_layers
from baton.tests.common.models.test_models_numerics import TOLERANCE, check_whole_and_decode
from baton.tests.common.models.test_models_numerics import tokens_of as random_tokens
from baton.tests.common.weights.test_weights import change
from baton.tests.helpers.gpt_oss_models import WINDOW, save_gpt_oss
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import check_chunks, load_runner, save_model, server_config
from baton.tests.helpers.small_moe import save_moe


@pytest.mark.parametrize("changes", [
    {}, {"attention_bias": False}, {"num_key_value_heads": 1, "num_hidden_layers": 2},
    {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_hidden_layers": 3},
    {"layer_types": ["full_attention"], "num_hidden_layers": 1, "tie_word_embeddings": True},
], ids=str)
def test_equals_transformers(tmp_path, changes):
    model = save_gpt_oss(tmp_path, **changes)
    check_whole_and_decode(load_runner(server_config(tmp_path)), model)


def test_values_beyond_the_clamps(tmp_path):
    """Biases of up to 30 on gate and up: most values are cut off at 7."""
    model = save_gpt_oss(tmp_path, num_hidden_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj_bias.uniform_(-30, 30)
            layer.mlp.experts.down_proj.mul_(0.1)
    model.save_pretrained(tmp_path)
    check_whole_and_decode(load_runner(server_config(tmp_path)), model)


@pytest.mark.parametrize("page_size,chunk", [(16, 7), (4, 16), (1, 64)])
def test_chunks_across_the_windows_border(tmp_path, page_size, chunk):
    model = save_gpt_oss(tmp_path)
    runner = load_runner(server_config(tmp_path, page_size=page_size))
    check_chunks(runner, model, [random_tokens(count) for count in (73, 15, 33)], chunk, TOLERANCE)


def test_the_prefix_cache_and_answers_longer_than_the_window(tmp_path):
    """The second request starts behind the first one's pages, which windowed layers kept too; both decode far beyond
    the window."""
    model = save_gpt_oss(tmp_path, eos_token_id=None)
    engine, prompt = Engine(tmp_path, chunk=16), random_tokens(40).tolist()
    for rid, given in (("first", prompt), ("second", [*prompt[:36], 5, 6])):
        engine.start(rid, given, max_new_tokens=2 * WINDOW + 3)
        outputs = engine.run()
        (found,) = tokens_of(outputs).values()
        with torch.inference_mode():
            logits = model(torch.tensor([given + found])).logits[0]
        assert logits[len(given) - 1:-1].argmax(-1).tolist() == found
    assert max(item.num_cached_tokens for item in outputs) == 36


def packed(model, folder, shards: int) -> None:
    """The checkpoint with random experts in MXFP4, written as OpenAI's are; ``model`` gets what they mean."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data.copy_(dense)
    (folder / "model.safetensors").unlink()
    for shard in range(shards):  # scales come before their blocks, and in other files
        part = {name: tensor for name, tensor in tensors.items() if name.endswith("_scales") == (shard == 0)}
        save_file(tensors if shards == 1 else part, folder / f"model-{shard}.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("shards", [1, 2])
def test_packed_checkpoints(tmp_path, shards):
    model = save_gpt_oss(tmp_path, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    packed(model, tmp_path, shards)
    check_whole_and_decode(load_runner(server_config(tmp_path)), model)


def test_packed_checkpoints_without_scales_are_refused(tmp_path):
    packed(save_gpt_oss(tmp_path, hidden_size=64, intermediate_size=96, num_hidden_layers=1), tmp_path, 2)
    (tmp_path / "model-0.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks model.layers.0.mlp.experts.\w+_proj_scales"):
        load_runner(server_config(tmp_path))


def test_every_packed_value():
    """All bytes, and the least and greatest scale that a checkpoint has in use."""
    blocks = torch.arange(256, dtype=torch.uint8).view(4, 4, 16)
    scales = torch.tensor([0, 60, 127, 190], dtype=torch.uint8).expand(4, 4).contiguous()
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    assert torch.equal(from_mxfp4(blocks, scales).float(), theirs)
    assert from_mxfp4(blocks, scales)[0, 64:68].tolist() == [0.0, 1.0, 0.5, 1.0]  # bytes 32 and 33, of scale one


def test_missing_tensors_are_named(tmp_path):
    save_gpt_oss(tmp_path, num_hidden_layers=1)
    change(tmp_path, lambda tensors: tensors.pop("model.layers.0.self_attn.sinks"))
    with pytest.raises(ConfigError, match="lacks model.layers.0.self_attn.sinks"):
        load_runner(server_config(tmp_path))


WINDOWED = {
    "Mistral": {}, "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {"use_sliding_window": True, "max_window_layers": 0}, "Mixtral": {},
    "Qwen2Moe": {"use_sliding_window": True, "max_window_layers": 2}, "Qwen3Moe": {"use_sliding_window": True},
}


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_of_other_families(tmp_path, family):
    save = save_moe if "Mo" in family or family == "Mixtral" else save_model
    model = save(tmp_path, family, sliding_window=WINDOW, **WINDOWED[family])
    runner = load_runner(server_config(tmp_path))
    several = len(set(runner.spec.windows_of(range(3)))) > 1
    assert several == (family in ("Qwen2", "Qwen2Moe"))
    assert isinstance(runner._attention, PerLayerBackend if several else TorchBackend)
    check_whole_and_decode(runner, model)
    check_chunks(runner, model, [random_tokens(count) for count in (73, 15)], 9, TOLERANCE)


def test_what_the_configuration_says(tmp_path):
    """As OpenAI's own files say it, with names of their own."""
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-5, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False}, "rope_theta": 150000, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [200002, 199999, 200012]}))
    spec = load_model_spec(server_config(tmp_path).model)
    assert spec.windows == (128, None) * 12 and spec.family.sinks
    assert spec.family.attention_bias and spec.family.o_bias
    assert spec.context_length == 131072 and spec.eos_token_ids == (200002, 199999, 200012)
    assert spec.quantization == Mxfp4() and spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.top_k, spec.moe.gate_limit, spec.moe.expert_bias) == (32, 4, 7.0, True)


def test_pools_are_sized_by_their_share(tmp_path):
    """Two of four layers have a window."""
    save_gpt_oss(tmp_path)
    config = server_config(tmp_path)
    spec = load_model_spec(config.model)

    def layers_of(**options):
        changed = dataclasses.replace(config, cache=dataclasses.replace(config.cache, **options))
        return pool_layers(changed, spec, range(4)), load_runner(changed).pools

    layers, (full, windowed) = layers_of(swa_full_tokens_ratio=0.5)
    assert layers == 3 and (full.num_pages, windowed.num_pages) == (129, 65)
    assert full.layout.layers == (1, 3) and windowed.layout.layers == (0, 2)
    layers, pools = layers_of(disable_hybrid_swa_memory=True)
    assert layers == 4 and len(pools) == 1
    counts = page_counts(config.cache, [full.layout, windowed.layout], 1)
    assert counts == (1, SlidingWindow(WINDOW).max_pages(16))  # with which any request can be computed
    for num_bytes in (0, 10**6, 10**7):
        pages = _pages_within(config.cache, [full.layout, windowed.layout], num_bytes)
        sizes = [sum(count * layout.page_bytes for count, layout in zip(page_counts(
            config.cache, [full.layout, windowed.layout], count), (full.layout, windowed.layout)))
            for count in (pages, pages + 1)]
        assert sizes[1] > num_bytes and (pages < 0 or sizes[0] <= num_bytes)
