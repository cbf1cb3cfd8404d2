"""The model runner's pool: how many pages, in which layout, and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server import CacheArgs
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.forward.forward_batch import Row, model_input
from baton.common.models.registry import load_model_spec
from baton.common.runner.kv_sizing import kv_layout
from baton.tests.helpers.small_models import load_runner, save_model, server_config


@pytest.fixture
def checkpoint(tmp_path):
    save_model(tmp_path, "Llama")
    return tmp_path


def test_pool_size(checkpoint):
    assert load_runner(server_config(checkpoint, max_total_tokens=1000, page_size=16)).num_pages == 62
    default = load_runner(server_config(checkpoint, max_total_tokens=None, page_size=64))
    assert default.num_pages == 256  # 16,384 tokens
    with pytest.raises(ConfigError, match="--max-total-tokens 15 holds no page of 16 tokens"):
        load_runner(server_config(checkpoint, max_total_tokens=15))


def test_the_default_pool_of_a_wide_model_is_capped(tmp_path):
    """Pages of 1 MiB: 2 GiB hold 2,048 of them, 32,768 tokens."""
    save_model(tmp_path, "Qwen3", num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, head_dim=512,
               max_position_embeddings=32_768)
    runner = load_runner(server_config(tmp_path, max_total_tokens=None))
    assert runner.layout.page_bytes == 2 * 512 * 1024
    assert runner.num_pages == 2048


def test_layout_of_ranks(checkpoint):
    spec = load_model_spec(server_config(checkpoint).model)
    heads = [kv_layout(CacheArgs(), spec, size, "bfloat16").num_kv_heads for size in (1, 2, 4)]
    assert heads == [2, 1, 1]
    assert kv_layout(CacheArgs(num_layer_groups=2), spec, 1, "float32").groups == (2, 1)
    assert kv_layout(CacheArgs(), spec, 1, "float32").groups == (3,)


def test_regions_cover_the_groups(checkpoint):
    runner = load_runner(server_config(checkpoint, num_layer_groups=3))
    regions = runner.pool.regions()
    assert [nbytes for _, nbytes, _ in regions] == [
        runner.pool.num_pages * runner.layout.group_page_bytes(group) for group in range(3)]
    assert [address for address, _, _ in regions] == [group.data_ptr() for group in runner.pool.groups]
    keys, values = runner.pool.layer(2)
    keys[5, 1, 3] = 1
    values[5, 1, 3] = 2
    group = runner.pool.groups[2]
    assert (group[5, 0, 0, 1, 3] == 1).all() and (group[5, 0, 1, 1, 3] == 2).all()
    assert keys.shape == values.shape == (runner.pool.num_pages, 2, 16, 12)


def test_a_gpu_backend_is_refused_on_a_cpu(checkpoint):
    for backend in ("triton", "flashinfer"):
        with pytest.raises(ConfigError, match=f"--attention-backend {backend} "):
            load_runner(server_config(checkpoint, backend=backend))


@pytest.mark.parametrize("context, tokens", [(128, 16_384), (8192, 32_768), (32_768, 65_536)])
def test_a_pool_on_a_cpu_holds_a_few_contexts(tmp_path, context, tokens):
    save_model(tmp_path, "Llama", max_position_embeddings=context)
    runner = load_runner(server_config(tmp_path, max_total_tokens=None))
    assert runner.num_pages == tokens // 16


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_kernels_of_prompts_may_verify_drafts(checkpoint, mode):
    args = SpeculativeArgs(speculative_attention_mode=mode)
    config = dataclasses.replace(server_config(checkpoint), speculative=args)
    runner = load_runner(config)
    step = model_input([Row([1, 2, 3], 0, np.array([0]))], 16)
    found = runner.step(step._replace(columns=step.columns._replace(verifies=True)))
    assert found.batch is not None and found.batch.verifies is (mode == "decode")
