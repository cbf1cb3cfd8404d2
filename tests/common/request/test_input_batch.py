"""The persistent decode batch: its arrays equal those built from its requests, whichever join and leave."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from baton.common.api.messages import Generate, LatencySpan, OutputBatch, decode_from_engine, encode
from baton.common.api.sampling import SamplingParams
from baton.common.forward.forward_batch import ForwardBatch, Row, build_forward_batch
from baton.common.kvcache.manager import KVCacheManager
from baton.common.request.extras import RowState, row_extras
from baton.common.request.input_batch import InputBatch
from baton.common.request.req import Req
from baton.common.request.token_buffer import TokenBuffer
from baton.common.runner.cuda_graphs import staging
from baton.common.runner.cuda_graphs.decode_inputs import DecodeInputs
from baton.common.sampling import sampled_tokens
from baton.common.scheduler.batcher import Batcher
from baton.common.scheduler.request_tracker import RequestTracker
from baton.tests.bench import dummy_engine

PAGE = 4
CPU = torch.device("cpu")


class Requests:
    """Requests whose prompts are computed, over a cache of pages."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.cache = KVCacheManager(4096, PAGE)
        self.count = 0

    def make_computed(self, **sampling):
        self.count += 1
        params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": int(self.rng.integers(2, 40))} | sampling)
        prompt = self.rng.integers(0, 100, int(self.rng.integers(1, 60))).tolist()
        req = Req.from_message(Generate(str(self.count), prompt, params), eos_ids=frozenset({1}), now=0.0, timeout=1.0)
        req.page_table = self.cache.match_prefix(req.tokens.view(), 0)
        assert self.cache.allocate_slots(req.page_table, len(prompt))
        req.num_computed_tokens, req.num_pending = len(prompt), 1
        return req

    def allocate(self, batch):
        rows = batch.rows_without_page()
        if self.rng.random() < 0.5 and rows and batch.pages.append_pages(self.cache, rows):
            assert not batch.rows_without_page()
        for row in batch.rows_without_page():
            assert self.cache.allocate_slots(batch.reqs[row].page_table, batch.reqs[row].length)
            batch.pages.update_capacity(row)


def step_before(reqs):
    """A step that has sampled the requests' pending tokens."""
    return SimpleNamespace(rows_version=0, number=1, sample_of={req: row for row, req in enumerate(reqs)})


def assert_equal(table, expected):
    for name, array in table._asdict().items():
        if name in ("pages_version", "max_q_len", "further", "verifies", "mask"):
            continue
        other = getattr(expected, name)
        assert array.dtype == other.dtype and np.array_equal(array, other), name


@pytest.mark.parametrize("seed", range(3))
def test_arrays_are_those_of_the_requests(seed):
    requests = Requests(seed)
    reqs = [requests.make_computed() for _ in range(6)]
    batch, num_batches, joined = None, 0, 6
    for _ in range(150):
        if batch is None or batch.removed_rows or reqs != batch.reqs:
            batch, num_batches = InputBatch(list(reqs), PAGE, batch), num_batches + 1
        requests.allocate(batch)
        fresh = InputBatch(list(reqs), PAGE)
        assert_equal(batch.columns(), fresh.columns())
        assert np.array_equal(batch.remaining, fresh.remaining) and batch.last_step_rows() == fresh.last_step_rows()
        assert batch.last_tokens(reused_on_device=False) == fresh.last_tokens(reused_on_device=False)
        assert batch.unfinished(reqs) == reqs and fresh.stop_ids == batch.stop_ids
        assert [(chunk.req, chunk.start, chunk.stop) for chunk in batch.step(step_before(reqs)).chunks] == [
            (req, req.num_computed_tokens, req.length) for req in reqs]
        ended = [reqs[i] for i in batch.last_step_rows()]
        batch.advance()
        for req in reqs:  # the step's results are processed, and the prompts of new requests
            while req.num_pending:
                req.append_pending(int(requests.rng.integers(2, 99)))
        batch.record_tokens([req.tokens.last for req in reqs])
        assert all(req.complete for req in ended)
        if requests.rng.random() < 0.2 and len(reqs) > 2:  # one is retracted, and may come back with other pages
            ended.append(reqs[int(requests.rng.integers(len(reqs)))])
        for req in ended:
            batch.remove([req])
            if req in reqs:
                reqs.remove(req)
            requests.cache.release(req.page_table)
        if ended and not ended[-1].complete and requests.rng.random() < 0.5:
            req = ended[-1]
            req.page_table = requests.cache.match_prefix(req.tokens.view(), 0)
            assert requests.cache.allocate_slots(req.page_table, req.length)
            reqs.append(req)
        while len(reqs) < 3 or requests.rng.random() < 0.15:
            reqs.append(requests.make_computed())
            joined += 1
    assert num_batches > 20 and joined > 12


