"""A run of decode steps has in its arrays what its requests say, whoever joins and leaves."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest
import torch

from baton.common.api.messages import Generate, LatencySpan, OutputBatch, decode_from_engine, encode
from baton.common.api.sampling import SamplingParams
from baton.common.forward.forward_batch import Row, build_forward_batch, build_run_batch
from baton.common.kvcache.manager import KVCacheManager
from baton.common.request import input_batch
from baton.common.request.batch import InputBatchChunks
from baton.common.request.input_batch import InputBatch
from baton.common.request.req import Req
from baton.common.request.token_buffer import TokenBuffer
from baton.common.runner.cuda_graphs import decode_inputs
from baton.common.runner.cuda_graphs.decode_inputs import DecodeInputs
from baton.common.sampling import sampled_tokens
from baton.common.scheduler.request_tracker import RequestTracker
from baton.tests.bench import dummy_engine

PAGE = 4
CPU = torch.device("cpu")


class Place:
    """Requests whose prompts are computed, over a cache of pages."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.cache = KVCacheManager(4096, PAGE)
        self.count = 0

    def begun(self, **sampling):
        self.count += 1
        params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": int(self.rng.integers(2, 40))} | sampling)
        prompt = self.rng.integers(0, 100, int(self.rng.integers(1, 60))).tolist()
        req = Req.from_message(Generate(str(self.count), prompt, params), eos_ids=frozenset({1}), now=0.0, timeout=1.0)
        req.hold = self.cache.begin(req.tokens.view(), 0)
        assert self.cache.grow(req.hold, len(prompt))
        req.num_computed_tokens, req.num_pending = len(prompt), 1
        return req

    def grow(self, run):
        if self.rng.random() < 0.5 and run.short() and run.add_page_each(self.cache, run.short()):
            assert not run.short()
        for place in run.short():
            assert self.cache.grow(run.reqs[place].hold, run.reqs[place].length)
            run.grown(place)


def same(table, wanted):
    for name, array in table._asdict().items():
        other = getattr(wanted, name)
        assert array.dtype == other.dtype and np.array_equal(array, other), name


@pytest.mark.parametrize("seed", range(3))
def test_arrays_are_those_of_the_requests(seed):
    place = Place(seed)
    reqs = [place.begun() for _ in range(6)]
    run, runs, joined = None, 0, 6
    for _ in range(150):
        if run is None or reqs != run.reqs:
            run, runs = InputBatch(list(reqs), PAGE, run), runs + 1
        place.grow(run)
        anew = InputBatch(list(reqs), PAGE)
        same(run.table(), anew.table())
        assert np.array_equal(run.left, anew.left) and run.ending() == anew.ending() and anew.stop_ids == run.stop_ids
        assert run.newest(False) == anew.newest(False) and run.wanting(reqs) == reqs
        assert [(chunk.req, chunk.start, chunk.stop) for chunk in InputBatchChunks(run)] == [
            (req, req.num_computed_tokens, req.length) for req in reqs]
        gone = [reqs[i] for i in run.ending()]
        run.advance()
        for req in reqs:  # the step is taken in, and the prompts of those that are new
            while req.num_pending:
                req.take_pending(int(place.rng.integers(2, 99)))
        run.took([req.tokens.last for req in reqs])
        assert all(req.complete for req in gone)
        if place.rng.random() < 0.2 and len(reqs) > 2:  # one is retracted, and may come back with other pages
            gone.append(reqs[int(place.rng.integers(len(reqs)))])
        for req in gone:
            run.leave([req])
            if req in reqs:
                reqs.remove(req)
            place.cache.release(req.hold)
        if gone and not gone[-1].complete and place.rng.random() < 0.5:
            req = gone[-1]
            req.hold = place.cache.begin(req.tokens.view(), 0)
            assert place.cache.grow(req.hold, req.length)
            reqs.append(req)
        while len(reqs) < 3 or place.rng.random() < 0.15:
            reqs.append(place.begun())
            joined += 1
    assert runs > 20 and joined > 12


def test_pages_of_requests_that_turn_together():
    place = Place(3)
    reqs = [place.begun(max_new_tokens=30) for _ in range(5)]
    for req in reqs[1:]:  # all at the same place of their pages
        req.num_computed_tokens = reqs[0].num_computed_tokens
        req.tokens = TokenBuffer(list(range(reqs[0].length - 1)))
        req.num_prompt_tokens = reqs[0].num_prompt_tokens
        place.cache.release(req.hold)
        req.hold = place.cache.begin_private()
        assert place.cache.grow(req.hold, req.num_computed_tokens)
    run = InputBatch(reqs, PAGE)
    for _ in range(3 * PAGE):
        assert len(run.short()) in (0, 5)
        if short := run.short():
            assert run.add_page_each(place.cache, short)
        same(run.table(), InputBatch(list(reqs), PAGE).table())
        run.advance()
        for req in reqs:
            req.take_pending(7)


