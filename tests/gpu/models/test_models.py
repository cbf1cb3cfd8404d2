"""Whole models on a GPU: numerics against transformers, and an 8B-shaped model with rough timings."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from baton.common.forward.forward_batch import Row, build_forward_batch, model_input
from baton.tests.gpu.whole_models import check_bfloat16
from baton.tests.helpers.small_models import (
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = ["triton", *(["flashinfer"] if find_spec("flashinfer") else [])]

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "eos_token_id": 128001,
}


def test_float32_logits_equal_transformers(tmp_path):
    """In float32 on the GPU, over our kernels: the tolerance of the CPU tests."""
    model = save_model(tmp_path, "Qwen3", head_dim=64)
    runner = load_runner(server_config(tmp_path, backend="triton", dtype="float32"), device="cuda:0")
    tokens = np.random.default_rng(0).integers(0, 97, 60)
    pages = scattered_pages(runner, 1, 60)[0]
    want = expected_logits(model, tokens)
    got = [forward(runner, [(tokens[:37], 0, pages)]), forward(runner, [(tokens[37:59], 37, pages)]),
           forward(runner, [(tokens[59:], 59, pages)])]
    torch.testing.assert_close(torch.cat(got).cpu(), want, atol=1e-4, rtol=0)
    ends = [forward(runner, [(tokens[:count], 0, pages)], every_row=False) for count in (37, 60)]
    torch.testing.assert_close(torch.cat(ends).cpu(), want[[36, 59]], atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_layer_of_ends_equals_that_of_all_rows(tmp_path, backend):
    """Chunks over a prefix and in the middle of a prompt, and a whole prompt that is longer than a piece."""
    save_model(tmp_path, "Llama", head_dim=128, num_attention_heads=8, hidden_size=256, max_position_embeddings=2048)
    runner = load_runner(server_config(tmp_path, backend=backend, dtype="bfloat16", max_total_tokens=8192),
                         device="cuda:0")
    tokens = np.random.default_rng(0).integers(0, 97, 1200)
    pages = scattered_pages(runner, 4, 1200)
    rows = [Row(tokens[:500], 0, pages[0]), Row(tokens[:300], 0, pages[1]), Row(tokens[:17], 0, pages[2])]
    middle = build_forward_batch(rows, runner.layout.page_size, runner.device, [])
    assert runner.forward(middle).shape == (0, runner.spec.vocab_size)
    rows = [Row(tokens[500:1200], 500, pages[0]), Row(tokens[300:400], 300, pages[1]),
            Row(tokens[17:40], 17, pages[2]), Row(tokens[:900], 0, pages[3])]
    wanted = [699, 822, 1722]  # the second goes on
    found = []
    for whole in (True, False):
        batch = build_forward_batch(rows, runner.layout.page_size, runner.device,
                                    list(range(1723)) if whole else wanted)
        assert (batch.last_tokens is None) == whole
        logits = runner.forward(batch)
        found.append((logits[wanted] if whole else logits).float())
    torch.testing.assert_close(found[1], found[0], atol=0.05 * float(found[0].abs().max()), rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_stays_as_close_as_transformers(tmp_path, backend):
    """Against float32: our bfloat16 error is at most that of transformers in bfloat16, give or take a half."""
    model = save_model(tmp_path, "Llama", head_dim=64, num_attention_heads=8, hidden_size=256)
    check_bfloat16(model, tmp_path, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_8b_shape_prefills_and_decodes(tmp_path, backend, capsys):
    """Both phases run at full size within loose bounds; the measured times are printed."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    started = time.perf_counter()
    runner = load_runner(server_config(tmp_path, backend=backend, load_format="dummy", max_total_tokens=140_000),
                         device="cuda:0")
    loaded = time.perf_counter() - started
    tokens = np.random.default_rng(0).integers(0, 128256, 8192)
    pages = scattered_pages(runner, 64, 2048 + 64)
    events: list[int] = []
    prefill = timed(runner, lambda: [Row(tokens, 0, pages[:4].flatten())],
                    lambda group, event: events.append(group))
    context = 2048
    decode = timed(runner, lambda: [Row(tokens[:1], context, pages[b]) for b in range(64)])
    single = timed(runner, lambda: [Row(tokens[:1], context, pages[0])])
    with capsys.disabled():
        print(f"\n8B {backend}: load {loaded:.1f} s, prefill 8,192 tokens {prefill * 1e3:.1f} ms "
              f"({8192 / prefill:,.0f} tokens/s), decode step of 64 x {context} {decode * 1e3:.1f} ms, "
              f"of 1 {single * 1e3:.1f} ms, groups {runner.layout.groups}, {runner.pool}")
    assert events[:len(runner.layout.groups)] == list(range(len(runner.layout.groups)))
    assert prefill < 2 and decode < 0.2
    del runner
    torch.cuda.empty_cache()


def timed(runner, rows, after_group=None, repeats: int = 5) -> float:
    """Median seconds of a step, batch building included."""
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        logits = runner.step(model_input(rows(), runner.layout.page_size), after_group).logits
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        assert logits.isfinite().all() and logits.std() > 0
    return sorted(seconds[1:])[repeats // 2]
