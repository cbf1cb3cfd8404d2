"""Double sparsity in a whole engine: where nothing is left out, tokens equal those of dense attention however the work
is cut up; where tokens are left out, decode steps above the threshold alone read fewer."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.common.api.errors import ConfigError
from baton.common.attention.double_sparsity_backend import DoubleSparsityBackend
from baton.common.config.server import DisaggregationArgs
from baton.common.distributed.parallel import Parallel
from baton.common.runner.attention_choice import AttentionChoice
from baton.tests.helpers.channel_files import save_random_channels, sparsity
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import save_model, save_steep_qwen3

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save_steep_qwen3(folder, num_hidden_layers=LAYERS, vocab_size=96)
    return folder


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 96, 40).tolist()
    return [(shared if n % 2 else []) + rng.integers(0, 96, int(n)).tolist() for n in rng.integers(1, 90, 10)]


def answers(engine, prompts):
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt)
    return tokens_of(engine.run())


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    return answers(Engine(checkpoint, page_size=16), prompts)


def test_dense_answers_are_the_models(checkpoint, prompts, expected):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids = torch.tensor([prompts[0]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert expected["0"] == out[0, len(prompts[0]):].tolist()


@pytest.mark.parametrize("options", [
    {}, {"page_size": 1, "overlap": True}, {"chunk": 7, "max_running": 3}, {"page_size": 16, "radix": False},
    {"max_total_tokens": 240, "chunk": 20, "overlap": True}, {"schedule": {"enable_mixed_chunk": True}, "chunk": 20}],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default")
def test_nothing_left_out_gives_the_dense_tokens(checkpoint, prompts, expected, options, tmp_path):
    engine = Engine(checkpoint, sparsity=sparsity(save_random_channels(tmp_path, LAYERS, KV_HEADS, DIM)), **options)
    assert answers(engine, prompts) == expected
    assert answers(engine, prompts) == expected  # over the pages in the prefix cache
    if "max_total_tokens" in options:
        assert engine.scheduler.batcher.retraction.num_retracted > 0, "the pool was meant to be too small for all"


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_other_families(tmp_path, family):
    """Rope of heads that are 12 wide, with biases; and query heads' own orders, which are joined."""
    save_model(tmp_path, family)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(8, 131, int(n)).tolist() for n in (3, 60, 33)]
    args = sparsity(save_random_channels(tmp_path, 3, 4, 12), ds_heavy_channel_num=12)
    assert answers(Engine(tmp_path, sparsity=args), prompts) == answers(Engine(tmp_path), prompts)


def test_fewer_tokens_change_answers_above_the_threshold_only(checkpoint, prompts, expected, tmp_path):
    path = save_random_channels(tmp_path, LAYERS, KV_HEADS, DIM)
    few = {"ds_heavy_token_num": 2, "ds_heavy_channel_num": 4}
    sparse = answers(Engine(checkpoint, sparsity=sparsity(path, **few, ds_sparse_decode_threshold=30)), prompts)
    short = [str(i) for i, prompt in enumerate(prompts) if len(prompt) + 12 <= 30]
    assert short and all(sparse[rid] == expected[rid] for rid in short)
    long = [str(i) for i, prompt in enumerate(prompts) if len(prompt) > 30]
    assert sum(sparse[rid] != expected[rid] for rid in long) > len(long) // 2
    assert all(sparse[rid][0] == expected[rid][0] for rid in expected), "prompts are exact"


def test_a_cache_in_float8(checkpoint, prompts, tmp_path):
    args = sparsity(save_random_channels(tmp_path, LAYERS, KV_HEADS, DIM))
    dense, sparse = (answers(Engine(checkpoint, kv_cache_dtype="fp8_e4m3", sparsity=each), prompts)
                     for each in (None, args))
    assert sparse == dense


def test_requests_whose_scores_do_not_fit_are_decoded_exactly(checkpoint, prompts, expected, tmp_path):
    """Requests of one prefix have more tokens together than the pool."""
    args = sparsity(save_random_channels(tmp_path, LAYERS, KV_HEADS, DIM), ds_heavy_token_num=1)
    engine = Engine(checkpoint, sparsity=args)
    [backend] = [engine.runner._attention]
    assert isinstance(backend, DoubleSparsityBackend) and backend.capacity == 2048 + 4
    backend.capacity = 8
    assert answers(engine, prompts) == expected


def test_prompts_of_a_prefill_server_are_exact(checkpoint, tmp_path):
    """Also those of which the prefix cache has all but the last token."""
    engine = Engine(checkpoint, sparsity=sparsity(save_random_channels(tmp_path, LAYERS, KV_HEADS, DIM)))
    for mode, decodes in (("prefill", False), ("decode", True)):
        config = dataclasses.replace(engine.config, disaggregation=DisaggregationArgs(disaggregation_mode=mode))
        backend = AttentionChoice(config, engine.runner.spec, Parallel(), "float32").over(engine.runner.pools)
        assert isinstance(backend, DoubleSparsityBackend) and (backend.sparsity is not None) == decodes


def test_files_that_do_not_fit_are_refused(checkpoint, tmp_path):
    def refused(path, match, **flags):
        with pytest.raises(ConfigError, match=match):
            Engine(checkpoint, sparsity=sparsity(path, **flags))

    good = save_random_channels(tmp_path, LAYERS, KV_HEADS, DIM)
    refused(good, "has no model.layers.0.self_attn.k_proj: calibrate this model", ds_heavy_channel_type="k")
    refused(good, "--ds-heavy-channel-num 17 must be 16 or less", ds_heavy_channel_num=17)
    refused(save_random_channels(tmp_path, LAYERS, 3, DIM), "for each of 2 KV heads or 4 query heads, all channels")
    refused(save_random_channels(tmp_path, 2, KV_HEADS, DIM, seed=1), "has no model.layers.2.self_attn.qk_proj")
    refused(tmp_path / "none.json", "cannot be read as JSON")
    broken = tmp_path / "broken.json"
    for content in ("{", "[]", json.dumps({"model.layers.0.self_attn.qk_proj": [[0] * 16] * 2}),
                    json.dumps({"model.layers.0.self_attn.qk_proj": [["x"]]})):
        broken.write_text(content)
        refused(broken, "--ds-channel-config-path .*broken.json")


def test_models_with_windows_or_latents_are_refused(tmp_path):
    save_model(tmp_path, "Mistral", sliding_window=16)
    with pytest.raises(ConfigError, match="this model has sliding windows: leave it out"):
        Engine(tmp_path, sparsity=sparsity(tmp_path / "x.json"))
