"""Another decode server takes over a request whose first one died: prefill sends its pages again, computing nothing."""

import numpy as np
import pytest

from baton.common.api.errors import Aborted
from baton.common.api.messages import Bootstrap, Generate
from baton.common.api.sampling import SamplingParams
from baton.common.engine.unified_scheduler import UnifiedScheduler
from baton.decode.rank import _make_scheduler as make_decode
from baton.prefill.rank import _make_scheduler as make_prefill
from baton.tests.helpers.tiers import in_host
from baton.tests.integration.transfer.test_relay_in_process import (  # noqa: F401 (fixtures)
    VOCAB,
    Side,
    bootstrap_port,
    bootstrap_server,
    checkpoint,
    run,
)
from baton.tests.kvtransfer.conftest import wait_until

LENGTHS = (3, 4, 30, 64, 70)  # within a page, a full one, several with and without a rest


class Fleet:
    """A prefill server and as many decode servers as a test uses up."""

    def __init__(self, folder, port, speculative=None, tiers=None):
        self.folder, self.port, self.transfers = folder, port, iter(range(1, 1000))
        self.speculative, self.tiers = speculative, tiers
        self.prefill = Side(folder, make_prefill, "prefill", port, "fake", chunk=23, max_total_tokens=512,
                            speculative=speculative, tiers=tiers)
        self.decodes = []
        self.launches = 0
        launch = self.prefill.scheduler.executor.launch

        def counted(*args):
            self.launches += 1
            return launch(*args)

        self.prefill.scheduler.executor.launch = counted

    def decode(self):
        self.decodes.append(Side(self.folder, make_decode, "decode", self.port, "fake", max_total_tokens=640,
                                 speculative=self.speculative, tiers=self.tiers))
        return self.decodes[-1]

    def connect(self, decode):
        """Open the way from prefill, as a router has it done before the first request."""
        receiver, prefill = decode.scheduler.receiver, ("127.0.0.1", self.port)
        receiver.connect(prefill)
        wait_until(lambda: receiver.connected(prefill) is not None)

    def start(self, prompt, decode, previous=None, sampling=None, rid=None, **fields):
        """Both halves of an attempt; returns prefill's request and the room."""
        self.prefill.take()
        room = next(self.transfers)
        sampling = sampling or SamplingParams(temperature=0.0, max_new_tokens=6)
        halves = []
        for side in (self.prefill, decode):
            meet = Bootstrap("127.0.0.1", self.port, room, previous)
            message = Generate(rid or f"r{room}", list(prompt), sampling, bootstrap=meet, **fields)
            halves.append(side.tracker.accept(message, 0.0))
            side.scheduler.add(halves[-1])
        return halves[0], room

    def until_computed(self, req, decode):
        """The pages are on their way, or there, and decode's scheduler has not seen them."""
        def computed():
            self.prefill.scheduler.step(0.0)
            if req.finish is None:
                decode.scheduler.step(0.0)
            return req.finish is not None
        wait_until(computed, 20)

    def kill(self, decode):
        """What it has received, nobody takes out."""
        decode.scheduler.receiver.close()
        self.decodes.remove(decode)

    def close(self):
        for side in (self.prefill, *self.decodes):
            side.scheduler.close()


@pytest.fixture(scope="module")
def fleet(checkpoint, bootstrap_port):  # noqa: F811
    fleet = Fleet(checkpoint, bootstrap_port)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def answer(checkpoint):  # noqa: F811
    def make(parts):
        return UnifiedScheduler(parts.batcher, parts.executor, parts.tracker, overlap=False)

    side = Side(checkpoint, make, "null", 0, "fake")

    def ask(prompt):
        side.start("one", prompt, max_new_tokens=6)
        run(side)
        outputs, _ = side.take()
        return [token for item in outputs for token in item.token_ids]

    return ask


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


def answered(fleet, decode):
    run(fleet.prefill, decode)
    outputs, failures = decode.take()
    assert not failures
    decode.assert_clean()
    fleet.prefill.assert_clean()
    return outputs


def tokens_in(outputs):
    return [token for item in outputs for token in item.token_ids]


def drain(fleet):
    """Decode's word of what it took over arrives."""
    def done():
        fleet.prefill.scheduler.step(0.0)
        return not len(fleet.prefill.scheduler.prompts.retained) and not len(fleet.prefill.cache.partial_pages)
    wait_until(done)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_transfer_that_is_done_is_sent_again(fleet, answer, length):
    prompt, first, second = prompt_of(length), fleet.decode(), fleet.decode()
    req, room = fleet.start(prompt, first)
    fleet.until_computed(req, first)
    wait_until(lambda: fleet.prefill.scheduler.step(0.0) or fleet.prefill.scheduler.idle, 20)
    fleet.kill(first)
    launches = fleet.launches
    fleet.start(prompt, second, previous=room)
    outputs = answered(fleet, second)
    assert fleet.launches == launches, "the prompt was computed again"
    assert outputs[0].num_cached_tokens == length
    assert tokens_in(outputs) == answer(prompt)
    drain(fleet)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("noticed", ["first by the router", "first by prefill"])
