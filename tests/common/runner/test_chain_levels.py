"""Which chain steps are captured, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.common.attention.torch_backend import TorchBackend
from baton.common.commands import memory
from baton.common.config.server import (
    CacheArgs,
    DataParallelArgs,
    DisaggregationArgs,
    KernelArgs,
    ModelArgs,
    ParallelArgs,
    ScheduleArgs,
    ServerConfig,
    SpeculativeArgs,
)
from baton.common.forward.chain_rows import ChainLevels
from baton.common.runner import chain_steps
from baton.common.runner.cuda_graphs.chain_sizes import chain_sizes
from baton.tests.common.runner.test_chain_graphs import GREEDY, engine_of, prompts
from baton.tests.helpers.chain_steps import Again, Chats


def test_the_least_sufficient_width_is_found() -> None:
    levels = ChainLevels((1, 3, 7), (256, 256, 128), 9)
    assert [levels.width_for(200, drafts) for drafts in (0, 1, 2, 3, 4)] == [2, 2, 4, 4, 4]
    assert levels.width_for(128, 4) == 8
    assert levels.width_for(128, 8) == 8  # fewer than wanted are better than an eager step
    assert levels.width_for(257, 1) is None
    assert not levels.has_plain
    levels = ChainLevels((0, 3), (256, 128), 9)
    assert levels.has_plain
    assert [levels.width_for(200, drafts) for drafts in (0, 1)] == [1, None]  # plain steps are of another kind
    levels = ChainLevels((1, 3), (4, 2), 9, (frozenset({1, 4}), frozenset({2})))  # --disable-cuda-graph-padding
    assert [levels.width_for(count, 1) for count in range(1, 6)] == [2, 4, None, 2, None]


def sizes_of(**flags):
    schedule = flags.pop("schedule", ScheduleArgs())
    speculative = {"speculative_algorithm": "EAGLE3"} | flags.pop("speculative", {})
    config = ServerConfig(ModelArgs(model_path="none"), CacheArgs(), schedule, speculative=SpeculativeArgs(
        speculative_draft_model_path="none", **speculative), **flags)
    return chain_sizes(config)


def test_sizes_to_capture() -> None:
    fixed = sizes_of()
    assert list(fixed) == [3] and fixed[3][:5] == [1, 2, 4, 8, 12] and fixed[3][-1] == 256
    assert sizes_of(speculative={"speculative_num_steps": 15})[15][-1] == 128
    adaptive = sizes_of(speculative={"speculative_adaptive": True, "speculative_num_steps": 7})
    assert {count: each[-1] for count, each in adaptive.items()} == {0: 256, 1: 256, 2: 256, 3: 256, 5: 170, 7: 128}
    standalone = {"speculative_algorithm": "STANDALONE", "speculative_adaptive": True}
    assert list(sizes_of(speculative=standalone)) == [1, 2, 3]  # its gaps are closed later
    assert sizes_of(kernels=KernelArgs(cuda_graph_bs=(8, 2, 4, 400))) == {3: [2, 4, 8]}
    assert sizes_of(schedule=ScheduleArgs(max_running_requests=6)) == {3: [1, 2, 4, 6]}


@pytest.mark.parametrize("flags", [
    {"kernels": KernelArgs(disable_cuda_graph=True)},
    {"speculative": {"speculative_eagle_topk": 2}},
    {"speculative": {"speculative_attention_mode": "prefill"}},
    {"data_parallel": DataParallelArgs(enable_dp_attention=True, dp_size=2), "parallel": ParallelArgs(tp_size=2)},
    {"disaggregation": DisaggregationArgs(disaggregation_mode="prefill")},
], ids=lambda flags: next(iter(flags)))
def test_steps_that_are_not_captured(flags) -> None:
    assert sizes_of(**flags) == {}


class Refusing(Again):
    """Refuses a capture, as torch does, at its second attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts = 0

    def record(self, work):
        self.attempts += 1
        if self.attempts == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(work)


def test_steps_that_cannot_be_captured_are_eager(monkeypatch, caplog) -> None:
    runner = engine_of("EAGLE3").runner
    config = runner._config
    assert runner.chain_levels is None  # torch's attention needs the host
    runner.chain_steps.select(config)
    assert runner.chain_levels is None
    monkeypatch.setattr(TorchBackend, "verifies", lambda self, batch: batch.verifies and batch.max_q_len == 4)
    runner.chain_steps.select(config)
    assert runner.chain_levels == ChainLevels((3,), (64,), runner.scratch_page)
    monkeypatch.setattr(chain_steps, "GraphRecorder", lambda device: Refusing())
    runner.chain_steps.capture(lambda what, share: None)
    assert runner.chain_levels is None
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "Steps with drafts run without CUDA graphs: RuntimeError: operation" in record.getMessage()


def test_graphs_are_dropped_with_memory_and_captured_again(monkeypatch) -> None:
    engine = engine_of("EAGLE3")
    runner = engine.runner
    monkeypatch.setattr(TorchBackend, "verifies", lambda self, batch: batch.verifies)
    monkeypatch.setattr(chain_steps, "GraphRecorder", lambda device: Again())
    runner.chain_steps.record({3: [4]}, Again(), lambda what, share: None)
    before = Chats(engine, prompts(2), [GREEDY] * 2, 3)
    for _ in range(3):
        before.chain([0, 1])
    before.close()
    runner.release(["kv_cache"])
    assert runner.chain_levels is not None
    with pytest.raises(AssertionError):
        before.chain([0, 1])
    runner.resume(["kv_cache"], complete=True)
    after = Chats(engine, prompts(2), [GREEDY] * 2, 3)
    for _ in range(3):
        after.chain([0, 1])
    after.close()
    assert after.outputs == before.outputs


def test_steps_that_cannot_be_captured_again_are_eager(monkeypatch) -> None:
    runner = engine_of("EAGLE3").runner
    runner.chain_steps.record({3: [2]}, Again(), lambda what, share: None)
    runner.release(["kv_cache"])
    monkeypatch.setattr(chain_steps, "GraphRecorder", lambda device: Refusing())
    drafting = SimpleNamespace(keeps_drafts=True)
    rank = SimpleNamespace(runner=runner, released={"kv_cache"},
                           batcher=SimpleNamespace(chains=object(), drafting=drafting))
    assert memory.resume(rank, ["kv_cache"]) == "kv_cache resumed."
    assert rank.batcher.chains is None and rank.released == set() and not drafting.keeps_drafts