def test_requests_that_enter_new_pages_together():
    requests = Requests(3)
    reqs = [requests.make_computed(max_new_tokens=30) for _ in range(5)]
    for req in reqs[1:]:  # all at the same offset in their pages
        req.num_computed_tokens = reqs[0].num_computed_tokens
        req.tokens = TokenBuffer(list(range(reqs[0].length - 1)))
        req.num_prompt_tokens = reqs[0].num_prompt_tokens
        requests.cache.release(req.page_table)
        req.page_table = requests.cache.new_private_table()
        assert requests.cache.allocate_slots(req.page_table, req.num_computed_tokens)
    batch = InputBatch(reqs, PAGE)
    for _ in range(3 * PAGE):
        assert len(batch.rows_without_page()) in (0, 5)
        if short := batch.rows_without_page():
            assert batch.pages.append_pages(requests.cache, short)
        assert_equal(batch.columns(), InputBatch(list(reqs), PAGE).columns())
        batch.advance()
        for req in reqs:
            req.append_pending(7)


def test_pages_allocated_elsewhere_are_not_appended_again():
    """Allocation while other requests are retracted bypasses the batch."""
    requests = Requests(5)
    reqs = [requests.make_computed(max_new_tokens=30) for _ in range(2)]
    batch = InputBatch(reqs, PAGE)
    while reqs[0] not in [reqs[row] for row in batch.rows_without_page()]:
        requests.allocate(batch)
        batch.advance()
    assert requests.cache.allocate_slots(reqs[0].page_table, reqs[0].length)
    count = reqs[0].page_table.count
    assert not batch.pages.append_pages(requests.cache, batch.rows_without_page())
    requests.allocate(batch)
    assert reqs[0].page_table.count == count and not batch.rows_without_page()


def test_a_request_that_returns_with_other_pages_is_a_new_one():
    requests = Requests(0)
    reqs = [requests.make_computed(max_new_tokens=30) for _ in range(3)]
    batch = InputBatch(reqs, PAGE)
    requests.allocate(batch)
    batch.pages.slots(batch.positions)
    batch.advance()
    returning = reqs[-1]
    requests.cache.release(returning.page_table)
    requests.make_computed()  # takes the pages that are free again
    returning.page_table = requests.cache.match_prefix(returning.tokens.view(), 0)
    requests.cache.allocate_slots(returning.page_table, returning.length)
    again = InputBatch(list(reqs), PAGE, batch)
    requests.allocate(again)
    assert_equal(again.columns(), InputBatch(list(reqs), PAGE).columns())


def test_rows_to_check():
    requests = Requests(1)
    reqs = [requests.make_computed(max_new_tokens=9) for _ in range(4)]
    batch = InputBatch(reqs, PAGE)
    assert batch.rows_to_check([5, 5, 5, 5], []) == [0, 1, 2, 3]  # none has sent an output yet
    for req in reqs:
        req.reported = True
    reqs[1].spans = [LatencySpan("prefill", 1.0)]  # to be reported with its next token
    assert batch.rows_to_check([5, 5, 5, 5], []) == [1]
    reqs[1].spans = []
    assert batch.rows_to_check([5, 5, 5, 5], []) == []
    assert batch.rows_to_check([5, 1, 5, 5], []) == [1]  # an end-of-sequence token
    assert batch.rows_to_check([5, 5, 5, 5], [2]) == [2]
    batch.remove([reqs[3]])
    assert batch.rows_to_check([1, 5, 5, 5], []) == [0, 3]