def test_a_transfer_that_broke_off_is_sent_again_while_its_writes_hang(fleet, answer, length, noticed):
    prompt, first, second = prompt_of(length, 1), fleet.decode(), fleet.decode()
    fleet.connect(first)  # which writes, too
    first.scheduler.receiver._backend.gate.clear()
    req, room = fleet.start(prompt, first)
    fleet.until_computed(req, first)
    if noticed == "first by the router":
        fleet.prefill.abort(req)
        fleet.prefill.take()
    else:
        fleet.kill(first)
        wait_until(lambda: fleet.prefill.scheduler.step(0.0) or f"r{room}" in fleet.prefill.take()[1])
    launches = fleet.launches
    fleet.start(prompt, second, previous=room)

    def started():
        fleet.prefill.scheduler.step(0.0)
        second.scheduler.step(0.0)
        return second.scheduler.unified.num_running
    wait_until(started)
    assert fleet.launches == launches, "the prompt was computed again"
    if noticed == "first by the router":
        fleet.kill(first)
    assert tokens_in(answered(fleet, second)) == answer(prompt)
    drain(fleet)


def test_another_attempt_may_have_the_same_id(fleet, answer):
    """A client's own id comes again with each attempt, also while the pages of the one before are still held."""
    prompt, decode = prompt_of(30, 9), fleet.decode()
    gate = decode.scheduler.receiver._backend.gate
    fleet.connect(decode)
    gate.clear()
    req, room = fleet.start(prompt, decode, rid="mine")
    fleet.until_computed(req, decode)
    for side, half in ((fleet.prefill, req), (decode, decode.tracker.live["mine"])):
        side.abort(half)
        side.take()
    assert len(fleet.prefill.scheduler.transfers) == len(decode.scheduler.transfers) == 1, "both wait for the writes"
    fleet.start(prompt, decode, previous=room, rid="mine")
    gate.set()
    assert tokens_in(answered(fleet, decode)) == answer(prompt)
    drain(fleet)


def test_the_first_token_and_what_is_told_of_it_stay_the_same(fleet):
    """Unseeded: a token that was drawn again would differ now and then."""
    sampling = SamplingParams(temperature=3.0, max_new_tokens=1)
    for seed in range(4):
        prompt, first, second = prompt_of(9, 2 + seed), fleet.decode(), fleet.decode()
        fields = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 2}
        req, room = fleet.start(prompt, first, sampling=sampling, **fields)
        fleet.until_computed(req, first)
        wait_until(lambda: fleet.prefill.scheduler.step(0.0) or fleet.prefill.scheduler.idle, 20)
        (told,) = fleet.prefill.take()[0]
        fleet.kill(first)
        fleet.start(prompt, second, previous=room, sampling=sampling, **fields)
        (again,) = answered(fleet, second)
        assert again.token_ids == told.token_ids and again.logprobs == told.logprobs
        assert again.prompt_logprobs == told.prompt_logprobs
        drain(fleet)


@pytest.mark.parametrize("other", ["no room named", "other sampling", "other prompt"])
def test_what_was_kept_is_for_the_same_request_only(fleet, answer, other):
    prompt, first, second = prompt_of(30, 9), fleet.decode(), fleet.decode()
    req, room = fleet.start(prompt, first)
    fleet.until_computed(req, first)
    wait_until(lambda: fleet.prefill.scheduler.step(0.0) or fleet.prefill.scheduler.idle, 20)
    fleet.kill(first)
    launches = fleet.launches
    if other == "other prompt":
        prompt = [*prompt[:-1], (prompt[-1] + 1) % VOCAB]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=6, seed=3) if other == "other sampling" else None
    fleet.start(prompt, second, previous=None if other == "no room named" else room, sampling=sampling)
    assert tokens_in(answered(fleet, second)) == answer(prompt)
    assert fleet.launches > launches
    fleet.prefill.scheduler.prompts.retained.drop(room)
    drain(fleet)


def test_it_ends_with_the_weights_that_it_was_computed_with(fleet, answer):
    """Even where the same prompt has been computed anew meanwhile, so that all of its pages are there."""
    prompt, first, second, third = prompt_of(64, 12), fleet.decode(), fleet.decode(), fleet.decode()
    req, room = fleet.start(prompt, first)
    fleet.until_computed(req, first)
    wait_until(lambda: fleet.prefill.scheduler.step(0.0) or fleet.prefill.scheduler.idle, 20)
    fleet.kill(first)
    peers, model = fleet.prefill.scheduler.peers, fleet.prefill.scheduler.sender.info.model
    peers.leave()
    fleet.prefill.cache.flush()
    peers.join(model)
    fleet.start(prompt, second)
    assert tokens_in(answered(fleet, second)) == answer(prompt)
    reused = fleet.prefill.scheduler.counters["reused_prompts"]
    fleet.start(prompt, third, previous=room)
    assert tokens_in(answered(fleet, third)) == answer(prompt)
    assert fleet.prefill.scheduler.counters["reused_prompts"] == reused
    drain(fleet)


