"""Prompts in pieces of recorded sizes compute what whole steps do. test_tp.py and test_dp.py have several ranks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from baton.common.config.server import KernelArgs, ScheduleArgs
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.step_rows import ONE_GROUP
from baton.common.distributed.tp import TPGroup
from baton.common.models.registry import load_model_spec
from baton.common.runner.cuda_graphs.launch_cost import launch_bound_sizes
from baton.common.runner.cuda_graphs.piecewise_graphs import PrefillGraphs, default_sizes, prefill_graph_sizes
from baton.common.runner.kv_sizing import count_pages, kv_layout
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.family_parity import save_random
from baton.tests.helpers.replayed_prompts import PADDED, SIZES, record_again, steps_of
from baton.tests.helpers.small_models import load_runner, save_model, server_config
from baton.tests.helpers.small_moe import save_moe

SAVE = {"Llama": lambda folder: save_model(folder, "Llama"), "Qwen3Moe": lambda folder: save_moe(folder, "Qwen3Moe"),
        "DeepseekV3": lambda folder: save_deepseek(folder, 3),
        "Gemma2": lambda folder: save_random(folder, "Gemma2", head_dim=16, sliding_window=256),
        "GPTNeoX": lambda folder: save_random(folder, "GPTNeoX", hidden_size=64),
        "Olmo2": lambda folder: save_random(folder, "Olmo2")}


@pytest.mark.parametrize("family", SAVE)
def test_pieces_equal_whole_steps(tmp_path, family):
    """Padded and not; rows of padding attend to what steps before have left there."""
    SAVE[family](tmp_path)
    runner = load_runner(server_config(tmp_path, page_size=4, num_layer_groups=3))
    whole = steps_of(runner)
    replayed = record_again(runner, SIZES)
    found = steps_of(runner)
    assert replayed == [size for size in PADDED for _ in range(runner.spec.num_layers)]
    for mine, wanted in zip(found, whole):
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)


def test_sizes():
    assert default_sizes(100) == [32, 64, 100]
    sizes = default_sizes(8192)
    assert sizes[:9] == [32, 64, 128, 192, 256, 320, 384, 448, 512] and sizes[-1] == 8192
    assert all(after <= 1.25 * before for before, after in zip(sizes[4:], sizes[5:]))
    assert default_sizes(1100)[-2:] == [1024, 1100]


def test_which_steps_are_recorded():
    graphs = PrefillGraphs.__new__(PrefillGraphs)
    graphs._sizes, graphs._launch_bound, graphs._max_padding_ratio = [64, 256, 512, 1024], 256, 1.25
    assert [graphs.size_for([count]) for count in (1, 64, 65, 257, 410, 512, 513, 820, 1024, 1025)] == [
        64, 64, 256, None, 512, 512, None, 1024, 1024, None]
    assert graphs.size_for([200, 1]) == 256 and graphs.size_for([1000, 900]) == 1024
    assert graphs.size_for([1000, 1]) is None, "a step of one group would be padding for the other"
    graphs._max_padding_ratio = 2.0
    assert graphs.size_for([1024, 1]) == 1024 and graphs.size_for([1000, 1]) is None


@pytest.mark.parametrize("bound", [0, 1, 100, 512, 513, 9000])
def test_the_largest_step_that_waits_for_the_host_is_found_in_few_trials(tmp_path, bound):
    save_model(tmp_path, "Llama")
    runner = load_runner(server_config(tmp_path))
    tried = []

    def trial(size, work):
        tried.append(size)
        if size <= 64:
            work(ONE_GROUP)
        return max(1.05, 1.2 * size / (bound + 0.5))

    sizes = default_sizes(8192)
    with torch.inference_mode():
        useful, launch_bound = launch_bound_sizes(runner._model, sizes, trial)
    assert useful == [size for size in sizes if size < 2 / 1.2 * (bound + 0.5)]
    assert launch_bound == max((size for size in sizes if size <= bound), default=0)
    assert len(tried) == len(set(tried)) <= 10


def test_what_is_recorded_by_flags_and_by_how_tokens_reach_experts(tmp_path):
    save_moe(tmp_path, "Qwen3Moe")
    config, plain = server_config(tmp_path), Parallel()
    spec = load_model_spec(config.model)

    def sizes_of(parallel=plain, chunk=100, **kernels):
        changed = dataclasses.replace(config, kernels=KernelArgs(**kernels),
                                      schedule=ScheduleArgs(chunked_prefill_size=chunk))
        return prefill_graph_sizes(changed, spec, parallel)

    assert sizes_of() == [32, 64, 100] and sizes_of(piecewise_cuda_graph_max_tokens=64) == [32, 64]
    assert sizes_of(piecewise_cuda_graph_tokens=(70, 10, 200)) == [10, 70]
    assert not sizes_of(disable_cuda_graph=True) and not sizes_of(disable_piecewise_cuda_graph=True)
    for options in ({"counts_tokens": True}, {"eplb": True}, {"a2a": "alltoall"}, {"a2a": "peer"}):
        assert not sizes_of(Parallel(experts=ExpertParallel(TPGroup(), **options))), options
    peers = Parallel(TPGroup(0, 2), TPGroup(), TPGroup(0, 2), ExpertParallel(TPGroup(0, 2), 2, "peer"))
    peers.experts.all_to_all._shared = SimpleNamespace(peers=SimpleNamespace(layout=SimpleNamespace(rows=64)))
    assert sizes_of(peers) == [32, 64], "of more rows the exchange waits for the host"


def test_the_pool_leaves_no_room_for_graphs_that_nobody_records(tmp_path, monkeypatch):
    """A chunk's worth of rows, of several GB in large models, would stay empty."""
    save_moe(tmp_path, "Qwen3Moe")
    config = server_config(tmp_path)
    spec = load_model_spec(config.model)
    layout = kv_layout(config.cache, spec, 1, "bfloat16")
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30, 80 << 30))

    def pages(parallel=None, **kernels):
        changed = dataclasses.replace(config, kernels=KernelArgs(**kernels),
                                      cache=dataclasses.replace(config.cache, max_total_tokens=None),
                                      schedule=ScheduleArgs(chunked_prefill_size=4096))
        return count_pages(changed, spec, [layout], parallel or Parallel(), torch.device("cuda"))

    without = pages(disable_piecewise_cuda_graph=True)
    assert pages(Parallel(experts=ExpertParallel(TPGroup(), counts_tokens=True))) == without
    assert pages() < pages(piecewise_cuda_graph_tokens=(256, 100_000)) < without
