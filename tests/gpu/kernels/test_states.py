"""Recurrent states on a GPU: kernels against their twins, and whole hybrid models with CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.tests.common.speculative.test_drafting_engine import Oracle
from baton.tests.helpers.family_parity import save_random
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.hybrid_models import MAMBA, save_hybrid
from baton.tests.helpers.kernel_cases import check_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS = [[(7 * i + count) % 97 for i in range(count)] for count in (3, 20, 141, 8, 130, 64, 31)]


def test_kernels_equal_their_twins():
    check_cases("state_cases.py", timeout=230)


def answers(folder: Path, device: str, **options) -> dict[str, list[int]]:
    engine = Engine(folder, page_size=16, device=device, dtype="float32", cache={"max_mamba_cache_size": 80}, **options)
    for _ in range(2):  # the second time over the prefix cache
        for rid, prompt in enumerate(PROMPTS):
            engine.start(str(rid), prompt, max_new_tokens=40, ignore_eos=True)
        found = tokens_of(engine.run())
    return found


@pytest.mark.parametrize("family", ["qwen", "falcon"])
def test_tokens_equal_those_of_a_cpu(tmp_path, family):
    if family == "qwen":
        save_hybrid(tmp_path, head_dim=64)
    else:
        save_random(tmp_path, "FalconH1", **{**MAMBA, "vocab_size": 97, "head_dim": 64})
    want = answers(tmp_path, "cpu")
    for options in ({}, {"overlap": True, "chunk": 50}, {"kernels": KernelArgs(disable_cuda_graph=True)},
                    {"overlap": True, "proposer": Oracle(want)}):
        assert answers(tmp_path, "cuda", **options) == want
