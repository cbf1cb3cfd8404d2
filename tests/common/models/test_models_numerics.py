"""Logits against transformers: families, shapes, rope scaling, paging, chunking, prefix reuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.quantization import methods
from baton.tests.helpers.small_models import (
    FAMILIES,
    check_chunks,
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)

TOLERANCE = 1e-4

SHAPES = {
    "gqa": {},
    "mha": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "one_kv_head": {"num_key_value_heads": 1},
    "odd_sizes": {"vocab_size": 97, "hidden_size": 60, "intermediate_size": 77, "num_attention_heads": 6,
                  "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 10},
    "tied": {"tie_word_embeddings": True},
}

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_explicit": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                      "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.8},
    "yarn_mscale": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
                    "mscale_all_dim": 1.3, "truncate": False},
}


def tokens_of(count: int, vocab: int = 97) -> np.ndarray:
    return np.random.default_rng(count).integers(0, vocab, count)


def check_whole_and_decode(runner, model, count: int = 41) -> None:
    """A prompt at once, then three decode steps."""
    tokens = tokens_of(count + 3)
    pages = scattered_pages(runner, 1, len(tokens))[0]
    want = expected_logits(model, tokens)
    got = forward(runner, [(tokens[:count], 0, pages)])
    torch.testing.assert_close(got, want[:count], atol=TOLERANCE, rtol=0)
    for position in range(count, count + 3):
        got = forward(runner, [(tokens[position:position + 1], position, pages)])
        torch.testing.assert_close(got[0], want[position], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(tmp_path, family, shape):
    changes = dict(SHAPES[shape])
    if family == "Qwen2":
        changes.pop("head_dim", None)
    model = save_model(tmp_path, family, **changes)
    check_whole_and_decode(load_runner(server_config(tmp_path)), model)


def test_products_added_as_they_are_made_equal_transformers(tmp_path, monkeypatch):
    """As a GPU computes many rows."""
    monkeypatch.setattr(methods, "fuses_residual", lambda x, weight: True)
    model = save_model(tmp_path, FAMILIES[0])
    check_whole_and_decode(load_runner(server_config(tmp_path)), model)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}])
def test_llama_biases(tmp_path, changes):
    model = save_model(tmp_path, "Llama", **changes)
    check_whole_and_decode(load_runner(server_config(tmp_path)), model)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scaling(tmp_path, scaling):
    model = save_model(tmp_path, "Llama", rope_parameters={"rope_theta": 5000.0, **SCALINGS[scaling]})
    check_whole_and_decode(load_runner(server_config(tmp_path)), model, count=150)


def test_dynamic_rope_beyond_the_trained_length_equals_token_by_token_generation(tmp_path):
    model = save_model(tmp_path, "Llama", max_position_embeddings=32,
                       rope_parameters={"rope_theta": 5000.0, **SCALINGS["dynamic"]})
    runner = load_runner(server_config(tmp_path))
    tokens = tokens_of(48)
    pages = scattered_pages(runner, 1, len(tokens))[0]
    got = forward(runner, [(tokens, 0, pages)])
    cache = None
    for position in range(len(tokens)):
        with torch.inference_mode():
            result = model(torch.tensor([[int(tokens[position])]]), past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        torch.testing.assert_close(got[position], result.logits[0, 0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_and_chunk_sizes(tmp_path, page_size, chunk):
    """Three ragged prompts in chunks that divide neither prompt nor page, then a joint decode step."""
    model = save_model(tmp_path, "Qwen3")
    runner = load_runner(server_config(tmp_path, page_size=page_size))
    check_chunks(runner, model, [tokens_of(count) for count in (73, 29, 65)], chunk, TOLERANCE)


def test_requests_share_a_prefix(tmp_path):
    """Two prompts over the pages of one prefix, in one batch with a third that is all new."""
    model = save_model(tmp_path, "Llama")
    runner = load_runner(server_config(tmp_path, page_size=16))
    pages = scattered_pages(runner, 3, 64)
    prefix, tails, other = tokens_of(32), [tokens_of(9), tokens_of(17)], tokens_of(25)
    forward(runner, [(prefix, 0, pages[0])])
    shared = [np.concatenate((pages[0][:2], pages[b][2:])) for b in (0, 1)]
    got = forward(runner, [(tails[0], 32, shared[0]), (other, 0, pages[2]), (tails[1], 32, shared[1])])
    want = torch.cat((expected_logits(model, np.concatenate((prefix, tails[0])))[32:], expected_logits(model, other),
                      expected_logits(model, np.concatenate((prefix, tails[1])))[32:]))
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_logits_rows_and_layer_groups(tmp_path):
    """By default each request's last row is scored; groups of layers are announced in order, once their layers ran."""
    model = save_model(tmp_path, "Llama")
    runner = load_runner(server_config(tmp_path, num_layer_groups=2))
    assert runner.layout.groups == (2, 1)
    prompts = [tokens_of(5), tokens_of(20)]
    pages = scattered_pages(runner, 2, 20)
    from baton.common.forward.forward_batch import Row, build_forward_batch
    rows = [Row(prompts[b], 0, pages[b]) for b in range(2)]
    seen: list[tuple[int, list[bool]]] = []

    def after_group(group, event):
        assert event is None
        written = [bool(runner.pool.groups[g][pages[1][0], -1].any()) for g in range(2)]
        seen.append((group, written))

    got = runner.forward(build_forward_batch(rows, 16, runner.device), after_group)
    want = torch.stack([expected_logits(model, prompt)[-1] for prompt in prompts])
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
    assert seen == [(0, [True, False]), (1, [True, True])]
    none = runner.forward(build_forward_batch(rows, 16, runner.device, []))
    assert none.shape == (0, runner.spec.vocab_size)


def test_decode_batch_of_unequal_lengths(tmp_path):
    """Lengths from 1 to 200 fall into several gather buckets; each row must equal its own sequence's."""
    model = save_model(tmp_path, "Llama")
    runner = load_runner(server_config(tmp_path, page_size=4))
    counts = [1, 2, 5, 9, 33, 64, 150, 200]
    prompts = [tokens_of(count) for count in counts]
    pages = scattered_pages(runner, len(counts), 200)
    for prompt, row in zip(prompts, pages):
        if len(prompt) > 1:
            forward(runner, [(prompt[:-1], 0, row)])
    got = forward(runner, [(p[-1:], len(p) - 1, row) for p, row in zip(prompts, pages)])
    want = torch.stack([expected_logits(model, prompt)[-1] for prompt in prompts])
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
