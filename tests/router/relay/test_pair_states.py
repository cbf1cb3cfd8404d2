"""The table of a pair's phases: what it has, and that it raises for what it has not."""

from __future__ import annotations

import pytest

from baton.router.relay.pair_states import DECODE_EVENTS, PREFILL_EVENTS, TABLE, Action, Event, InvalidTransition, Phase

RUNNING = (Phase.OPENING, Phase.RESUMING, Phase.RELAYING, Phase.REFUSING)


def test_an_attempt_starts_when_no_call_runs_and_can_always_be_cancelled():
    assert {phase for phase in Phase if (phase, Event.START) in TABLE} == {Phase.IDLE}
    assert all(TABLE[phase, Event.CANCEL] is Action.STOP for phase in Phase)


def test_every_loss_of_a_running_call_is_handled():
    for phase in RUNNING:
        assert TABLE[phase, Event.PREFILL_LOST] in (Action.FAIL, Action.NOTE)
        assert TABLE[phase, Event.DECODE_LOST] is Action.FAIL


def test_prefill_cannot_spoil_what_decode_has_begun():
    assert {TABLE[Phase.RELAYING, event] for event in PREFILL_EVENTS} == {Action.IGNORE, Action.NOTE}


def test_no_error_response_follows_the_beginning_of_a_stream():
    actions = {TABLE.get((phase, event)) for phase in (Phase.RESUMING, Phase.RELAYING) for event in Event}
    assert Action.RETRY_OR_REFUSE not in actions


@pytest.mark.parametrize(("phase", "event"), [
    (Phase.OPENING, Event.START), (Phase.OPENING, Event.DECODE_ENDED), (Phase.RELAYING, Event.DECODE_ACCEPTED),
    *((Phase.IDLE, event) for event in (*PREFILL_EVENTS, *DECODE_EVENTS))])
def test_what_cannot_happen_raises(phase, event):
    with pytest.raises(InvalidTransition, match=f"{event.name} in {phase.name}"):
        TABLE[phase, event]
