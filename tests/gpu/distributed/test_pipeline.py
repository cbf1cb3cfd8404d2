"""Two GPUs: a model in two stages answers as one GPU does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.common.tinychat import CHECKPOINT
from baton.tests.common.execution.test_pp import run_stages
from baton.tests.helpers.hand_driven import Engine, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def test_two_gpus_answer_as_one(tmp_path):
    """Tokens of tinychat in float32, of prompts that are cut into chunks and share what the prefix cache has."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(300, 1500, length).tolist() for length in (5, 200, 64, 33)]
    prompts.append(prompts[1] + prompts[0])
    options = {"chunk": 48, "page_size": 16, "max_total_tokens": 8192}
    cases = [{"checkpoint": str(CHECKPOINT), "prompts": prompts, **options},
             {"checkpoint": str(CHECKPOINT), "prompts": prompts, **options, "parallel": {"pp_max_micro_batch_size": 1}}]
    ranks = run_stages(2, tmp_path, cases, "cuda")
    engine = Engine(CHECKPOINT, device="cuda:0", kernels=KernelArgs(disable_cuda_graph=True), **options)
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt, max_new_tokens=8 + 5 * i % 11)
    alone = tokens_of(engine.run())
    for case in ranks[0]["cases"]:
        assert case["tokens"] == alone
    assert [rank["cases"][0]["layers"] for rank in ranks] == [4, 3]
