"""Logits in float32 of a head and of hidden states in 16 bits (--enable-fp32-lm-head)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.config.cli import build
from baton.common.config.server import KernelArgs, ServerConfig
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import forward, load_runner, save_model, scattered_pages


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_products_in_float32(tmp_path, tied):
    save_model(tmp_path, "Llama", tie_word_embeddings=tied)
    tokens = np.arange(20) % 131
    found = {}
    for wide in (False, True):
        config = build(ServerConfig, {"model_path": str(tmp_path), "device": "cpu", "dtype": "bfloat16",
                                      "attention_backend": "torch", "page_size": 16, "max_total_tokens": 512,
                                      "enable_fp32_lm_head": wide})
        runner = load_runner(config)
        found[wide] = forward(runner, [(tokens, 0, scattered_pages(runner, 1, 20)[0])])
        hidden = torch.randn(3, 48).bfloat16()
        assert runner._model.compute_logits(hidden).dtype == (torch.float32 if wide else torch.bfloat16)
        assert runner._model.compute_logits(hidden[:0]).dtype == (torch.float32 if wide else torch.bfloat16)
        if wide:
            head = runner._model.lm_head.weight.float()
            assert torch.equal(runner._model.compute_logits(hidden), hidden.float() @ head.T)
    assert found[True].dtype == torch.float32 and torch.equal(found[True].bfloat16(), found[False].bfloat16())
    assert not torch.equal(found[True], found[False].float()), "the last bits are more than 16 bits hold"


def test_an_engine_samples_them(tmp_path):
    save_model(tmp_path, "Llama")
    answers = []
    for kernels in (KernelArgs(), KernelArgs(enable_fp32_lm_head=True)):
        engine = Engine(tmp_path, dtype="bfloat16", kernels=kernels)
        engine.start("a", list(range(9)), max_new_tokens=8)
        answers.append(tokens_of(engine.run())["a"])
    assert len(answers[0]) == len(answers[1]) == 8
