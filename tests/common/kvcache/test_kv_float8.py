"""The KV cache in float8: what is stored and read, where its scales come from, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from baton.common.api.errors import ConfigError
from baton.common.config.server import CacheArgs
from baton.common.kvcache.layout import KVLayout
from baton.common.weights.kv_scales import read_kv_scales
from baton.kvtransfer.protocol.reshard import RankLayout, find_mismatch
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.small_models import (
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)

TOKENS = np.random.default_rng(2).integers(0, 97, 40)
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def config_of(folder, stored="fp8_e4m3", path=None, **options):
    config = server_config(folder, **options)
    cache = dataclasses.replace(config.cache, kv_cache_dtype=stored, quantization_param_path=path and str(path))
    return dataclasses.replace(config, cache=cache)


def logits_of(runner) -> torch.Tensor:
    pages = scattered_pages(runner, 1, 40)[0]
    return torch.cat((forward(runner, [(TOKENS[:20], 0, pages)]), forward(runner, [(TOKENS[20:39], 20, pages)]),
                      forward(runner, [(TOKENS[39:], 39, pages)])))


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


class RoundedCache(DynamicCache):
    """Transformers' cache, whose keys and values have been to float8 and back."""

    def __init__(self, dtype, scales):
        super().__init__()
        self.dtype, self.scales = dtype, scales

    def update(self, keys, values, layer, *args, **kwargs):
        rounded = []
        for x, scale in zip((keys, values), self.scales[layer]):
            largest = torch.finfo(self.dtype).max
            rounded.append((x / scale).clamp(-largest, largest).to(self.dtype).to(x.dtype) * scale)
        return super().update(*rounded, layer, *args, **kwargs)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_as_transformers_with_a_rounded_cache(tmp_path, stored, scaled):
    """Prompts in chunks and a decode step; scales that cut a part of the values off, so that they matter."""
    model = save_model(tmp_path, "Qwen3")
    scales = [(1.0, 1.0)] * 3
    if scaled:
        scales = [(2.0**-8, 2.0**-7), (0.3, 2.0**-9), (2.0**-10, 1.0)]
        with_scales(tmp_path, {f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(value)
                               for layer, pair in enumerate(scales) for side, value in zip("kv", pair)})
    exact = expected_logits(model, TOKENS)
    with torch.inference_mode():
        want = model(torch.from_numpy(TOKENS)[None], past_key_values=RoundedCache(DTYPES[stored], scales)).logits[0]
    runner = load_runner(config_of(tmp_path, stored))
    assert runner.pool.groups[0].dtype == DTYPES[stored]
    found = logits_of(runner)
    assert rms(found - want) < 0.15 * rms(want - exact)
    assert rms(want - exact) > 0.02 * rms(exact)


def with_scales(folder, scales) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | scales, file)


def test_pages_take_a_quarter_and_stay_while_weights_change(tmp_path):
    save_model(tmp_path / "one", "Llama")
    runner = load_runner(config_of(tmp_path / "one"))
    wide = load_runner(server_config(tmp_path / "one"))
    assert 4 * runner.layout.page_bytes == wide.layout.page_bytes and runner.num_pages == wide.num_pages
    logits = logits_of(runner)
    runner.release(("kv_cache",))
    runner.resume(("kv_cache",), complete=True)
    assert not runner.pool.groups[0].float().any() and torch.equal(logits_of(runner), logits)
    save_model(tmp_path / "two", "Llama")
    runner.check_weights(str(tmp_path / "two"), None)
    with_scales(tmp_path / "two", {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)})
    wide.check_weights(str(tmp_path / "two"), None)
    with pytest.raises(ConfigError, match="two has other scales for a KV cache in float8 than those that run"):
        runner.check_weights(str(tmp_path / "two"), None)


# ---- scales

NAMED = {
    "model.layers.0.self_attn.k_scale": torch.tensor(0.5), "model.layers.0.self_attn.v_scale": torch.tensor([0.25]),
    "model.layers.1.self_attn.k_proj.k_scale": torch.tensor(0.75, dtype=torch.bfloat16),
    "model.layers.1.self_attn.v_scale": torch.tensor(-1.0), "model.layers.2.self_attn.kv_scale": torch.tensor(2.0),
}


def test_scales_of_a_checkpoint(tmp_path):
    model = save_model(tmp_path, "Qwen2")
    with_scales(tmp_path, NAMED)
    plain = load_runner(server_config(tmp_path))
    assert plain.layout.scales == ()  # not needed, and not in the way
    torch.testing.assert_close(logits_of(plain), expected_logits(model, TOKENS), atol=1e-4, rtol=0)
    assert load_runner(config_of(tmp_path)).layout.scales == ((0.5, 0.25), (0.75, 1.0), (2.0, 2.0))
    assert load_runner(config_of(tmp_path, load_format="dummy")).layout.scales == ()
    with_scales(tmp_path, {name: torch.tensor(1.0) for name in NAMED})
    assert load_runner(config_of(tmp_path)).layout.scales == ()


