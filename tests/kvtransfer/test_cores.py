"""The corners of the protocol that a random schedule seldom reaches, one by one, with the clock in our hands."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.common.api.errors import Aborted, InvalidRequest, PeerFailed, from_code
from baton.common.kvcache.layout import KVLayout
from baton.common.serving.web import error_response
from baton.kvtransfer import expiring
from baton.kvtransfer.protocol import messages as m
from baton.kvtransfer.protocol.states import Phase
from baton.kvtransfer.protocol.timing import Timing
from baton.kvtransfer.receiver import receiver_core, receiver_state
from baton.kvtransfer.sender import sender_core, sender_state

LAYOUT = KVLayout(groups=(1,), num_kv_heads=1, head_dim=1, page_size=1, dtype="float32")
TIMING = Timing(bootstrap_timeout=30.0, transfer_timeout=120.0, peer_timeout=3.0)
DECODE = m.RankInfo("decode", "", 0, 1, LAYOUT, "simulated")
PREFILL = m.RankInfo("prefill", "tcp://prefill", 0, 1, LAYOUT, "simulated")
ADDRESS = ("prefill", 8998)


def sent(core) -> list:
    """The messages among the effects so far; clears the effects."""
    messages = [e.message for e in core.effects if isinstance(e, (sender_state.Send, receiver_state.Send))]
    core.effects.clear()
    return messages


@pytest.fixture
def sender() -> sender_core.SenderCore:
    """With one session, ``b"s"``, confirmed at time 10."""
    core = sender_core.SenderCore(PREFILL, TIMING)
    core.receive(b"s", m.Hello(DECODE, "prefill", 8, b""), 10.0)
    (admit,) = core.effects
    core.sessions.admitted(admit.session, "peer", 10.0)
    core.receive(b"s", m.Pong(10.0), 10.0)
    core.effects.clear()
    return core


def reserve(room=1, stamp=5, tokens=2, first_page=0, page_ids=(3, 4)) -> m.Reserve:
    return m.Reserve(room, stamp, 77, tokens, first_page, m.pack_page_ids(np.array(page_ids, dtype=np.int64)))


def writing(sender: sender_core.SenderCore) -> None:
    sender.expect(1, 77, 2, 10.0)
    sender.receive(b"s", reserve(), 10.0)
    sender.push(1, 0, 0, np.array([0, 1]), None)


def take(sender: sender_core.SenderCore, now: float) -> int:
    return len(sender.queue.take(now, lambda event: True))


def test_a_lease_ends_and_a_fresh_pong_renews_it(sender):
    writing(sender)
    assert take(sender, 11.6) == 0
    sender.receive(b"s", m.Pong(11.5), 11.7)
    assert take(sender, 11.7) == 1


def test_a_pong_that_waited_grants_nothing(sender):
    writing(sender)
    sender.receive(b"s", m.Pong(10.5), 15.0)
    assert take(sender, 15.0) == 0
    sender.tick(15.0)
    assert sender.transfers[1].phase is Phase.FAILED


def test_a_pong_from_the_future_grants_no_more_than_one_of_now(sender):
    writing(sender)
    sender.receive(b"s", m.Pong(1e9), 10.0)
    assert take(sender, 11.6) == 0


def test_a_silent_peer_is_noticed_within_the_peer_timeout(sender, receiver):
    """By a tick that comes as late as ticks do, too."""
    writing(sender)
    for core in (sender, receiver):
        core.tick(12.88)
        assert core.transfers[1].phase > Phase.ABORTING
        core.tick(12.88 + TIMING.tick)
        assert core.transfers[1].phase <= Phase.ABORTING and "silent for 3 s" in core.transfers[1].error.message


def test_time_with_writes_in_flight_is_counted_once(sender):
    writing(sender)
    sender.push(1, 0, 0, np.array([0, 1]), None)
    writes = sender.queue.take(10.5, lambda event: True)
    sender.push(1, 0, 0, np.array([0, 1]), None)
    for write, now in zip([*writes, *sender.queue.take(10.75, lambda event: True)], (11.0, 11.25, 11.75)):
        sender.written(write, True, now)
    assert sender.counters["kv_write_seconds"] == 1.25
    sender.push(1, 0, 0, np.array([0, 1]), None)
    sender.receive(b"s", m.Pong(12.5), 12.5)
    (write,) = sender.queue.take(13.0, lambda event: True)
    sender.written(write, False, 13.5)
    assert sender.counters["kv_write_seconds"] == 1.75


def test_our_own_stall_is_not_the_peers_silence(sender):
    sender.tick(20.0, stalled=9.0)
    assert b"s" in sender.sessions.open
    sender.tick(24.0)
    assert b"s" not in sender.sessions.open


def test_an_abort_for_an_earlier_use_of_a_room_is_answered_and_harmless(sender):
    writing(sender)
    sender.receive(b"s", m.Abort(1, 4, "request_aborted", "old"), 10.0)
    assert sent(sender) == [m.Stopped(1, 4)]
    assert sender.transfers[1].phase is Phase.WRITING


def test_an_unknown_session_is_answered_gone(sender):
    sender.receive(b"stranger", reserve(), 10.0)
    assert isinstance(sent(sender)[0], m.Gone)
    assert sender.counters["kv_messages_dropped"] == 1


def test_a_repeated_reserve_is_dropped(sender):
    writing(sender)
    sender.receive(b"s", reserve(), 10.0)
    assert sent(sender) == [] and sender.transfers[1].phase is Phase.WRITING


def test_a_reserve_that_comes_again_after_its_room_has_ended_is_not_the_next_one(sender):
    writing(sender)
    sender.receive(b"s", m.Abort(1, 5, "request_aborted", "left"), 10.0)
    sender.forget(1)
    sent(sender)
    sender.receive(b"s", reserve(), 10.0)
    assert sent(sender) == [] and not sender.rendezvous.unmatched
    sender.receive(b"s", reserve(stamp=6), 10.0)
    assert list(sender.rendezvous.unmatched) == [(1, 0)]


@pytest.mark.parametrize("bad, words", [
    ({"page_ids": (3,)}, "1 pages from page 0 on for a prompt of 2 pages"),
    ({"page_ids": (3, 8)}, "outside its pool of 8"),
    ({"page_ids": (3, -1)}, "outside its pool of 8"),
    ({"first_page": 3, "page_ids": ()}, "0 pages from page 3"),
    ({"first_page": -1, "page_ids": (1, 2, 3)}, "from page -1"),
])
def test_a_destination_that_cannot_be_is_refused(sender, bad, words):
    sender.receive(b"s", reserve(**bad), 10.0)
    abort, stopped = sent(sender)
    assert words in abort.message and stopped == m.Stopped(1, 5)
    assert not sender.rendezvous.unmatched


def test_early_destinations_are_bounded(sender, monkeypatch):
    monkeypatch.setattr(expiring, "MAX_WAITING", 3)
    for room in range(4):
        sender.receive(b"s", reserve(room=room, stamp=room), 10.0)
    sender.tick(10.0)
    sender.effects.popleft()  # the Ping
    assert [type(message) for message in sent(sender)] == [m.Abort, m.Stopped]
    assert list(sender.rendezvous.unmatched) == [(1, 0), (2, 0), (3, 0)]


def test_a_new_session_of_the_same_receiver_ends_the_old_one(sender):
    writing(sender)
    sender.receive(b"t", m.Hello(DECODE, "prefill", 8, b""), 10.0)
    assert sender.transfers[1].phase is Phase.FAILED
    assert isinstance(sender.effects[0].message, m.Gone) and isinstance(sender.effects[1], sender_state.Dismiss)


def test_hello_for_an_earlier_instance_is_refused_as_restarted(sender):
    sender.receive(b"t", m.Hello(DECODE, "prefill of yesterday", 8, b""), 10.0)
    assert sent(sender) == [m.Refused("the prefill server was restarted", restarted=True)]


@pytest.fixture
def receiver() -> receiver_core.ReceiverCore:
    """With room 1 published on a welcomed session, at time 10."""
    core = receiver_core.ReceiverCore(DECODE, TIMING, 8)
    core.reserve(1, ADDRESS, 77, 2, 0, np.array([3, 4]), 10.0)
    core.connect_to_ranks(ADDRESS, [PREFILL], 10.0)
    core.receive(link_of(core), m.Welcome("prefill"), 10.0)
    core.effects.clear()
    return core


def link_of(core: receiver_core.ReceiverCore) -> bytes:
    return next(iter(core.connections.sessions))


def test_the_end_of_an_earlier_use_of_a_room_is_not_the_end_of_this_one(receiver):
    session, old = link_of(receiver), receiver.transfers[1].reserve.stamp
    receiver.abort(1, Aborted("left"), 10.0)
    receiver.receive(session, m.Result(1, old, "prefill", m.PrefillResult(7, 0)), 10.0)
    assert receiver.transfers[1].phase is Phase.FAILED
    receiver.forget(1)
    receiver.reserve(1, ADDRESS, 77, 2, 0, np.array([3, 4]), 10.0)
    receiver.receive(session, m.Stopped(1, old), 10.0)
    receiver.receive(session, m.Result(1, old, "prefill", m.PrefillResult(7, 0)), 10.0)
    assert receiver.transfers[1].phase is Phase.RESERVED
    assert receiver.counters["kv_messages_dropped"] == 2


def test_a_result_of_another_instance_is_dropped(receiver):
    stamp = receiver.transfers[1].reserve.stamp
    receiver.receive(link_of(receiver), m.Result(1, stamp, "impostor", m.PrefillResult(7, 0)), 10.0)
    assert receiver.transfers[1].phase is Phase.RESERVED


def test_a_closed_link_holds_the_pages_until_the_writer_has_given_up(receiver):
    session = link_of(receiver)
    receiver.receive(session, m.Ping(11.0), 11.0)
    receiver.disconnected(session, 11.2)
    assert receiver.transfers[1].phase is Phase.ABORTING
    receiver.tick(14.4)
    assert receiver.transfers[1].phase is Phase.ABORTING
    receiver.tick(14.5)
    assert receiver.transfers[1].phase is Phase.FAILED


def test_a_silent_link_holds_the_pages_for_as_long_as_its_connection_stands(receiver):
    session = link_of(receiver)
    receiver.tick(13.1)
    assert receiver.transfers[1].phase is Phase.ABORTING
    assert [type(message) for message in sent(receiver)] == [m.Abort]
    receiver.receive(session, m.Ping(12.0), 500.0)
    assert sent(receiver) == [], "a Pong would confirm the session"
    receiver.tick(1000.0)
    assert receiver.transfers[1].phase is Phase.ABORTING
    receiver.receive(session, m.Stopped(1, receiver.transfers[1].reserve.stamp), 1000.0)
    assert receiver.transfers[1].phase is Phase.FAILED
    receiver.tick(1000.1)
    assert not receiver.connections.sessions and isinstance(receiver.effects[-1], receiver_state.Close)


def test_a_restarted_sender_is_looked_up_again(receiver):
    receiver.receive(link_of(receiver), m.Gone("shut down"), 10.0)
    receiver.reserve(2, ADDRESS, 77, 2, 0, np.array([5, 6]), 10.0)
    assert isinstance(receiver.effects[-1], receiver_state.Lookup)
    receiver.connect_to_ranks(ADDRESS, [PREFILL], 10.0)
    receiver.receive(link_of(receiver), m.Refused("the prefill server was restarted", restarted=True), 10.0)
    assert receiver.transfers[2].phase is Phase.RESERVING
    receiver.tick(10.1)
    assert isinstance(receiver.effects[-1], receiver_state.Lookup)


@pytest.mark.parametrize("host, endpoint, expected", [
    ("10.0.0.7", "tcp://10.0.0.8:5", "tcp://10.0.0.8:5"), ("10.0.0.7", "tcp://0.0.0.0:5", "tcp://10.0.0.7:5"),
    ("fd00::7", "tcp://[::]:5", "tcp://[fd00::7]:5")])
def test_a_sender_that_listens_everywhere_is_reached_at_its_bootstrap_address(host, endpoint, expected):
    core = receiver_core.ReceiverCore(DECODE, TIMING, 8)
    core.reserve(1, (host, 8998), 77, 2, 0, np.array([3, 4]), 10.0)
    core.connect_to_ranks((host, 8998), [m.msgspec.structs.replace(PREFILL, endpoint=endpoint)], 10.0)
    assert core.effects[1].endpoint == expected


def test_messages_survive_the_wire_and_anything_else_does_not():
    result = m.Result(1, 2, "i", m.PrefillResult(3, 4))
    assert m.decode_to_receiver(m.encode(result)) == result
    for frame in (b"", b"\xc1", m.encode(reserve()), b"\x80"):
        with pytest.raises(m.msgspec.MsgspecError):
            m.decode_to_receiver(frame)
    assert m.unpack_page_ids(m.pack_page_ids(np.array([0, 2**31 - 1]))).tolist() == [0, 2**31 - 1]


def ranked(dp_rank: int, dp_size: int = 2) -> m.RankInfo:
    return msgspec.structs.replace(PREFILL, instance=f"prefill{dp_rank}", dp_rank=dp_rank, dp_size=dp_size)


def test_a_room_leads_to_one_data_parallel_rank_of_the_sender():
    core = receiver_core.ReceiverCore(DECODE, TIMING, 8)
    pages = np.array([3, 4])
    for room, named in ((4, None), (5, None), (6, 1), (7, 2)):
        core.reserve(room, ADDRESS, 77, 2, 0, pages, 10.0, named)
    core.connect_to_ranks(ADDRESS, [ranked(0), ranked(1)], 10.0)
    sessions = {session.dp_rank: session for session in core.connections.sessions.values()}
    core.effects.clear()
    for dp_rank in (0, 1):
        core.receive(sessions[dp_rank].id, m.Welcome(f"prefill{dp_rank}"), 10.0)
    sent = {(effect.session, effect.message.room) for effect in core.effects
            if isinstance(effect, receiver_state.Send) and isinstance(effect.message, m.Reserve)}
    assert sent == {(sessions[0].id, 4), (sessions[1].id, 5), (sessions[1].id, 6)}
    error = core.transfers[7].error
    assert "no data-parallel rank 2, only 2" in error.message and error.status == 400
    assert core.transfers[7].phase is Phase.FAILED


@pytest.mark.parametrize("fields", [
    {"tp_size": 0}, {"tp_size": 10**9}, {"rank": 1}, {"rank": -1}, {"dp_size": 0}, {"pp_rank": 2},
    {"layout": {"page_size": 0}}, {"layout": {"num_kv_heads": 0}}, {"layout": {"groups": []}},
    {"layout": {"groups": [1, -1]}}, {"layout": {"scales": [[1.0, 1.0]] * 2}}, {"layout": {"windows": [4, 4]}}])
def test_a_rank_that_cannot_be_is_unreadable(fields):
    """Comparing it with ours would divide by zero, look beyond a tuple's end, or never end."""
    description = msgspec.to_builtins(DECODE)
    layout = description["layout"] | fields.pop("layout", {})
    info = description | fields | {"layout": layout}
    hello = msgspec.to_builtins(m.Hello(DECODE, "prefill", 8, b"")) | {"info": info}
    with pytest.raises(msgspec.ValidationError):
        m.decode_to_sender(msgspec.msgpack.encode(hello))


@pytest.mark.parametrize("message", [m.Abort(1, 5, "internal_error:non_finite_logits", "NaN"),
                                     m.Decline(1, "internal_error:non_finite_logits", "NaN")])
def test_what_fails_in_the_peer_is_blamed_on_it(message):
    assert type(message.error) is PeerFailed and message.error.to_openai()["error"]["code"] == "non_finite_logits"
    again = from_code(message.error.wire_code, "NaN")
    assert type(again) is PeerFailed and error_response(again).headers["X-Baton-Failed"] == "peer"
    refused = m.Abort(1, 5, "invalid_request", "too long").error
    assert type(refused) is InvalidRequest and "X-Baton-Failed" not in error_response(refused).headers
