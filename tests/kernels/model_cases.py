"""A small model over the triton backend under the interpreter; collected by test_kernels_interpreted.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.attention.mla.triton_backend import MLATritonBackend
from baton.common.config.server import KernelArgs
from baton.kernels import _triton
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.nemotron_models import save_nemotron
from baton.tests.helpers.small_models import (
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)
from baton.tests.helpers.small_moe import save_moe


def check_extends_and_decode(runner, model):
    """Ragged extends over prefixes, and a decode step of unequal lengths, against transformers."""
    prompts = [np.random.default_rng(count).integers(0, 97, count) for count in (40, 3)]
    want = [expected_logits(model, prompt) for prompt in prompts]
    pages = scattered_pages(runner, 2, 40)
    got = forward(runner, [(prompts[0][:21], 0, pages[0]), (prompts[1][:2], 0, pages[1])])
    torch.testing.assert_close(got, torch.cat((want[0][:21], want[1][:2])), atol=1e-4, rtol=0)
    got = forward(runner, [(prompts[0][21:39], 21, pages[0])])
    torch.testing.assert_close(got, want[0][21:39], atol=1e-4, rtol=0)
    got = forward(runner, [(prompts[0][21:39], 21, pages[0]), (prompts[1][:2], 0, pages[1])], every_row=False)
    torch.testing.assert_close(got, torch.stack((want[0][38], want[1][1])), atol=1e-4, rtol=0)
    got = forward(runner, [(p[-1:], len(p) - 1, row) for p, row in zip(prompts, pages)])
    torch.testing.assert_close(got, torch.stack([w[-1] for w in want]), atol=1e-4, rtol=0)


def test_logits_equal_transformers(tmp_path):
    """Ragged extends over prefixes and a joint decode, every kernel of the model included."""
    assert _triton.INTERPRETED
    model = save_model(tmp_path, "Qwen3", num_hidden_layers=2)
    runner = load_runner(server_config(tmp_path, page_size=8, backend="triton"))
    check_extends_and_decode(runner, model)


def test_partial_rotary_embeddings_equal_transformers(tmp_path):
    """Of half a head, in a family that is registered from outside; decode steps that store whole heads' keys do not."""
    model = save_nemotron(tmp_path, num_hidden_layers=2)
    runner = load_runner(server_config(tmp_path, page_size=8, backend="triton"))
    check_extends_and_decode(runner, model)


def test_a_mixture_of_experts_equals_transformers(tmp_path):
    """Top-k, alignment and grouped products, in a prompt and in a decode step."""
    model = save_moe(tmp_path, "Qwen2Moe", num_hidden_layers=1)
    runner = load_runner(server_config(tmp_path, page_size=8, backend="triton"))
    tokens = np.random.default_rng(3).integers(0, 97, 20)
    want = expected_logits(model, tokens)
    pages = scattered_pages(runner, 1, 20)[0]
    got = forward(runner, [(tokens[:19], 0, pages)])
    torch.testing.assert_close(got, want[:19], atol=1e-4, rtol=0)
    got = forward(runner, [(tokens[19:], 19, pages)])
    torch.testing.assert_close(got, want[19:], atol=1e-4, rtol=0)


def test_windows_and_sinks_equal_transformers(tmp_path):
    """A windowed and a full layer, each with a plan of its own in a decode step, and clamped experts."""
    model = save_gpt_oss(tmp_path, num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=1, vocab_size=97)
    runner = load_runner(server_config(tmp_path, page_size=8, backend="triton"))
    tokens = np.random.default_rng(3).integers(0, 97, 24)
    pages = scattered_pages(runner, 1, 24)[0]
    got = [forward(runner, [(tokens[:5], 0, pages)]), forward(runner, [(tokens[5:23], 5, pages)]),
           forward(runner, [(tokens[23:], 23, pages)])]
    torch.testing.assert_close(torch.cat(got), expected_logits(model, tokens), atol=1e-4, rtol=0)


def test_page_tables_that_begin_behind_the_window(tmp_path):
    """A prompt of several windows in chunks, and decode steps, over the pages that the windowed layer keeps."""
    save_gpt_oss(tmp_path, num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=1, vocab_size=97)
    prompt = np.random.default_rng(5).integers(3, 97, 52).tolist()
    tokens = []
    for backend, disabled in (("triton", False), ("torch", True)):
        engine = Engine(tmp_path, kernels=KernelArgs(attention_backend=backend), chunk=22,
                        cache={"disable_hybrid_swa_memory": disabled})
        engine.start("0", prompt, ignore_eos=True, max_new_tokens=6)
        tokens.append(tokens_of(engine.run())["0"])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("most_tokens", [None, 16])
def test_latent_attention_equals_transformers(tmp_path, most_tokens):
    """Prompts over prefixes, in one segment and in many of two pages, and a decode step of unequal lengths."""
    model = save_deepseek(tmp_path, 3, num_hidden_layers=1, first_k_dense_replace=1)
    runner = load_runner(server_config(tmp_path, page_size=8, backend="triton"))
    assert isinstance(runner._attention, MLATritonBackend)
    runner._attention._most_tokens = most_tokens or runner._attention._most_tokens
    runner._attention.compile_merging(4, torch.float32)  # as at start on a GPU
    check_extends_and_decode(runner, model)
