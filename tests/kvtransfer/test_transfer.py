"""One prefill and one decode rank over real sockets: the suite that every backend passes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from baton.common.api.errors import Aborted, Conflict, DeadlineExceeded, TransferFailed
from baton.common.api.messages import Logprobs
from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.messages import PrefillResult
from baton.kvtransfer.protocol.states import Phase
from baton.tests.kvtransfer.conftest import BACKENDS, wait_until


@pytest.fixture(params=BACKENDS)
def pair(request, make_pair):
    return make_pair(request.param)


def assert_pages(pair, dst, src):
    """The target pool holds source pages ``src`` in its pages ``dst``, and zeros elsewhere."""
    for source, target in zip(pair.source, pair.target):
        expected = np.zeros_like(target)
        expected[dst] = source[src]
        np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("receiver_first", [True, False])
def test_pages_and_result_arrive(pair, receiver_first):
    for call in (pair.reserve, pair.expect) if receiver_first else (pair.expect, pair.reserve):
        call(1)
    pair.until(1, Phase.RESERVED)
    assert pair.sender.first_page(1) == 0
    pair.push_all(1)
    assert pair.sender.phase(1) is Phase.WRITING
    result = PrefillResult(42, 3, Logprobs([42], [-0.5], [[(42, -0.5)]]), Logprobs([1, 2], [None, -1.0]))
    pair.sender.finish(1, result)
    pair.until(1, Phase.DONE)
    assert pair.receiver.result(1) == result
    assert_pages(pair, [5, 9, 2], [20, 21, 30])
    pair.sender.forget(1)
    pair.receiver.forget(1)
    assert pair.sender.counters["kv_bytes_sent"] == pair.receiver.counters["kv_bytes_received"] == 3 * 1536
    assert pair.sender.counters["kv_transfers_done"] == pair.receiver.counters["kv_transfers_done"] == 1


def test_pages_in_the_decode_cache_are_not_sent(pair):
    pair.reserve(1, first_page=2, page_ids=(7,))
    pair.expect(1)
    pair.until(1, Phase.RESERVED)
    assert pair.sender.first_page(1) == 2
    pair.push_all(1)
    pair.finish(1)
    pair.until(1, Phase.DONE)
    assert_pages(pair, [7], [30])


def test_a_whole_prompt_in_the_decode_cache_needs_only_the_result(pair):
    pair.reserve(1, first_page=3, page_ids=())
    pair.expect(1)
    pair.until(1, Phase.RESERVED)
    pair.push_all(1)
    pair.finish(1)
    pair.until(1, Phase.DONE)
    assert_pages(pair, [], [])


def test_chunks_and_groups_may_be_pushed_one_by_one(pair):
    pair.reserve(1)
    pair.expect(1)
    pair.until(1, Phase.RESERVED)
    for first, src in ((0, [20, 21]), (2, [30])):
        for group in range(2):
            pair.sender.push(1, group, first, np.array(src), None)
    pair.finish(1)
    pair.until(1, Phase.DONE)
    assert_pages(pair, [5, 9, 2], [20, 21, 30])


def test_many_rooms_at_once_and_a_room_used_again(pair):
    for _ in range(2):
        for room in range(10):
            pair.reserve(room, page_ids=(3 * room, 3 * room + 1, 3 * room + 2))
            pair.expect(room)
        for room in range(10):
            pair.until(room, Phase.RESERVED)
            pair.push_all(room, src=(room, room + 1, room + 2))
            pair.finish(room, token_id=room)
        for room in range(10):
            pair.until(room, Phase.DONE)
            assert pair.receiver.result(room).token_id == room
            pair.sender.forget(room)
            pair.receiver.forget(room)
    order = [room + i for room in range(10) for i in range(3)]
    for source, target in zip(pair.source, pair.target):
        np.testing.assert_array_equal(target[:30], source[order])


def test_writes_wait_for_the_event_of_their_forward(pair):
    class Event:
        happened = False

        def query(self):
            return self.happened

    event = Event()
    pair.reserve(1)
    pair.expect(1)
    pair.until(1, Phase.RESERVED)
    for group in range(2):
        pair.sender.push(1, group, 0, np.array([20, 21, 30]), event)
    pair.finish(1)
    time.sleep(0.1)
    assert_pages(pair, [], [])
    assert pair.receiver.phase(1) is Phase.RESERVED
    event.happened = True
    pair.until(1, Phase.DONE)
    assert_pages(pair, [5, 9, 2], [20, 21, 30])


@pytest.mark.parametrize("by", ["sender", "receiver"])
@pytest.mark.parametrize("progress", ["alone", "reserved", "pushed"])
def test_abort_fails_both_sides_with_its_error(pair, by, progress):
    endpoint = getattr(pair, by)
    if progress == "alone":
        (pair.expect if by == "sender" else pair.reserve)(1)
        pair.until(1, Phase.RESERVING if by == "sender" else Phase.RESERVED, endpoint=endpoint)
    else:
        pair.reserve(1)
        pair.expect(1)
        pair.until(1, Phase.RESERVED)
    if progress == "pushed":
        pair.push_all(1)
    endpoint.abort(1, Aborted("the client left"))
    endpoint.abort(1, Aborted("once more"))
    pair.until(1, Phase.FAILED, endpoint=endpoint)
    if progress == "alone":
        (pair.reserve if by == "sender" else pair.expect)(1)
    pair.until(1, Phase.FAILED)
    for each in (pair.sender, pair.receiver):
        assert isinstance(each.error(1), Aborted) and each.error(1).message == "the client left"
        each.forget(1)
    pair.transfer(1)


@pytest.mark.parametrize("met", [True, False])
@pytest.mark.parametrize("prefill_first", [True, False])
def test_a_room_that_decode_declines_fails_at_prefill_at_once(pair, met, prefill_first):
    """Its request was given up before it had pages, or before there was a connection to prefill."""
    if met:
        pair.transfer(1)
    info = pair.bootstrap.server.ranks.pop((0, 0, 0))
    if prefill_first:
        pair.expect(2)
    if met:
        pair.receiver.decline(2, pair.bootstrap.address, Aborted("the client left"))
    else:
        pair.reserve(2)
        time.sleep(0.05)
        pair.receiver.abort(2, Aborted("the client left"))
        pair.until(2, Phase.FAILED, endpoint=pair.receiver)
        pair.receiver.forget(2)
    pair.bootstrap.server.ranks[0, 0, 0] = info
    if not prefill_first:
        time.sleep(0.1)  # either comes first
        pair.expect(2)
    assert pair.until(2, Phase.FAILED, endpoint=pair.sender) < 2
    assert isinstance(pair.sender.error(2), Aborted)
    pair.sender.forget(2)
    pair.transfer(2)


def test_a_decline_without_a_connection_is_given_up(make_pair):
    pair = make_pair(disaggregation_bootstrap_timeout=0.3)
    pair.bootstrap.server.ranks.clear()
    pair.receiver.decline(1, pair.bootstrap.address, Aborted("the client left"))
    wait_until(lambda: pair.receiver._core.idle)


def test_pushes_and_results_for_a_failed_room_are_dropped(pair):
    pair.reserve(1)
    pair.expect(1)
    pair.until(1, Phase.RESERVED)
    pair.receiver.abort(1, Aborted("the client left"))
    pair.until(1, Phase.FAILED)
    pair.push_all(1)
    pair.finish(1)
    time.sleep(0.05)
    assert_pages(pair, [], [])
    assert pair.sender.phase(1) is pair.receiver.phase(1) is Phase.FAILED


def test_a_room_in_use_is_a_conflict(pair):
    pair.expect(1)
    with pytest.raises(Conflict, match="room 1 is in use"):
        pair.expect(1)
    pair.reserve(1)
    with pytest.raises(Conflict, match="room 1 is in use"):
        pair.reserve(1)
    other = pair.make_receiver(pair.target)
    pair.until(1, Phase.RESERVED)
    pair.reserve(1, receiver=other)
    pair.until(1, Phase.FAILED, endpoint=other)
    assert isinstance(other.error(1), Conflict)
    assert pair.sender.phase(1) is pair.receiver.phase(1) is Phase.RESERVED


@pytest.mark.parametrize("wrong", [{"digest": 78}, {"num_tokens": 11}])
@pytest.mark.parametrize("receiver_first", [True, False])
def test_different_prompts_are_refused_on_both_sides(pair, wrong, receiver_first):
    calls = [pair.reserve, lambda room: pair.expect(room, **wrong)]
    for call in calls if receiver_first else reversed(calls):
        call(1)
    pair.until(1, Phase.FAILED)
    for each in (pair.sender, pair.receiver):
        assert isinstance(each.error(1), TransferFailed)
        assert "read different prompts" in each.error(1).message


def test_the_same_address_with_a_restarted_prefill(pair):
    pair.transfer(1)
    pair.reserve(2)
    pair.until(2, Phase.RESERVED, endpoint=pair.receiver)
    pair.sender.close()
    pair.sender = pair.make_sender(pair.source)
    if pair.backend == "mooncake":  # its late writes may land until a successor answers, which a request looks up
        pair.transfer(4)
    assert pair.until(2, Phase.FAILED, endpoint=pair.receiver) < 3.5
    assert isinstance(pair.receiver.error(2), TransferFailed)
    pair.transfer(3)


def test_a_stale_route_is_looked_up_again(pair):
    """The bootstrap server still names the old instance when a request comes; its successor registers in a moment."""
    stale = pair.sender.info
    pair.sender.close()
    pair.reserve(1)
    assert pair.bootstrap.server.ranks[0, 0, 0] == stale
    time.sleep(0.3)
    assert pair.receiver.phase(1) is Phase.RESERVING
    pair.sender = pair.make_sender(pair.source)
    pair.expect(1)
    pair.until(1, Phase.RESERVED)


def test_a_restarted_decode_is_a_new_peer(pair):
    pair.transfer(1)
    pair.receiver.close()
    pair.receiver = pair.make_receiver(pair.target)
    pair.transfer(2)


@pytest.mark.parametrize("field, change", [
    ("head_dim", {"head_dim": 16}), ("page_size", {"page_size": 3}), ("num_layers", {"groups": (1, 1)}),
    ("dtype", {"dtype": "bfloat16"}), ("num_kv_heads", {"num_kv_heads": 1})])
def test_layouts_that_do_not_fit_are_refused_with_the_field(make_pair, field, change):
    pair = make_pair()
    values = {name: getattr(pair.sender.info.layout, name) for name in KVLayout.__struct_fields__} | change
    layout = KVLayout(**values)
    pool = [np.zeros((32, layout.group_page_bytes(g)), dtype=np.uint8) for g in range(len(layout.groups))]
    receiver = pair.make_receiver(pool, layout=layout)
    pages = layout.pages_for(10)
    pair.reserve(1, receiver=receiver, page_ids=tuple(range(pages)))
    pair.until(1, Phase.FAILED, endpoint=receiver)
    assert field in receiver.error(1).message


def test_another_backend_is_refused(make_pair):
    pair, other = make_pair("fake"), make_pair("nixl")
    pair.receiver.reserve(1, other.bootstrap.address, 77, 10, 0, np.array([1, 2, 3]))
    pair.until(1, Phase.FAILED, endpoint=pair.receiver)
    assert "backend is 'fake' here and 'nixl' there" in pair.receiver.error(1).message


def test_a_transfer_without_its_other_side_fails_by_its_deadline(make_pair):
    pair = make_pair(disaggregation_bootstrap_timeout=0.2)
    pair.expect(1)
    pair.reserve(2)
    assert 0.1 < pair.until(1, Phase.FAILED, endpoint=pair.sender) < 1
    assert isinstance(pair.sender.error(1), DeadlineExceeded)
    assert "decode did not reserve" in pair.sender.error(1).message
    pair.until(2, Phase.FAILED, endpoint=pair.receiver)
    assert isinstance(pair.receiver.error(2), DeadlineExceeded)
    assert "prefill was not sent this request" in pair.receiver.error(2).message


def test_a_stalled_transfer_fails_by_its_deadline(make_pair):
    pair = make_pair(kv_transfer_timeout=0.2)
    pair.reserve(1)
    pair.expect(1)
    pair.until(1, Phase.FAILED)
    for endpoint in (pair.sender, pair.receiver):
        assert isinstance(endpoint.error(1), DeadlineExceeded)


def test_an_unregistered_prefill_is_awaited_until_the_deadline(make_pair):
    pair = make_pair(disaggregation_bootstrap_timeout=0.6)
    info = pair.bootstrap.server.ranks.pop((0, 0, 0))
    pair.reserve(1)
    time.sleep(0.3)
    assert pair.receiver.phase(1) is Phase.RESERVING
    pair.bootstrap.server.ranks[0, 0, 0] = info
    pair.until(1, Phase.RESERVED, endpoint=pair.receiver)
    pair.bootstrap.server.ranks.pop((0, 0, 0))
    pair.sender.close()
    pair.until(1, Phase.FAILED, endpoint=pair.receiver)
    pair.reserve(2)
    pair.until(2, Phase.FAILED, endpoint=pair.receiver)
    assert isinstance(pair.receiver.error(2), DeadlineExceeded)
    assert "not all of its ranks have registered" in pair.receiver.error(2).message


def test_an_unreachable_bootstrap_server_fails_soon(make_pair):
    pair = make_pair(peer_timeout=0.3)
    pair.receiver.reserve(1, ("127.0.0.1", 9), 77, 10, 0, np.array([1, 2, 3]))
    assert pair.until(1, Phase.FAILED, endpoint=pair.receiver) < 2
    assert isinstance(pair.receiver.error(1), TransferFailed)
    assert "127.0.0.1:9 cannot be reached" in pair.receiver.error(1).message


def test_an_idle_pair_sleeps(pair):
    pair.transfer(1)
    pair.sender.forget(1)
    pair.receiver.forget(1)
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.1
