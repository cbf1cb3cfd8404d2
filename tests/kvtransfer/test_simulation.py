"""Random schedules of the protocol, and proof that they find what they are there for: each rule is broken once.

``python -m baton.tests.bench.kv_simulation`` runs 100,000 of them, and a single one by its seed.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.kvtransfer.protocol import states
from baton.kvtransfer.protocol.states import Event, Phase
from baton.kvtransfer.protocol.timing import Timing
from baton.kvtransfer.receiver import receiver_core, receiver_state
from baton.kvtransfer.sender import sender_core
from baton.tests.kvtransfer.simulation import COMMON, RARE, SHAPES, World, run_seed


def test_random_schedules_keep_every_promise():
    worlds = [run_seed(seed) for seed in range(2000)]
    assert sum(world.completed for world in worlds) > 1000 and sum(world.failed for world in worlds) > 1000
    assert sum(world.early_completions for world in worlds) > 200


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.sampled_from(SHAPES), st.sampled_from(["sampled", "off"]),
       st.lists(st.tuples(st.sampled_from(COMMON * 6 + RARE), st.integers(0, 1023)), min_size=1, max_size=80))
def test_schedules_that_hypothesis_thinks_of(shape, checksum, schedule):
    """It shrinks what it finds to the shortest schedule that shows it."""
    World(*shape, checksum=checksum).run(schedule)


def free_at_abort(monkeypatch):
    """Decode frees pages when it aborts, and not when the writer has ended."""
    monkeypatch.setitem(states.RECEIVER, (Phase.RESERVED, Event.FAIL), Phase.FAILED)


def settle_with_writes_in_flight(monkeypatch, phase):
    """Prefill takes the writes of rooms in ``phase`` for ended."""
    settle = sender_core.SenderCore._finish_if_drained

    def unmatched(self, transfer, now):
        in_flight, transfer.in_flight = transfer.in_flight, 0 if transfer.phase is phase else transfer.in_flight
        settle(self, transfer, now)
        transfer.in_flight = in_flight

    monkeypatch.setattr(sender_core.SenderCore, "_finish_if_drained", unmatched)


def stop_before_writes_have_ended(monkeypatch):
    """Prefill says Stopped while writes are in flight."""
    settle_with_writes_in_flight(monkeypatch, Phase.ABORTING)


def result_before_writes_have_ended(monkeypatch):
    settle_with_writes_in_flight(monkeypatch, Phase.WRITING)


def no_quarantine(monkeypatch):
    """A sender that is cut off counts as drained at once."""
    end_session = receiver_core.ReceiverCore._end_session
    monkeypatch.setattr(receiver_core.ReceiverCore, "_end_session", lambda self, session, error, now, *, drained_at:
                        end_session(self, session, error, now, drained_at=now))


def no_time_for_what_lingers(monkeypatch):
    """Decode trusts in writes that were given up, whatever the backend says of them."""
    begin = receiver_core.ReceiverCore.__init__
    monkeypatch.setattr(receiver_core.ReceiverCore, "__init__",
                        lambda self, *args, quarantine_seconds, **named: begin(self, *args, **named))


def no_lease(monkeypatch):
    """Prefill writes for as long as it likes after it was last heard, and gives up no session."""
    monkeypatch.setattr(Timing, "lease", property(lambda self: 1e9))
    tick = sender_core.SenderCore.tick

    def patient(self, now, stalled=0.0):
        for session in self.sessions.open.values():
            session.confirmed = now
        tick(self, now, stalled)

    monkeypatch.setattr(sender_core.SenderCore, "tick", patient)


def one_result_is_enough(monkeypatch):
    """Decode does not wait for the other prefill ranks that write to it."""
    on_drained = receiver_core.ReceiverCore._on_drained

    def hasty(self, transfer, session_id, now):
        if transfer.phase is Phase.RESERVED:
            for other in transfer.writers.pending.keys() - {session_id}:
                self.connections.sessions[other].transfers.pop(transfer.room, None)
            transfer.writers.pending = {session_id: None}
        on_drained(self, transfer, session_id, now)

    monkeypatch.setattr(receiver_core.ReceiverCore, "_on_drained", hasty)


def any_stamp_will_do(monkeypatch):
    """A result of the room's use before counts for this one."""
    about = receiver_core.ReceiverCore._on_transfer_message

    def trusting(self, session, message, now):
        if (transfer := session.transfers.get(message.room)) is not None and type(message).__name__ == "Stopped":
            message = type(message)(message.room, transfer.reserve.stamp)
        about(self, session, message, now)

    monkeypatch.setattr(receiver_core.ReceiverCore, "_on_transfer_message", trusting)
    peer_abort = sender_core.SenderCore._on_abort

    def twice(self, session, abort, now):
        peer_abort(self, session, abort, now)
        self.sessions.send(session.id, sender_core.m.Stopped(abort.room, abort.stamp))

    monkeypatch.setattr(sender_core.SenderCore, "_on_abort", twice)


def acknowledged_by_any_request(monkeypatch):
    """Prefill takes decode's word on one request for another's."""
    monkeypatch.setattr(sender_core.SenderCore, "is_acknowledged", lambda self, room: True)


def flags_are_believed_before_they_are_set(monkeypatch):
    """Decode takes an early result for its completion."""
    monkeypatch.setattr(receiver_state.RecvTransfer, "take_completed", lambda self, flags: [
        (session_id, self.early_results.pop(session_id)) for session_id in list(self.early_results)])


def deaf_to_failure(monkeypatch):
    """Decode hears of no failure at prefill, and waits."""
    about = receiver_core.ReceiverCore._on_transfer_message

    def deaf(self, session, message, now):
        if type(message).__name__ == "Result":
            about(self, session, message, now)

    monkeypatch.setattr(receiver_core.ReceiverCore, "_on_transfer_message", deaf)
    monkeypatch.setattr(receiver_core.ReceiverCore, "_check_deadlines", lambda self, transfer, now: None)


@pytest.mark.parametrize("break_a_rule", [
    free_at_abort, stop_before_writes_have_ended, result_before_writes_have_ended, no_quarantine, no_lease,
    no_time_for_what_lingers,
    one_result_is_enough, any_stamp_will_do, acknowledged_by_any_request, flags_are_believed_before_they_are_set,
    deaf_to_failure])
def test_a_broken_rule_is_found_and_the_seed_shows_it_again(monkeypatch, break_a_rule):
    break_a_rule(monkeypatch)
    for seed in range(2000):
        try:
            run_seed(seed)
        except AssertionError as error:
            found = str(error)
            break
    else:
        pytest.fail("2,000 schedules did not find it")
    with pytest.raises(AssertionError, match=f"schedule {seed}: ") as again:
        run_seed(seed)
    assert str(again.value) == found