def test_memory_that_others_need_ends_it(fleet, answer):
    prompt, first, second = prompt_of(30, 10), fleet.decode(), fleet.decode()
    req, room = fleet.start(prompt, first)
    fleet.until_computed(req, first)
    wait_until(lambda: fleet.prefill.scheduler.step(0.0) or fleet.prefill.scheduler.idle, 20)
    fleet.kill(first)
    tail = fleet.prefill.scheduler.prompts.retained._prompts[room].partial_page
    assert tail.page is not None
    fleet.start(prompt_of(511, 11), second, sampling=SamplingParams(temperature=0.0, max_new_tokens=1))
    answered(fleet, second)
    assert tail.page is None
    launches = fleet.launches
    fleet.start(prompt, second, previous=room)
    assert tokens_in(answered(fleet, second)) == answer(prompt)
    assert fleet.launches > launches
    drain(fleet)


@pytest.fixture
def tiered(checkpoint):  # noqa: F811
    with bootstrap_server() as port:
        fleet = Fleet(checkpoint, port, tiers=in_host(0.01))
        yield fleet
        fleet.close()


def lose_first(fleet, prompt):
    """An attempt whose decode server dies with all pages; returns its room."""
    first = fleet.decode()
    req, room = fleet.start(prompt, first)
    fleet.until_computed(req, first)
    wait_until(lambda: fleet.prefill.scheduler.step(0.0) or fleet.prefill.scheduler.idle, 20)
    fleet.kill(first)
    return room


@pytest.mark.parametrize("length", LENGTHS)
def test_a_server_with_host_memory_sends_it_again(tiered, answer, length):
    prompt = prompt_of(length, 14)
    room, second = lose_first(tiered, prompt), tiered.decode()
    launches = tiered.launches
    tiered.start(prompt, second, previous=room)
    outputs = answered(tiered, second)
    assert tiered.launches == launches and outputs[0].num_cached_tokens == length
    assert tokens_in(outputs) == answer(prompt)
    drain(tiered)


@pytest.mark.parametrize("length", LENGTHS)
def test_what_left_for_host_memory_is_loaded_and_its_last_page_computed(tiered, answer, length):
    prompt = prompt_of(length, 15)
    room, second = lose_first(tiered, prompt), tiered.decode()
    tiered.start(prompt_of(511, 16), second, sampling=SamplingParams(temperature=0.0, max_new_tokens=1))
    answered(tiered, second)
    assert tiered.prefill.scheduler.prompts.retained._prompts[room].partial_page is None or (
        tiered.prefill.scheduler.prompts.retained._prompts[room].partial_page.page is None)
    launches, loads = tiered.launches, tiered.prefill.scheduler.batcher.loads
    loaded = loads.num_loaded
    tiered.start(prompt, second, previous=room)
    outputs = answered(tiered, second)
    assert tokens_in(outputs) == answer(prompt)
    assert tiered.launches == launches + 1, "one step computes what host memory has not"
    assert loads.num_loaded - loaded == (length - 1) // 4
    assert outputs[0].extras.usage.loaded.host == outputs[0].num_cached_tokens == (length - 1) // 4 * 4
    drain(tiered)


def test_time_ends_it_and_so_does_a_client_that_left(fleet):
    for seed, leaves in ((12, False), (13, True)):
        prompt, first = prompt_of(30, seed), fleet.decode()
        if leaves:
            fleet.connect(first)
            first.scheduler.receiver._backend.gate.clear()
        req, room = fleet.start(prompt, first)
        fleet.until_computed(req, first)
        if leaves:
            first.scheduler.receiver.abort(room, Aborted("The client left."))
            wait_until(lambda: fleet.prefill.scheduler.step(0.0) or fleet.prefill.take()[1])
            first.scheduler.receiver._backend.gate.set()
        wait_until(lambda: fleet.prefill.scheduler.step(0.0) or fleet.prefill.scheduler.idle, 20)
        if not leaves:
            assert len(fleet.prefill.cache.partial_pages) == 1
            fleet.prefill.scheduler.step(1000.0)
        assert len(fleet.prefill.cache.partial_pages) == 0 and not len(fleet.prefill.scheduler.prompts.retained)
        assert not fleet.prefill.scheduler.sender._core.awaiting_ack
        fleet.prefill.assert_clean()
        fleet.kill(first)
        fleet.prefill.take()


def test_a_request_that_leaves_while_decode_has_no_pages_for_it_ends_at_prefill_too(fleet):
    first = fleet.decode()
    hold = first.cache.new_private_table()
    assert first.cache.allocate_slots(hold, 640)
    req, room = fleet.start(prompt_of(30, 14), first)
    for _ in range(3):
        fleet.prefill.scheduler.step(0.0)
        first.scheduler.step(0.0)
    assert first.scheduler.num_waiting == fleet.prefill.scheduler.num_waiting == 1
    first.abort(first.tracker.live[f"r{room}"])
    failures = {}

    def told():
        fleet.prefill.scheduler.step(0.0)
        failures.update(fleet.prefill.take()[1])
        return failures
    assert wait_until(told) < 4
    assert failures[req.rid].code == "request_aborted"
    first.cache.release(hold)
    run(fleet.prefill)
    fleet.prefill.assert_clean()
    fleet.kill(first)
