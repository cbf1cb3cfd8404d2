"""Chain steps as CUDA graphs equal eager steps with drafts."""

from __future__ import annotations

import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.tests.common.runner.test_chain_graphs import GREEDY, engine_of, prompts
from baton.tests.helpers.chain_steps import Chats

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "NEXTN"])
def test_captured_steps_equal_eager_ones(algorithm):
    engine = engine_of(algorithm, device="cuda", kernels=KernelArgs(attention_backend="triton"))
    levels = engine.runner.chain_levels
    assert levels is not None and levels.num_drafts == (3,)
    asked = prompts(5)
    eager, chained = (Chats(engine, asked, [GREEDY] * 5, 3) for _ in range(2))
    for step in range(12):
        chosen = [0, 1, 2, 3, 4] if step < 6 else [1, 2, 4]
        eager.eager(chosen)
        chained.chain(chosen)
    chained.synchronize()
    assert chained.outputs == eager.outputs
