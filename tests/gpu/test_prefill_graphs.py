"""Prompts' steps as CUDA graphs in pieces give the eager ones' logits, and tinychat's tokens."""

from __future__ import annotations

import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.common.engine.prefill_graphs import GraphRecorder, Recorded
from baton.common.tinychat import CHECKPOINT
from baton.tests.common.hand_driven import Engine, tokens_of
from baton.tests.common.prompts_again import SIZES, steps_of
from baton.tests.common.small_models import load_runner, save_model, server_config
from baton.tests.common.test_prefill_graphs import SAVE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def both(runner) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of the same steps, twice in pieces, each beside the eager ones."""
    eager = steps_of(runner)
    runner.record_prompts(Recorded(SIZES, SIZES[-1]), GraphRecorder(runner.device), lambda what, share: None)
    return [pair for _ in range(2) for pair in zip(steps_of(runner), eager)]


@pytest.mark.parametrize("family", SAVE)
def test_logits_equal_eager_ones(tmp_path, family):
    SAVE[family](tmp_path)
    runner = load_runner(server_config(tmp_path, page_size=4, backend="triton", dtype="float32", num_layer_groups=3),
                         device="cuda:0")
    for found, wanted in both(runner):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_logits_are_near_in_bfloat16(tmp_path, quantization):
    """Over FlashInfer where it is installed. Other tiles of products round a few values otherwise."""
    save_model(tmp_path, "Llama", head_dim=128, num_attention_heads=8, hidden_size=256, intermediate_size=512,
               max_position_embeddings=2048)
    runner = load_runner(server_config(tmp_path, backend="auto", dtype="bfloat16", quantization=quantization),
                         device="cuda:0")
    for found, wanted in both(runner):
        torch.testing.assert_close(found, wanted, atol=0.05 * float(wanted.abs().max()) if len(wanted) else 0, rtol=0)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_tokens_equal_eager_ones(overlap):
    """Chunks of 100 tokens of prompts of all lengths, with a prefix cache, beside decode steps in graphs."""
    prompts = [[(7 * i * j + 3 * j) % 300 + 20 for j in range(4 + 23 * i)] for i in range(16)]
    found = []
    for pieces in ((), (32, 64, 100)):
        engine = Engine(CHECKPOINT, page_size=16, max_total_tokens=16384, chunk=100, device="cuda", overlap=overlap,
                        kernels=KernelArgs("triton", disable_piecewise_cuda_graph=not pieces,
                                           piecewise_cuda_graph_tokens=pieces))
        assert (engine.runner._prompt_graphs is not None) == bool(pieces)
        for i, prompt in enumerate(prompts):
            engine.start(str(i), prompt, max_new_tokens=24, ignore_eos=True)
        found.append(tokens_of(engine.run()))
    assert found[0] == found[1]
