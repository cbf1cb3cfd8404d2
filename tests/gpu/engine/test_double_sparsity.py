"""Double sparsity on a GPU: its kernels, the tokens of dense attention where nothing is left out, by eager steps and by
graphs, and its speed at long contexts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.common.attention.double_sparsity_backend import Sparsity
from baton.common.config.server import KernelArgs
from baton.tests.bench.double_sparsity import Case
from baton.tests.helpers.channel_files import save_random_channels, sparsity
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.kernel_cases import check_cases
from baton.tests.helpers.small_models import save_steep_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 64, "vocab_size": 97, "initializer_range": 0.15}
PROMPTS = [[(7 * i + count) % 97 for i in range(count)] for count in (3, 20, 141, 8, 330, 64, 31)]


def test_kernels_equal_their_twins():
    check_cases("sparse_cases.py")


def answers(folder: Path, **options) -> dict[str, list[int]]:
    engine = Engine(folder, page_size=16, device="cuda", dtype="float32", **options)
    for rid, prompt in enumerate(PROMPTS):
        engine.start(str(rid), prompt, max_new_tokens=40)
    return tokens_of(engine.run())


@pytest.mark.parametrize("options", [{"kernels": KernelArgs(disable_cuda_graph=True)}, {}, {"overlap": True},
                                     {"max_total_tokens": 640, "chunk": 100}],
                         ids=["eager", "graphs", "overlap", "retraction"])
def test_nothing_left_out_gives_the_dense_tokens(tmp_path, options):
    """Requests below and above the threshold, which some pass while they run."""
    save_steep_qwen3(tmp_path, **SIZES)
    args = sparsity(save_random_channels(tmp_path, 3, 2, 64), ds_heavy_channel_num=64, ds_sparse_decode_threshold=50)
    assert answers(tmp_path, sparsity=args, **options) == answers(tmp_path, **options)


def test_graphs_select_as_eager_steps(tmp_path):
    save_steep_qwen3(tmp_path, **SIZES)
    args = sparsity(save_random_channels(tmp_path, 3, 2, 64), ds_heavy_channel_num=16, ds_heavy_token_num=24,
                    ds_sparse_decode_threshold=50)
    eager = answers(tmp_path, sparsity=args, kernels=KernelArgs(disable_cuda_graph=True))
    assert answers(tmp_path, sparsity=args) == eager
    dense = answers(tmp_path)
    assert {rid for rid in dense if dense[rid] != eager[rid]} <= {"1", "2", "4", "5", "6"}
    assert dense != eager


def test_long_contexts_are_faster():
    """64 requests of 16,384 tokens, 32 query heads and 8 KV heads; the bench of the same name has the numbers."""
    case = Case(64, 16384, 32, 8)
    dense = case.microseconds(case.dense())
    sparse = case.microseconds(case.sparse(Sparsity(32, 256, 4096)))
    print(f"dense {dense:.0f} us, sparse {sparse:.0f} us a layer")
    assert sparse < dense / 1.5