@pytest.mark.parametrize(("sampling", "plain", "greedy"), [
    ({}, True, True), ({"temperature": 1.0}, True, False), ({"min_new_tokens": 5}, False, True),
    ({"frequency_penalty": 0.5}, False, True), ({"logit_bias": {3: 1.0}}, False, True)])
def test_plain_batches(sampling, plain, greedy):
    requests = Requests(2)
    batch = InputBatch([requests.make_computed(), requests.make_computed(**sampling)], PAGE)
    assert (not batch.extra_index, batch.all_greedy) == (plain, greedy)
    for _ in range(5):
        for req in batch.reqs:
            req.append_pending(7)
            req.num_pending += 1
    following = InputBatch(list(batch.reqs), PAGE, batch)
    extras = [row_extras(req, RowState(req.length)) for req in following.reqs]
    assert not extras[0] and (not extras[1]) == (plain or "min_new_tokens" in sampling)


@pytest.mark.parametrize(("size", "at_once"), [(5, 1000), (8, 1000), (8, 4)])
def test_graph_inputs(size, at_once, monkeypatch):
    """Batches one after the other, with padding, each for several steps: a batch that is built row by row has the same
    inputs."""
    requests = Requests(3)
    monkeypatch.setattr(staging, "INITIAL_PINNED_INDICES", at_once)
    inputs = DecodeInputs(8, 8 * 40, 4000, CPU)
    for count in (5, 2, 5):
        reqs = [requests.make_computed(max_new_tokens=99) for _ in range(count)]
        batch = InputBatch(reqs, PAGE)
        for _ in range(2 * PAGE):
            requests.allocate(batch)
            host = inputs.fill(batch.columns(), size)
            rows = [Row([0], req.num_computed_tokens, req.page_table.ids) for req in reqs]
            rows += [Row([0], 0, np.array([4000]))] * (size - count)
            built = build_forward_batch(rows, PAGE, CPU)
            for name in ("positions", "page_of_token", "offset_in_page", "kv_last_page_len", "kv_indptr", "kv_indices"):
                expected = getattr(built, name)
                assert torch.equal(inputs.tensors[name][:len(expected)], expected), name
            for name, array in host.items():
                assert np.array_equal(array, getattr(built, f"{name}_cpu")), name
            batch.advance()
            for req in reqs:
                req.append_pending(7)


def test_the_forward_batch_equals_the_one_built_row_by_row():
    requests = Requests(4)
    reqs = [requests.make_computed() for _ in range(3)]
    batch = InputBatch(reqs, PAGE)
    requests.allocate(batch)
    built = ForwardBatch.from_columns(batch.columns(), torch.tensor([4, 5, 6]), CPU)
    rows = [Row([4 + i], req.num_computed_tokens, req.page_table.ids) for i, req in enumerate(reqs)]
    row_by_row = build_forward_batch(rows, PAGE, CPU)
    for field in dataclasses.fields(row_by_row):
        expected, actual = getattr(row_by_row, field.name), getattr(built, field.name)
        if isinstance(expected, torch.Tensor | np.ndarray):
            assert np.array_equal(np.asarray(actual), np.asarray(expected)), field.name


