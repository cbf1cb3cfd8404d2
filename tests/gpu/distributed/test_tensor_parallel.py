"""Two GPUs: sums through each other's memory are NCCL's, and captured decode steps and pieces of prompts
give the eager ones' tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import save_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

PARTS = ("sums", "tokens", "bfloat16")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.skipif(torch.cuda.device_count() < 4,
                                                                             reason="needs four GPUs"))])
def test_ranks_sum_and_capture(tmp_path, size):
    """Tokens in float32, whose sums no batch size changes enough for another token. The parts run beside each other:
    most of their time they import and compile."""
    checkpoint = tmp_path / "model"
    save_model(checkpoint, "Qwen2", hidden_size=256, num_attention_heads=4)

    def ranks_of(part: str) -> list:
        folder = tmp_path / part
        folder.mkdir()
        return run_ranks(Path(__file__).with_name("tensor_parallel_rank.py"), size, folder, part, str(checkpoint))

    with ThreadPoolExecutor() as pool:
        running = {part: pool.submit(ranks_of, part) for part in PARTS}
        alone = tokens_alone(checkpoint)
        seen = {part: ranks.result() for part, ranks in running.items()}
    for found in seen["sums"]:
        assert found["connected"] and found["capture"]
        assert max(found["sums"]) < 0.1 and found["graph"] == 0 and found["equal"] and max(found["norms"]) < 0.1
    for found in seen["tokens"]:
        assert found["connected"] and found["eager"] == found["graphs"] == found["pieces"] == alone
    for found in seen["bfloat16"]:
        assert found["connected"] and found["peers"] == seen["bfloat16"][0]["peers"]
        near = [tokens == found["nccl"][rid] for rid, tokens in found["peers"].items()]
        assert sum(near) >= 4, "norms round a few values otherwise, and one token in a hundred may depend on it"


def tokens_alone(checkpoint: Path) -> dict[str, list[int]]:
    """One GPU's."""
    engine = Engine(checkpoint, page_size=16, max_total_tokens=8192, max_running=8, device="cuda:0",
                    kernels=KernelArgs("triton", disable_cuda_graph=True))
    for i in range(6):
        engine.start(str(i), [(11 * i + j) % 90 + 5 for j in range(5 + 20 * i)], max_new_tokens=24, ignore_eos=True)
    return tokens_of(engine.run())
