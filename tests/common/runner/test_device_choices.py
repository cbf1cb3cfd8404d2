"""What a rank decides at start about its device: how tokens are drawn, what is captured, how small sums travel."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.cli import build, parse
from baton.common.config.server import ServerConfig
from baton.common.distributed import all_to_all
from baton.common.distributed import peer_all_reduce as peers
from baton.common.distributed.capture import may_capture
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.step_rows import StepRows
from baton.common.distributed.tp import TPGroup
from baton.common.engine.rank import _failure_sentence, device_of
from baton.common.engine.rank_spec import RankSpec
from baton.common.models.registry import load_model_spec
from baton.common.runner import model_runner
from baton.common.runner.kv_sizing import kv_layout, ranks_per_gpu
from baton.common.runner.preflight import draft_token_bytes, token_bytes
from baton.common.sampling.sampler import Sampler
from baton.common.sampling.sampling_backend import select_sampling_backend
from baton.common.sampling.torch_sampling import TorchSampling

CPU = torch.device("cpu")


def test_a_cpu_draws_with_torch():
    assert isinstance(select_sampling_backend("auto", 40, CPU, 0), TorchSampling)
    assert isinstance(select_sampling_backend("torch", 40, CPU, 0), TorchSampling)
    with pytest.raises(ConfigError, match="--sampling-backend triton needs a GPU"):
        Sampler(40, "cpu", 0, backend="triton")


def test_a_rank_that_never_chooses_tries_no_kernels():
    Sampler(40, "cpu", 0, TPGroup(1, 2), backend="triton")


@pytest.mark.parametrize("backend,base,wanted", [
    ("nccl", 0, [0, 1, 2, None]), ("nccl", 2, [2, None]), ("gloo", 0, [0, 1, 2, 0, 1]), ("gloo", 2, [2, 2, 2]),
    ("gloo", 3, [None]),
])
def test_ranks_share_gpus_over_gloo_alone(monkeypatch, backend, base, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    config = parse(ServerConfig, ["--model-path", "m", "--tp-size", "8", "--dist-backend", backend, "--base-gpu-id",
                                  str(base)], prog="x", description="")
    for rank, index in enumerate(wanted):
        spec = RankSpec(config, rank, 8, "", "", "", rank)
        if index is None:
            with pytest.raises(ConfigError, match=f"Rank {rank} needs GPU {base + rank}, this host has 3"):
                device_of(spec)
        else:
            assert device_of(spec) == torch.device("cuda", index) == chosen[-1]


@pytest.mark.parametrize("backend,wanted", [("nccl", [1, 3, None]), ("gloo", [1, 3, 1])])
def test_ranks_take_every_other_gpu(monkeypatch, backend, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = parse(ServerConfig, ["--model-path", "m", "--tp-size", "8", "--dist-backend", backend, "--base-gpu-id",
                                  "1", "--gpu-id-step", "2"], prog="x", description="")
    for rank, index in enumerate(wanted):
        spec = RankSpec(config, rank, 8, "", "", "", rank)
        if index is None:
            with pytest.raises(ConfigError, match="Rank 2 needs GPU 5, this host has 4"):
                device_of(spec)
        else:
            assert device_of(spec) == torch.device("cuda", index)
    assert ranks_per_gpu(config, 4) == 4


def test_ranks_on_one_gpu_share_its_memory():
    def most(*flags: str) -> int:
        given = ["--model-path", "m", "--dist-backend", "gloo", *flags]
        return ranks_per_gpu(parse(ServerConfig, given, prog="x", description=""), 2)

    assert [most("--tp-size", size) for size in "1238"] == [1, 1, 2, 4]
    assert most("--tp-size", "2", "--base-gpu-id", "1") == 2
    assert most("--tp-size", "2", "--pp-size", "2") == 2
    hosts = ("--nnodes", "2", "--dist-init-addr", "127.0.0.1:5000")
    assert most("--tp-size", "8", *hosts) == 2


class Group(TPGroup):
    """Of a rank that has no peers in this process; every rank finds what this one finds."""

    def min_reduce(self, values):
        return values


def test_what_the_host_decides_in_every_step_is_not_captured(monkeypatch):
    """Without a trial: that would need the ranks."""
    two = Group(0, 2)
    assert may_capture(Parallel())
    tried = []
    monkeypatch.setattr("baton.common.distributed.capture._capture_failure", lambda group,
                        sends: tried.append((group, sends)))
    assert may_capture(Parallel(two)) and tried == [(two, False)]
    across = Group(0, 2)
    assert may_capture(Parallel(two, TPGroup(), across)) and tried == [(two, False), (two, True), (across, True)]
    assert not may_capture(Parallel(two, experts=replace(ExpertParallel(two), ep_size=2, a2a="alltoall")))
    assert not may_capture(Parallel(two, TPGroup(), across, replace(ExpertParallel(two), counts_tokens=True)))
    assert not may_capture(Parallel(Group(0, 2, "cuda:0"))), "it goes through host memory"
    assert len(tried) == 3


def test_a_trial_that_fails_is_told(monkeypatch, caplog):
    monkeypatch.setattr("baton.common.distributed.capture._capture_failure", lambda group,
                        sends: "they were not captured")
    assert not may_capture(Parallel(Group(0, 2)))
    assert "Decode steps run without CUDA graphs: they were not captured." in caplog.text


def test_groups_capture_where_all_ranks_can(monkeypatch, caplog):
    world = Group(0, 2)
    world.min_reduce = lambda values: values * 0  # another rank's attention group could not
    monkeypatch.setattr("baton.common.distributed.capture._capture_failure", lambda group, sends: None)
    assert not may_capture(Parallel(world, TPGroup(), Group(0, 2)))
    assert "Decode steps run without CUDA graphs: other ranks cannot capture theirs." in caplog.text


def test_sums_that_are_wrong_or_cannot_be_go_over_nccl(monkeypatch, caplog):
    group = Group(0, 2, device_group=object())
    monkeypatch.setattr(peers, "SymmetricBuffers", lambda *given: (_ for _ in ()).throw(RuntimeError("no peers here")))
    assert peers.connect(group) is None
    assert "Small sums go over NCCL: RuntimeError: no peers here." in caplog.text

    class Wrong:
        def __init__(self, *given):
            pass

        def self_test(self, group):
            return "a sum of 8 values was wrong"

    monkeypatch.setattr(peers, "SymmetricBuffers", lambda *given: None)
    monkeypatch.setattr(peers, "PeerAllReduce", Wrong)
    assert peers.connect(group) is None
    assert "Small sums go over NCCL: a sum of 8 values was wrong." in caplog.text
    monkeypatch.setattr(Wrong, "self_test", lambda self, group: None)
    assert isinstance(peers.connect(group), Wrong)


def test_tokens_go_by_collectives_where_memory_cannot_be_shared(monkeypatch, caplog):
    """And then decode steps, which may go as others do, are not captured."""
    def parallel() -> Parallel:
        group = Group(0, 2, "cuda:0", device_group=object())
        made = Parallel(group, TPGroup(), group, ExpertParallel(group, 2, "peer"))
        made.token_exchange.all_to_all.connect(8, 64, 2, torch.bfloat16)
        return made

    def refuses(*given):
        raise RuntimeError("no peers here")

    monkeypatch.setattr("baton.common.distributed.capture._capture_failure", lambda group, sends: None)
    monkeypatch.setattr(all_to_all, "AVAILABLE", True)
    monkeypatch.setattr(all_to_all, "DispatchBuffers", refuses)
    alone = parallel()
    exchange = alone.token_exchange.all_to_all
    rows, more = (StepRows.of_groups(counts, 0, torch.device("cpu")) for counts in ([3, 8], [9, 1]))
    assert not (exchange.connected or exchange.can_dispatch(rows) or may_capture(alone))
    assert "for which the host waits in every layer: RuntimeError: no peers here." in caplog.text
    monkeypatch.setattr(all_to_all, "DispatchBuffers", lambda rank, group, device, areas: SimpleNamespace(
        peers=SimpleNamespace(layout=areas)))
    monkeypatch.setattr(all_to_all, "_self_test", lambda peers: "rows came back wrong")
    assert not parallel().token_exchange.all_to_all.connected
    assert "for which the host waits in every layer: rows came back wrong." in caplog.text
    monkeypatch.setattr(all_to_all, "_self_test", lambda peers: None)
    sending = parallel()
    exchange = sending.token_exchange.all_to_all
    assert exchange.can_dispatch(rows) and may_capture(sending)
    assert exchange.nbytes == all_to_all.DispatchLayout(2, 8, 64, 2).nbytes > 2 * 2 * 8 * 64 * 2
    assert not exchange.can_dispatch(more), "there is no room for as many"


def test_sums_on_a_cpu_have_no_peers():
    parallel = Parallel(TPGroup(0, 2))
    peers.connect_all(parallel)
    assert parallel.tp.symm_comm is None


def test_two_ranks_sum_large_messages_in_each_other_s_memory():
    def message(nbytes: int) -> SimpleNamespace:
        return SimpleNamespace(is_cuda=True, device=torch.device("cpu"), dtype=torch.bfloat16, nbytes=nbytes,
                               is_contiguous=lambda: True,
                               shape=(nbytes // 8192, 4096))

    def largest(ranks: int) -> int:
        buffers = SimpleNamespace(device="cpu", of_ranks=(None,) * ranks)
        sums = peers.PeerAllReduce(0, buffers, peers.slots_for(ranks))
        taken = [mib for mib in (1, 2, 32, 33) if sums.can_all_reduce(message(mib << 20))]
        assert taken == [mib for mib in (1, 2, 32, 33) if sums.can_all_reduce_norm(message(mib << 20))]
        return taken[-1]

    assert largest(2) == 32 and largest(4) == 1
    assert peers.slots_for(4, 700) == 700 and peers.slots_for(8, 5000) == peers.MAX_GATHER_ROWS


def test_a_pool_that_is_too_large_is_refused_in_a_sentence(monkeypatch):
    config = build(ServerConfig, {"model_path": "tinychat", "max_total_tokens": 10**9})
    spec, device = load_model_spec(config.model), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    with pytest.raises(ConfigError, match=r"GiB for the KV pool, and cuda:0 has 2\.0 GiB: lower it to \d+ or less\.$"):
        model_runner._check_pool(config, spec, Parallel(), "bfloat16", device)
    each = token_bytes(config.cache, spec, 1, "bfloat16", spec.num_layers)
    layout = kv_layout(config.cache, spec, 1, "bfloat16")
    assert each * layout.page_size == layout.page_bytes

    for flags, layers in (({}, 0), ({"speculative_algorithm": "NGRAM"}, 0), *(
            ({"speculative_algorithm": name, "speculative_draft_model_path": f"tinychat-{draft}"}, None)
            for name, draft in (("EAGLE3", "eagle3"), ("NEXTN", "nextn"), ("STANDALONE", "draft")))):
        config = build(ServerConfig, {"model_path": "tinychat", "max_total_tokens": 64, "device": "cpu", **flags})
        found = draft_token_bytes(config, spec, 1, "float32")
        if layers is None:
            pool = model_runner.ModelRunner.load(config, spec, Parallel(), torch.device("cpu"),
                                                 lambda stage, share: None).draft_pool
            assert found * pool.layout.page_size == pool.layout.page_bytes > 0
        else:
            assert found == 0

    def full(*args, **kwargs):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nframe #0: c10")

    monkeypatch.setattr(model_runner, "KVPool", full)
    with pytest.raises(ConfigError, match=r"^There is no memory for the KV pool of .* lower --max-total-tokens"):
        model_runner._allocate_pool(layout, 7, device, shared=False)


def test_why_a_rank_did_not_start_is_one_sentence(tmp_path, monkeypatch):
    spec = RankSpec(build(ServerConfig, {"model_path": "tinychat"}), 3, 4, "", "", "")
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has a total of ...")
    assert _failure_sentence(spec, error) == (
        "The GPU has too little free memory (CUDA out of memory; Tried to allocate 9 GiB): "
        "lower --mem-fraction-static or --max-total-tokens.")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sentence = _failure_sentence(spec, RuntimeError("NCCL error.\nframe #0: c10::Error"))
    assert sentence.startswith("Rank 3 could not start: RuntimeError: NCCL error. The traceback is in ")
    assert "\n" not in sentence
    assert "frame #0" in next(tmp_path.iterdir()).read_text()
