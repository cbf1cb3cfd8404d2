"""Chain steps as CUDA graphs equal eager steps with drafts."""

from __future__ import annotations

import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.tests.common.runner.test_chain_graphs import GREEDY, drafts_by_position, engine_of, prompts
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


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN"])
def test_captured_steps_without_drafts_keep_what_the_drafter_needs(algorithm):
    engine = engine_of(algorithm, {"speculative_adaptive": True}, device="cuda",
                       kernels=KernelArgs(attention_backend="triton"))
    levels = engine.runner.chain_levels
    assert levels is not None and levels.num_drafts == (0, 1, 2, 3)
    eager, chained = (Chats(engine, prompts(3), [GREEDY] * 3, 3) for _ in range(2))
    for num_drafts in (3, 0, 0, 0, 0, 0, 3, 3, 3, 0, 3, 3, 3):
        eager.eager([0, 1, 2], 3)
        chained.chain([0, 1, 2], num_drafts)
    chained.synchronize()
    equal = compared = 0
    for one, other in zip(chained.outputs, eager.outputs):
        tokens, expected = ([token for step, _ in each for token in step] for each in (one, other))
        assert tokens == expected[:len(tokens)]
        drafts, drafted = (drafts_by_position(each) for each in (one, other))
        compared += len(shared := drafts.keys() & drafted.keys())
        equal += sum(drafts[place] == drafted[place] for place in shared)
    assert compared > 9 and equal >= 0.9 * compared