def test_a_page_that_nobody_told_of_is_not_given_again():
    """As where requests grew while others were retracted."""
    place = Place(5)
    reqs = [place.begun(max_new_tokens=30) for _ in range(2)]
    run = InputBatch(reqs, PAGE)
    while reqs[0] not in [reqs[at] for at in run.short()]:
        place.grow(run)
        run.advance()
    assert place.cache.grow(reqs[0].hold, reqs[0].length)
    count = reqs[0].hold.count
    assert not run.add_page_each(place.cache, run.short())
    place.grow(run)
    assert reqs[0].hold.count == count and not run.short()


def test_a_request_that_returns_with_other_pages_is_a_new_one():
    place = Place(0)
    reqs = [place.begun(max_new_tokens=30) for _ in range(3)]
    run = InputBatch(reqs, PAGE)
    place.grow(run)
    run.table()
    run.advance()
    returning = reqs[-1]
    place.cache.release(returning.hold)
    place.begun()  # takes the pages that are free again
    returning.hold = place.cache.begin(returning.tokens.view(), 0)
    place.cache.grow(returning.hold, returning.length)
    again = InputBatch(list(reqs), PAGE, run)
    place.grow(again)
    same(again.table(), InputBatch(list(reqs), PAGE).table())


def test_what_is_watched():
    place = Place(1)
    reqs = [place.begun(max_new_tokens=9) for _ in range(4)]
    run = InputBatch(reqs, PAGE)
    assert run.watched([5, 5, 5, 5], []) == [0, 1, 2, 3]  # the front knows none of them yet
    for req in reqs:
        req.reported = True
    reqs[1].stages = [LatencySpan("prefill", 1.0)]  # to be told with its next token
    assert run.watched([5, 5, 5, 5], []) == [1]
    reqs[1].stages = []
    assert run.watched([5, 5, 5, 5], []) == []
    assert run.watched([5, 1, 5, 5], []) == [1]  # an end-of-sequence token
    assert run.watched([5, 5, 5, 5], [2]) == [2]
    run.leave([reqs[3]])
    assert run.watched([1, 5, 5, 5], []) == [0, 3]


@pytest.mark.parametrize(("sampling", "plain", "greedy"), [
    ({}, True, True), ({"temperature": 1.0}, True, False), ({"min_new_tokens": 5}, False, True),
    ({"frequency_penalty": 0.5}, False, True), ({"logit_bias": {3: 1.0}}, False, True)])
def test_plain_runs(sampling, plain, greedy):
    place = Place(2)
    run = InputBatch([place.begun(), place.begun(**sampling)], PAGE)
    assert (run.plain, run.greedy) == (plain, greedy)
    for _ in range(5):
        for req in run.reqs:
            req.take_pending(7)
            req.num_pending += 1
    following = InputBatch(list(run.reqs), PAGE, run)
    assert following.plain == (plain or "min_new_tokens" in sampling)


@pytest.mark.parametrize(("size", "at_once"), [(5, 1000), (8, 1000), (8, 4)])
def test_graph_inputs(size, at_once, monkeypatch):
    """Runs in turn, with padding, each for several steps, also where somebody else writes in between: a batch that is
    built row by row has the same."""
    place = Place(3)
    monkeypatch.setattr(decode_inputs, "_AT_ONCE", at_once)
    inputs = DecodeInputs(8, 8 * 40, 4000, CPU)
    for turn, count in enumerate((5, 2, 5)):
        reqs = [place.begun(max_new_tokens=99) for _ in range(count)]
        run = InputBatch(reqs, PAGE)
        for step in range(2 * PAGE):
            place.grow(run)
            if step == turn:
                inputs.tensors["kv_indices"].fill_(77)
                inputs.tensors["kv_indptr"].fill_(77)
                inputs.overwritten()
            host = inputs.fill(run.table(), size)
            rows = [Row([0], req.num_computed_tokens, req.hold.ids) for req in reqs]
            rows += [Row([0], 0, np.array([4000]))] * (size - count)
            wanted = build_forward_batch(rows, PAGE, CPU, True)
            for name in ("positions", "page_of_token", "offset_in_page", "kv_last_page_len", "kv_indptr", "kv_indices"):
                expected = getattr(wanted, name)
                assert torch.equal(inputs.tensors[name][:len(expected)], expected), name
            for name, array in host.items():
                assert np.array_equal(array, getattr(wanted, f"{name}_cpu")), name
            run.advance()
            for req in reqs:
                req.take_pending(7)