def scales_file(folder, factors):
    path = folder / "scales.json"
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": {
        "dtype": "float8_e4m3fn", "scaling_factor": factors}}))
    return path


def test_scales_of_a_file(tmp_path):
    save_model(tmp_path, "Llama")
    with_scales(tmp_path, NAMED)
    path = scales_file(tmp_path, {"0": {"0": 0.5, "1": 1, "2": 0.1}, "1": {"0": 0.25, "1": 2, "2": 0.1}})
    assert load_runner(config_of(tmp_path, path=path)).layout.scales == ((0.5, 0.5), (2.0, 2.0), (0.1, 0.1))


@pytest.mark.parametrize("factors,sentence", [
    ({"0": {"0": 0.5, "1": 0.5}}, "a positive number for layer 2"), ({"0": {"0": 0}}, "a positive number for layer 0"),
    ({}, "for layer 0"), ([], "for layer 0"), ({"0": {"0": "1"}}, "for layer 0")])
def test_files_without_scales_are_refused(tmp_path, factors, sentence):
    args = CacheArgs(kv_cache_dtype="fp8_e4m3", quantization_param_path=str(scales_file(tmp_path, factors)))
    with pytest.raises(ConfigError, match=sentence):
        read_kv_scales(args, None, 3)


def test_a_file_that_cannot_be_read(tmp_path):
    args = CacheArgs(kv_cache_dtype="fp8_e4m3", quantization_param_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="Cannot read --quantization-param-path"):
        read_kv_scales(args, None, 3)
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ConfigError, match="for layer 0"):
        read_kv_scales(dataclasses.replace(args, quantization_param_path=str(tmp_path / "list")), None, 3)
    with pytest.raises(ConfigError, match="is for a KV cache in float8: set --kv-cache-dtype too"):
        CacheArgs(quantization_param_path="file")


# ---- between servers

def test_servers_of_other_types_or_scales_are_refused():
    layout = KVLayout((2, 1), num_kv_heads=2, head_dim=8, page_size=4, dtype="float8_e4m3fn")
    scaled = msgspec.structs.replace(layout, scales=((0.5, 0.5), (1.0, 1.0), (0.5, 0.25)))

    def between(prefill, decode):
        return find_mismatch(RankLayout(1, prefill), RankLayout(1, decode))

    assert between(layout, layout) is None and between(scaled, scaled) is None
    assert between(msgspec.structs.replace(layout, scales=((1.0, 1.0),) * 3), layout) is None
    assert between(msgspec.structs.replace(layout, dtype="bfloat16"), layout) == (
        "dtype of the KV layout is 'float8_e4m3fn' here and 'bfloat16' there")
    assert between(msgspec.structs.replace(layout, dtype="float8_e5m2"), layout) is not None
    other = msgspec.structs.replace(scaled, scales=((0.5, 0.5), (1.0, 1.0), (0.5, 0.5)))
    assert "the scales of keys and values in layer 2 are (0.5, 0.5) here and (0.5, 0.25) there" in between(
        scaled, other)
    assert "in layer 0 are (1.0, 1.0) here and (0.5, 0.5) there" in between(scaled, layout)
    packed = msgspec.msgpack.encode(scaled)
    assert msgspec.msgpack.decode(packed, type=KVLayout) == scaled


@pytest.mark.parametrize("stored", DTYPES)
def test_latents(tmp_path, stored):
    """One scale for a layer's latents, the keys'."""
    model = save_deepseek(tmp_path, 3, first_k_dense_replace=3)
    scales = [2.0**-8, 0.3, 2.0**-10]
    with_scales(tmp_path, {f"model.layers.{layer}.self_attn.k_scale": torch.tensor(scale)
                           for layer, scale in enumerate(scales)})
    exact = expected_logits(model, TOKENS)
    cache = RoundedCache(DTYPES[stored], [(scale, scale) for scale in scales])
    with torch.inference_mode():
        want = model(torch.from_numpy(TOKENS)[None], past_key_values=cache).logits[0]
    runner = load_runner(config_of(tmp_path, stored))
    assert runner.pool.groups[0].dtype == DTYPES[stored] and runner.layout.page_bytes == 3 * 16 * 32
    assert rms(logits_of(runner) - want) < 0.15 * rms(want - exact)
    assert rms(want - exact) > 0.02 * rms(exact)
