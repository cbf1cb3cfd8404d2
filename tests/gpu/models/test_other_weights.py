"""CUDA graphs of decode steps and of prompts read weights that were loaded after they were captured."""

from __future__ import annotations

import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import save_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


@pytest.mark.parametrize("quantization", [None, "fp8", "fp8_per_block"])
def test_tokens_are_those_of_an_engine_that_began_with_them(tmp_path, quantization):
    """The same steps of the same kernels: the same bits, in bfloat16 too."""
    model = save_model(tmp_path / "first", "Llama", **SIZES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(parameter.roll(1, 0) * 0.8)
    model.save_pretrained(tmp_path / "second")
    kernels = KernelArgs("triton", cuda_graph_bs=(4, 8), piecewise_cuda_graph_tokens=(32, 64, 128))

    def engine_of(name: str) -> Engine:
        engine = Engine(tmp_path / name, device="cuda", page_size=16, chunk=128, dtype="bfloat16", radix=False,
                        quantization=quantization, kernels=kernels)
        assert engine.runner._decode_graphs is not None and engine.runner.prefill_graphs.graphs is not None
        return engine

    def answers(engine: Engine) -> dict[str, list[int]]:
        for i in range(6):
            engine.start(str(i), [(11 * i + j) % 90 + 8 for j in range(5 + 20 * i)], max_new_tokens=16,
                         ignore_eos=True)
        return tokens_of(engine.run())

    engine = engine_of("first")
    before = answers(engine)
    engine.runner.update_weights(str(tmp_path / "second"), None)
    after = answers(engine)
    assert after == answers(engine_of("second")) and after != before