def test_a_runs_batch_is_the_one_built_row_by_row():
    place = Place(4)
    reqs = [place.begun() for _ in range(3)]
    run = InputBatch(reqs, PAGE)
    place.grow(run)
    built = build_run_batch(run.table(), torch.tensor([4, 5, 6]), CPU)
    wanted = build_forward_batch([Row([4 + i], req.num_computed_tokens, req.hold.ids) for i, req in enumerate(reqs)],
                                 PAGE, CPU, True)
    for field in dataclasses.fields(wanted):
        expected, found = getattr(wanted, field.name), getattr(built, field.name)
        if isinstance(expected, torch.Tensor | np.ndarray):
            assert np.array_equal(np.asarray(found), np.asarray(expected)), field.name


def test_runs_change_no_token(monkeypatch):
    """Requests join and end at different steps."""
    seen = []

    def answers(runs):
        found = {}

        def take(message):
            for output in message.items if isinstance(message, OutputBatch) else ():
                tokens, ended = found.setdefault(output.rid, ([], []))
                tokens += output.token_ids
                assert output.num_output_tokens == len(tokens)
                ended += [output.finish.reason] if output.finish else []

        if not runs:
            monkeypatch.setattr(input_batch, "_plain", lambda req: False)
        engine = dummy_engine.make(4000, 8, shape=dummy_engine.TINY, device="cpu")
        engine._parts.ledger._send = take
        batcher = engine._parts.batcher
        for batch, given, made in ((3, 20, 30), (2, 7, 9), (1, 16, 40), (3, 50, 5)):
            engine.start(batch, given, made)
            for _ in range(5):
                engine.step()
                places = batcher.places
                counted, places._left = places._left, None
                assert counted in (None, places.left)
                seen.append(counted)
        engine.finish()
        return found

    found = answers(True)
    assert [len(tokens) for tokens, _ in found.values()] == [30] * 3 + [9] * 2 + [40] + [5] * 3
    assert all(ended == ["length"] for _, ended in found.values())
    assert found == answers(False)
    assert len({*seen} - {None}) > 10  # the output that is left was counted on from step to step


def test_tokens_that_wait_in_a_list_are_seen_by_all():
    buffer = TokenBuffer([5, 6])
    assert (buffer.last, buffer.count, len(buffer)) == (6, 2, 2)
    before = buffer.view()
    for token_id in range(200):
        buffer.append(token_id)
        assert (buffer.last, buffer.count, len(buffer)) == (token_id, token_id + 3, token_id + 3)
        if token_id % 37 == 0:
            assert buffer.view(2).tolist() == list(range(token_id + 1))
    assert before.tolist() == [5, 6] and buffer.view(1, 4).tolist() == [6, 0, 1] and buffer.view(0, 999)[-1] == 199


def test_what_is_gained_stands_before_what_is_told():
    place, sent = Place(5), []
    ledger = RequestTracker(sent.append, eos_ids=frozenset(), vocab_size=1 << 31, max_request_tokens=100,
                            max_requests=9, timeout=1.0)
    reqs = [place.begun(max_new_tokens=30) for _ in range(3)]
    run = InputBatch(reqs, PAGE)
    positions = run.positions
    run.advance()
    for token_id in (7, 8):  # two steps' results in one turn
        ledger.gain_each(reqs[:2], run.gained([token_id] * 3, positions, [0, 1]))
        reqs[2].take_pending(token_id)
        ledger.gain(reqs[2], [token_id], None)
        positions = positions + 1
        for req in reqs:
            req.num_pending += 1
    ledger.flush()
    assert [(item.rid, item.token_ids, item.num_output_tokens) for message in sent for item in message.items] == [
        ("1", [7], 2), ("2", [7], 2), ("3", [7], 1), ("1", [8], 3), ("2", [8], 3), ("3", [8], 2)]
    for message in sent:
        assert decode_from_engine(encode(message)) == message
    assert [req.tokens.view(req.num_prompt_tokens).tolist() for req in reqs] == [[7, 8]] * 3


def test_tokens_stay_until_somebody_looks():
    """Four steps later the memory that they arrived in is another step's."""
    class Tokens:
        is_cuda = True

        def __init__(self, ids):
            self.ids = ids

        def __len__(self):
            return len(self.ids)

    class Slot:
        def send(self, tokens):
            self.ids = tokens.ids

        def wait(self, count):
            return self.ids[:count]

    with patch.object(sampled_tokens, "_Slot", Slot):
        steps = sampled_tokens.SampledTokens()
        made = [steps.of(Tokens([step, step + 1])) for step in range(11)]
    assert [one.token_ids() for one in made] == [[step, step + 1] for step in range(11)]
    assert made[3].wait().logprobs == [None, None]
