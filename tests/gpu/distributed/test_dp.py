"""Data-parallel attention over two GPUs and NCCL: every group's tokens are a single GPU's, in CUDA graphs too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.tests.common.distributed.test_dp import alone, make_prompts, run_groups
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.small_models import save_model
from baton.tests.helpers.small_moe import save_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def save_both(folder: Path) -> tuple[Path, Path]:
    """A dense model and a mixture."""
    save_model(folder / "dense", "Qwen2", hidden_size=256, num_attention_heads=4)
    save_moe(folder / "moe", "Qwen3Moe", head_dim=64)
    return folder / "dense", folder / "moe"


def test_two_groups_on_two_gpus(tmp_path):
    """In float32 over our kernels, whose sums no batch changes enough for another token."""
    dense, moe = save_both(tmp_path)
    prompts = make_prompts(1)
    variants = [
        (dense, {}), (dense, {"dp_head": True, "chunk": 16, "overlap": True}), (moe, {"overlap": True}),
        (dense, {"sizes": [2, 4], "overlap": True}), (dense, {"sizes": [1, 8], "dp_head": True}),
        (moe, {"sizes": [2], "overlap": True}),  # three and four requests run eagerly
        (moe, {"halves": True, "overlap": True}),
        (moe, {"pieces": [48, 80], "chunk": 48, "experts": (2,), "sizes": [1, 4], "overlap": True}),
    ]
    cases = [{"checkpoint": str(folder), "prompts": prompts, "page_size": 16, **options}
             for folder, options in variants]
    cases.append({"checkpoint": str(dense), "prompts": [[], prompts[1]], "page_size": 16})
    ranks = run_groups(2, tmp_path, cases, "cuda")
    wanted = {(folder, group): alone(folder, prompts[group], page_size=16, device="cuda:0",
                                     kernels=KernelArgs(disable_cuda_graph=True))
              for folder in (dense, moe) for group in range(2)}
    for group, seen in enumerate(ranks):
        assert all(seen["exchanges"])
        for (folder, _), found in zip(variants, seen["cases"]):
            assert found["tokens"] == wanted[folder, group], (group, folder)
        assert seen["cases"][6]["cut"] and seen["cases"][7]["pieces"] == ranks[0]["cases"][7]["pieces"] != []
    for case in range(3, 6):
        replayed = ranks[0]["cases"][case]["replayed"]
        assert replayed and replayed == ranks[1]["cases"][case]["replayed"]
        assert set(replayed) <= set(variants[case][1]["sizes"])
    assert ranks[1]["cases"][len(variants)]["tokens"] == wanted[dense, 1]


def test_tokens_are_written_to_their_experts_ranks(tmp_path):
    """In float32, whose decode steps go as prompts do: in CUDA graphs too, and prompts in pieces."""
    moe, latent = save_both(tmp_path)[1], tmp_path / "latent"
    save_deepseek(latent, 3)  # with an expert that all tokens share
    prompts = make_prompts(1)
    sent = {"prompts": prompts, "page_size": 16, "experts": (2, "peer")}
    variants = [(moe, {"pieces": [48, 80], "chunk": 48, "sizes": [1, 4], "overlap": True}),
                (latent, {"sizes": [4], "chunk": 16})]
    ranks = run_groups(2, tmp_path, [sent | {"checkpoint": str(folder), **options} for folder, options in variants],
                       "cuda")
    for group, seen in enumerate(ranks):
        for (folder, _), found in zip(variants, seen["cases"]):
            assert found["connected"] and found["replayed"]
            assert found["tokens"] == alone(folder, prompts[group], page_size=16, device="cuda:0",
                                            kernels=KernelArgs(disable_cuda_graph=True)), (group, folder)
        assert seen["cases"][0]["pieces"]


def test_rows_travel_through_each_other_s_memory(tmp_path):
    """In bfloat16, as NCCL carries them, and decode steps that meet in their norms."""
    dense, moe = save_both(tmp_path)
    short = {"checkpoint": str(dense), "prompts": make_prompts(1), "page_size": 16, "dtype": "bfloat16", "sizes": [4]}
    mixed = short | {"checkpoint": str(moe)}
    cases = [short, short | {"peers": True}, mixed | {"experts": (2, "none")},
             *(mixed | {"experts": (2, a2a), "peers": True} for a2a in ("low_latency", "peer"))]
    for seen in run_groups(2, tmp_path, cases, "cuda"):
        by_nccl, by_peers, exchanged, met, sent = seen["cases"]
        assert by_nccl["tokens"] == by_peers["tokens"], "sums of two have no order"
        for other in (met, sent):
            same = [one == another for one, another in zip(exchanged["tokens"], other["tokens"])]
            assert 2 * sum(same) >= len(same), "the norm's own rounding may turn a close choice, not most"
            assert [8] in other["met"], "which of four rows of each pad is known"
        assert sent["connected"] and not met["connected"]
