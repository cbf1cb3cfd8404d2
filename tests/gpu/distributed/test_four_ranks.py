"""Layouts of four ranks on the GPUs that there are, which the ranks share: what they exchange goes through host memory,
the rest is as on four GPUs: slices of heads, vocabulary and experts, pools, and pages that travel between servers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.common.distributed.tp import TPGroup
from baton.common.tinychat import CHECKPOINT
from baton.tests.common.distributed.test_dp import alone, make_prompts, run_groups
from baton.tests.common.execution.test_pp import run_stages
from baton.tests.gpu.distributed.shared_rank import TOKENS, logits_of
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.harness import Cluster, post_json
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import expected_logits, save_model
from baton.tests.helpers.small_moe import save_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GPU = "cuda:0"
EAGER = KernelArgs(disable_cuda_graph=True)
SHARED_RANK = Path(__file__).with_name("shared_rank.py")


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(300, 1500, length).tolist() for length in lengths]
    return [*prompts, prompts[1] + prompts[0]]  # the last one begins with what the prefix cache has


def alone_of_tinychat(prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    engine = Engine(CHECKPOINT, device=GPU, kernels=EAGER, page_size=16, max_total_tokens=8192)
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt, max_new_tokens=count, ignore_eos=True)
    tokens = tokens_of(engine.run())
    return [tokens[str(i)] for i in range(len(prompts))]


def test_tensor_and_expert_parallel(tmp_path):
    """Two KV heads and 131 words among four ranks; latents, windows and sinks; whole experts and slices of them: in
    float32 against transformers."""
    models = {
        "dense": save_model(tmp_path / "dense", "Qwen2", hidden_size=256, num_attention_heads=4),
        "moe": save_moe(tmp_path / "moe", "Qwen3Moe", head_dim=32),
        "latent": save_deepseek(tmp_path / "latent", 3),
        "windowed": save_gpt_oss(tmp_path / "windowed", hidden_size=64, intermediate_size=32, head_dim=64),
    }
    exact = [("dense", 1), *((name, ep) for name in ("moe", "latent") for ep in (1, 2, 4)), ("windowed", 4)]
    cases = [{"checkpoint": str(tmp_path / name), "dtype": "float32", "backend": "triton", "ep": ep}
             for name, ep in exact]
    for rank, seen in enumerate(run_ranks(SHARED_RANK, 4, tmp_path, "shared", *map(json.dumps, cases))):
        assert all(seen["moved"]), seen["moved"]
        for (name, ep), found in zip(exact, seen["logits"]):
            torch.testing.assert_close(found, expected_logits(models[name], TOKENS), atol=2e-4, rtol=0,
                                       msg=lambda said, where=(rank, name, ep): f"{where}: {said}")


def test_sums_through_each_other_s_memory(tmp_path):
    """In bfloat16, as through the host, against one rank, which computes prompts by FlashInfer as they do. A rounding
    may turn a few rows' choice of experts, not most."""
    save_model(tmp_path / "dense", "Llama", head_dim=128, num_attention_heads=8, hidden_size=256)
    save_moe(tmp_path / "moe", "Qwen3Moe", head_dim=128, hidden_size=256)
    backend = "flashinfer" if find_spec("flashinfer") else "triton"
    cases = [{"checkpoint": str(tmp_path / name), "dtype": "bfloat16", "backend": backend, "ep": ep}
             for name, ep in (("dense", 1), ("moe", 4))]
    ranks = run_ranks(SHARED_RANK, 4, tmp_path, "shared", *map(json.dumps, cases))
    for i, case in enumerate(cases):
        wanted = logits_of(TPGroup(device=GPU), **{**case, "ep": 1}).float()
        for way in ("logits", "peers"):
            errors = (ranks[0][way][i].float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert errors.median() <= 0.03 and errors.isfinite().all(), (way, case, errors)
    assert all(torch.equal(found, first) for seen in ranks for found, first in zip(seen["peers"], ranks[0]["peers"]))


@pytest.mark.parametrize("groups", [2, 4])
def test_attention_groups(tmp_path, groups):
    dense, moe = tmp_path / "dense", tmp_path / "moe"
    save_model(dense, "Qwen2", hidden_size=256, num_attention_heads=4)
    save_moe(moe, "Qwen3Moe", head_dim=64)
    prompts = (make_prompts(1) + [[], [[9] * 21]])[:groups]  # of four groups one has nothing to do
    variants = [(dense, {"dp_head": True, "chunk": 16, "overlap": True}), (moe, {"overlap": True}),
                (moe, {"experts": (4, "alltoall"), "chunk": 16}), (moe, {"experts": (4,), "halves": True})]
    cases = [{"checkpoint": str(folder), "prompts": prompts, "page_size": 16, **options}
             for folder, options in variants]
    if groups == 4:
        even = {"checkpoint": str(moe), "prompts": [prompts[0][:2]] * 4, "page_size": 16, "dtype": "bfloat16"}
        cases += [even | {"experts": (4, "none")}, even | {"experts": (4, "low_latency"), "peers": True}]
    ranks = run_groups(4, tmp_path, cases, "shared", groups)
    wanted = {(folder, group): alone(folder, prompts[group], page_size=16, device=GPU, kernels=EAGER)
              for folder in (dense, moe) for group in range(groups)}
    for rank, seen in enumerate(ranks):
        group = rank * groups // 4
        for (folder, options), found in zip(variants, seen["cases"]):
            assert found["tokens"] == wanted[folder, group], (rank, options)
        if groups == 4:
            plain, met = seen["cases"][-2:]
            assert met["met"] and not plain["met"], "decode steps meet in their norms"
            same = [one == other for one, other in zip(plain["tokens"], met["tokens"])]
            assert any(same), "the norm's own rounding may turn a close choice"


def test_stages_of_two_ranks(tmp_path):
    prompts = prompts_of((5, 200, 64, 33))
    case = {"checkpoint": str(CHECKPOINT), "prompts": prompts, "chunk": 48, "page_size": 16, "max_total_tokens": 8192}
    ranks = run_stages(4, tmp_path, [case], "shared")
    engine = Engine(CHECKPOINT, device=GPU, kernels=EAGER, chunk=48, page_size=16, max_total_tokens=8192)
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt, max_new_tokens=8 + 5 * i % 11)
    assert ranks[0]["cases"][0]["tokens"] == tokens_of(engine.run())


def test_a_pair_of_six_ranks(tmp_path):
    """Two stages of two ranks hand prompts to two ranks that decode: from each GPU into either one's memory."""
    prompts = prompts_of((5, 200, 64, 33, 150, 400))
    flags = ["--device", "cuda", "--dtype", "float32", "--dist-backend", "gloo", "--max-total-tokens", "8192",
             "--tp-size", "2", "--disaggregation-transfer-backend", "ipc", "--kv-checksum", "full"]
    with Cluster(tmp_path, flags=flags, prefill_flags=["--pp-size", "2", "--chunked-prefill-size", "64"]) as cluster:
        body = {"sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
        for _ in range(2):  # the second time from the prefix caches
            with ThreadPoolExecutor(len(prompts)) as threads:
                answers = list(threads.map(
                    lambda prompt: post_json(cluster.url + "/generate", {"input_ids": prompt, **body}), prompts))
            assert [status for status, _ in answers] == [200] * len(prompts), answers
            assert [answer["output_ids"] for _, answer in answers] == alone_of_tinychat(prompts)
        for server in cluster.workers:
            server.assert_clean()
        assert cluster.decode[0].state()["counters"]["kv_transfers_done"] == 2 * len(prompts)
