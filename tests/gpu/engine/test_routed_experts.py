"""Experts that requests ask for, on a GPU: written by steps that are CUDA graphs, and those of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_port
from baton.tests.integration.apis.test_routed_experts import PROMPT, expected, experts_of, model  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_they_are_those_of_transformers(model, tmp_path):  # noqa: F811
    made, folder = model
    argv = ["server", "--model-path", str(folder), "--skip-tokenizer-init", "--device", "cuda", "--dtype", "float32",
            "--max-total-tokens", "4096", "--mem-fraction-static", "0.1", "--attention-backend", "triton",
            "--cuda-graph-max-bs", "4", "--enable-return-routed-experts"]
    server = Server("baton.launch", argv, free_port(), tmp_path / "log").start()
    try:
        server.wait_ready()
        prompts = [PROMPT, PROMPT[:11], PROMPT[20:]]
        status, answers = post_json(server.url + "/generate", {
            "input_ids": prompts, "return_routed_experts": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}})
        assert status == 200, answers
        for prompt, answer in zip(prompts, answers):
            wanted = expected(made, prompt + answer["output_ids"])
            same = (np.sort(experts_of(answer)[:, 1:], -1) == wanted).all(-1)
            assert len(same) == len(prompt) + 23 and same.mean() > 0.99, "two experts may have nearly equal scores"
        assert "without CUDA graphs" not in server.log.read_text()
        assert server.stop() == 0, repr(server)
    finally:
        server.kill()
