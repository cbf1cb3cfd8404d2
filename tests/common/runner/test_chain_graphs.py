"""Chain steps, captured by a recorder that runs them again, against eager steps with drafts."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from baton.common.api.messages import CustomProcessor
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import SpeculativeArgs
from baton.common.execution.draft_costs import measure_costs
from baton.common.forward.chain_batches import ChainBatches
from baton.common.tinychat import CHECKPOINT, DRAFT_MODELS
from baton.tests.helpers import row_processors
from baton.tests.helpers.chain_steps import Again, Chats
from baton.tests.helpers.hand_driven import Engine
from baton.tests.tinychat.tasks import held_out
from baton.tests.tinychat.tokenizer import render

HEADS = {"EAGLE3": "tinychat-eagle3", "NEXTN": "tinychat-nextn", "STANDALONE": "tinychat-draft"}


def engine_of(algorithm: str, flags: Mapping[str, Any] = {}, **options):
    return Engine(CHECKPOINT, speculative=SpeculativeArgs(
        speculative_algorithm=algorithm, speculative_draft_model_path=str(DRAFT_MODELS[HEADS[algorithm]]),
        speculative_num_steps=3, **flags), max_total_tokens=8192, **options)


@pytest.fixture(scope="module")
def engines():
    """An engine of each algorithm, for many tests: nothing of the requests remains."""
    return functools.cache(engine_of)


def record(engine, sizes) -> Again:
    """Steps of these sizes are chain steps from now on."""
    recorder = Again()
    engine.runner.chain_steps.record(sizes, recorder, lambda what, share: None)
    return recorder


@functools.cache
def prompts(count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    return [tokenizer(render(tokenizer, example, answered=False), add_special_tokens=False)["input_ids"]
            for example in held_out(count, seed=5)]


GREEDY = SamplingParams(temperature=0.0, max_new_tokens=300)


@pytest.fixture
def both(engines):
    """Makes the same requests twice: for eager and for chain steps, of which there are ``sizes`` by drafts."""
    made: list[Chats] = []

    def make(algorithm: str, sampling, sizes=None, count: int = 3, **options) -> list[Chats]:
        engine = engines(algorithm)
        record(engine, sizes or {3: [2, 4]})
        made.extend(Chats(engine, prompts(count), sampling(count), 3, **options) for _ in range(2))
        return made

    yield make
    for chats in made:
        chats.close()
        assert not chats.engine.cache.num_allocated or chats is not made[-1]


def greedy(count: int) -> list[SamplingParams]:
    return [GREEDY] * count


class Forgetful:
    """Records as CUDA graphs do, which know addresses and keep nothing of the work."""

    def record(self, work):
        return work(), lambda: None

    def alias(self, tensor):
        return tensor


def test_what_graphs_read_lives_as_long(monkeypatch):
    engine, made, make = engine_of("EAGLE3"), [], ChainBatches.of

    def noted(*args):
        batches = make(*args)
        made.extend(weakref.ref(indptr) for indptr, _ in batches.indptrs.values())
        return batches

    monkeypatch.setattr(ChainBatches, "of", noted)
    engine.runner.chain_steps.record({1: [2], 3: [1, 2]}, Forgetful(), lambda what, share: None)
    gc.collect()
    assert len(made) == 9 and all(indptr() is not None for indptr in made)


@pytest.mark.parametrize("algorithm", HEADS)
def test_chain_steps_equal_eager_ones(both, algorithm):
    eager, chained = both(algorithm, greedy)
    for _ in range(12):
        eager.eager([0, 1, 2])
        chained.chain([0, 1, 2])
    chained.synchronize()
    assert chained.outputs == eager.outputs
    assert max(len(tokens) for tokens, _ in chained.outputs[0]) > 1


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN"])
def test_after_steps_without_drafts_as_many_are_accepted_as_before(both, algorithm):
    eager, chained = both(algorithm, greedy, {0: [2, 4], 3: [2, 4]})
    for num_drafts in (3, 3, 0, 0, 0, 0, 0, 3, 3, 3, 0, 3, 3, 3, 3):
        eager.eager([0, 1, 2], 3)
        chained.chain([0, 1, 2], num_drafts)
    chained.synchronize()
    for one, other in zip(chained.outputs, eager.outputs):
        tokens, expected = ([token for step, _ in each for token in step] for each in (one, other))
        assert tokens == expected[:len(tokens)]
        # Where a draft follows the same tokens it is the same, whatever the steps before were.
        drafts, drafted = (drafts_by_position(each) for each in (one, other))
        assert len(shared := drafts.keys() & drafted.keys()) > 3
        assert [drafts[place] for place in shared] == [drafted[place] for place in shared]
        assert any(one[step - 1][1] is None for step in range(1, len(one)))


def drafts_by_position(outputs):
    ends = np.cumsum([len(tokens) for tokens, _ in outputs]).tolist()
    return {end: drafts for end, (_, drafts) in zip(ends, outputs) if drafts is not None}


@pytest.mark.parametrize("algorithm", HEADS)
def test_requests_leave_and_join_while_a_step_is_in_flight(both, algorithm):
    """Sizes are padded; tokens come from the device for some requests of a step, and from the host for others."""
    eager, chained = both(algorithm, greedy, {3: [1, 3, 5], 2: [5]}, count=5)
    steps = [[0, 1, 2], [0, 1, 2, 3], [3, 0, 4], [4, 3], [4], [4, 1], [1, 4, 2, 0, 3], [1, 4, 2, 0, 3], [2]]
    for chosen in steps:
        eager.eager(chosen)
        chained.chain(chosen)
    chained.synchronize()
    assert chained.outputs == eager.outputs


@pytest.mark.parametrize("algorithm", HEADS)
def test_the_host_may_know_the_tokens_of_any_step(both, algorithm):
    eager, chained = both(algorithm, greedy)
    for step in range(8):
        eager.eager([0, 1, 2])
        chained.chain([0, 1, 2])
        if step % 3 != 2:
            chained.synchronize()
        if step == 4:
            eager.eager([1, 0])
            chained.eager([1, 0])
    chained.synchronize()
    assert chained.outputs == eager.outputs


def test_steps_of_several_levels_follow_each_other(both):
    """A step verifies as many of the drafts that the step before has left as it has rows."""
    plain, chained = both("EAGLE3", greedy, {3: [2], 1: [4], 2: [2]}, count=2)
    for num_drafts in (3, 1, 2, 1, 3, 3, 2, 1):
        chained.chain([0, 1], num_drafts)
    chained.synchronize()
    for _ in range(24):
        plain.eager([0, 1], 0)
    for ours, theirs in zip(chained.reqs, plain.reqs):
        tokens = ours.tokens.view(0).tolist()
        assert tokens == theirs.tokens.view(0, len(tokens)).tolist()
    assert any(len(tokens) > 2 for own in chained.outputs for tokens, _ in own)


@pytest.mark.parametrize("algorithm", HEADS)
def test_rows_beyond_limits_are_void(both, algorithm):
    """A limit ends a run of accepted drafts, and rows without a page are in the scratch page."""
    eager, chained = both(algorithm, greedy)
    for _ in range(6):
        eager.eager([0, 1, 2])
        chained.chain([0, 1, 2])
    chained.synchronize()
    length = chained.reqs[1].tokens.count
    limits = [1 << 20, length + 1, length]  # two rows, and none for drafts

    limits[2] = chained.reqs[2].tokens.count
    before = [len(own) for own in chained.outputs]
    chained.chain([0, 1, 2], limits=limits)
    chained.synchronize()
    assert len(chained.outputs[1][-1][0]) <= 2 and len(chained.outputs[2][-1][0]) == 1
    assert [len(own) for own in chained.outputs] == [count + 1 for count in before]
    for _ in range(3):
        chained.chain([0, 1, 2])
    chained.synchronize()
    for _ in range(16):
        eager.eager([0, 1, 2])
    for ours, theirs in zip(chained.reqs, eager.reqs):
        tokens = ours.tokens.view(0).tolist()
        assert tokens == theirs.tokens.view(0, len(tokens)).tolist()


def test_a_step_follows_the_one_before_only(both):
    chats = both("EAGLE3", greedy)[1]
    chats.chain([0, 1, 2])
    chats.last = None
    with pytest.raises(AssertionError, match="follows"):
        chats.chain([0, 1, 2])


def mixed(count: int) -> list[SamplingParams]:
    kinds = [SamplingParams(temperature=0.8, seed=3, max_new_tokens=300), GREEDY,
             SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=9, max_new_tokens=300)]
    return [kinds[row % 3] for row in range(count)]


@pytest.mark.parametrize("algorithm", HEADS)
def test_sampled_requests_get_the_tokens_of_eager_steps(both, algorithm):
    eager, chained = both(algorithm, mixed, {3: [1, 5]}, count=5)
    steps = [[0, 1, 2], [2, 1, 0], [3, 1, 2, 0], [4, 3, 2], [1], [1, 0, 2, 3, 4], [1, 0, 2, 3, 4], [1, 0, 2, 3, 4]]
    for chosen in steps:
        eager.eager(chosen)
        chained.chain(chosen)
    chained.synchronize()
    assert chained.outputs == eager.outputs
    assert max(len(tokens) for own in chained.outputs for tokens, _ in own) > 1


@pytest.mark.parametrize("sampling", [greedy, mixed])
@pytest.mark.parametrize("fields", [{"return_logprob": True, "top_logprobs_num": 2}, {}], ids=["logprobs", "penalty"])
def test_rows_with_extras_are_sampled_as_those_of_eager_steps(both, fields, sampling):
    def penalized(count: int) -> list[SamplingParams]:
        plain = sampling(count)
        return plain if fields else [msgspec.structs.replace(plain[0], frequency_penalty=0.4), *plain[1:]]

    eager, chained = both("EAGLE3", penalized, **fields)
    for _ in range(8):
        eager.eager([0, 1, 2])
        chained.chain([0, 1, 2])
        chained.synchronize()
        assert {key: row.logprobs.token_ids for key, row in chained.extras.items()} == {
            key: row.logprobs.token_ids for key, row in eager.extras.items()}
        for key, row in chained.extras.items():
            np.testing.assert_allclose(row.logprobs.values, eager.extras[key].logprobs.values, atol=2e-3)
    assert chained.outputs == eager.outputs


def test_rows_that_fail_end_the_walk_before_them(both):
    """Tokens of a failed row are never accepted; its request fails once it is the first."""
    processor = CustomProcessor(f"{row_processors.__name__}:fails_late", {"fails": True})
    eager, chained = both("EAGLE3", greedy, count=2, processor=processor)
    for _ in range(8):
        eager.eager([0, 1])
        chained.chain([0, 1])
        chained.synchronize()
        assert chained.outputs == eager.outputs
        errors = [{key: (row.error_code, row.error) for key, row in each.extras.items()} for each in (eager, chained)]
        assert errors[0] == errors[1]
        if any(code for code, _ in errors[0].values()):
            return
    raise AssertionError("no request has failed")


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True}], ids=["plain", "extras"])
def test_simulated_acceptance_is_that_of_eager_steps(fields):
    shares = (0.9, 0.6, 0.4)
    engine = engine_of("EAGLE3", {"speculative_simulate_acceptance": "0.9,0.6,0.4"}, simulated=shares)
    record(engine, {3: [4]})
    eager, chained = (Chats(engine, prompts(3), greedy(3), 3, **fields) for _ in range(2))
    for chosen in ([0, 1, 2], [0, 1, 2], [2, 0], [0, 1, 2], [1, 2, 0], [0, 1, 2]):
        eager.eager(chosen)
        chained.chain(chosen)
        if fields:
            chained.synchronize()
    chained.synchronize()
    assert chained.outputs == eager.outputs
    assert len({len(tokens) for own in chained.outputs for tokens, _ in own}) > 2


@pytest.mark.parametrize("sizes", [{1: [1, 8], 3: [1, 8]}, {3: [8]}], ids=["levels", "one"])
def test_costs_are_those_of_chain_steps(engines, sizes):
    engine = engines("EAGLE3")
    recorder = record(engine, sizes)
    before = recorder.num_replays
    costs = measure_costs(engine.executor, engine.runner, engine.cache, 8, 3, on_device=True)
    assert recorder.num_replays > before + 20
    assert costs.rows[0] == 1 and costs.rows[-1] == 8 * 4
    for part in (costs.plain, costs.verify, costs.draft):
        assert np.all(np.diff(part) >= 0)
    assert costs.plain[0] > 0 and costs.verify[-1] > 0
    assert costs.context_seconds >= 0 and engine.cache.num_allocated == 0