def test_persistent_batches_change_no_token(monkeypatch):
    """Requests join and end at different steps."""
    seen = []

    def answers(persistent):
        answers_of = {}

        def take(message):
            for output in message.rows() if isinstance(message, OutputBatch) else ():
                tokens, ended = answers_of.setdefault(output.rid, ([], []))
                tokens += output.token_ids
                ended += [output.finish.reason] if output.finish else []

        if not persistent:
            current = Batcher._current_input_batch

            def built_anew(batcher):
                batcher._input_batch = None
                return current(batcher)

            monkeypatch.setattr(Batcher, "_current_input_batch", built_anew)
        engine = dummy_engine.make(4000, 8, shape=dummy_engine.TINY, device="cpu")
        engine._parts.tracker._send = take
        batcher = engine._parts.batcher
        for num_requests, num_prompt, num_output in ((3, 20, 30), (2, 7, 9), (1, 16, 40), (3, 50, 5)):
            engine.start(num_requests, num_prompt, num_output)
            for _ in range(5):
                engine.step()
                queues = batcher.queues
                counted, queues._remaining = queues._remaining, None
                assert counted in (None, queues.remaining)
                seen.append(counted)
        engine.finish()
        return answers_of

    expected = answers(True)
    assert [len(tokens) for tokens, _ in expected.values()] == [30] * 3 + [9] * 2 + [40] + [5] * 3
    assert all(ended == ["length"] for _, ended in expected.values())
    assert expected == answers(False)
    assert len({*seen} - {None}) > 10  # the remaining output was updated from step to step


def test_token_buffer_reads_tokens_not_yet_in_the_array():
    buffer = TokenBuffer([5, 6])
    assert (buffer.last, buffer.count, len(buffer)) == (6, 2, 2)
    before = buffer.view()
    for token_id in range(200):
        buffer.append(token_id)
        assert (buffer.last, buffer.count, len(buffer)) == (token_id, token_id + 3, token_id + 3)
        if token_id % 37 == 0:
            assert buffer.view(2).tolist() == list(range(token_id + 1))
    assert before.tolist() == [5, 6] and buffer.view(1, 4).tolist() == [6, 0, 1] and buffer.view(0, 999)[-1] == 199


def test_rows_of_two_steps_are_one_message():
    requests, sent = Requests(5), []
    tracker = RequestTracker(sent.append, eos_ids=frozenset(), vocab_size=1 << 31, max_request_tokens=100,
                             max_requests=9, timeout=1.0)
    reqs = [requests.make_computed(max_new_tokens=30) for _ in range(3)]
    batch = InputBatch(reqs, PAGE)
    batch.advance()
    for token_id in (7, 8):  # two steps' results in one iteration
        batch.append_tokens([token_id] * 2, [0, 1])
        tracker.add_new_tokens(batch.rids[:2], [token_id] * 2)
        reqs[2].append_pending(token_id)
        tracker.add_output(reqs[2], [token_id], None)
        for req in reqs:
            req.num_pending += 1
    tracker.flush()
    (message,) = sent
    assert [(row.rid, row.token_ids) for row in message.rows()] == [
        ("1", [7]), ("2", [7]), ("3", [7]), ("1", [8]), ("2", [8]), ("3", [8])]
    assert message.counts is None and list(message.extras) == [2]
    for message in sent:
        assert decode_from_engine(encode(message)) == message
    assert [req.tokens.view(req.num_prompt_tokens).tolist() for req in reqs] == [[7, 8]] * 3


def test_tokens_on_the_host_stay_until_they_are_read():
    """Four steps later the memory that they arrived in is another step's."""
    class Tokens:
        is_cuda = True

        def __init__(self, ids):
            self.ids = ids

        def __len__(self):
            return len(self.ids)

    class Buffer:
        def copy_from(self, tokens):
            self.ids = tokens.ids

        def wait(self, count):
            return self.ids[:count]

    with patch.object(sampled_tokens, "_PinnedBuffer", Buffer):
        steps = sampled_tokens.SampledTokenBuffers()
        made = [steps.copy(Tokens([step, step + 1])) for step in range(11)]
    assert [one.token_ids() for one in made] == [[step, step + 1] for step in range(11)]
    assert made[3].token_ids() == [3, 4]
