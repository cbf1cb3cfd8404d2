"""The table of a pair's phases: what it has, and that the relay raises for what it has not."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from baton.router.relay.pair import PairCall, PairRelay
from baton.router.relay.pair_states import (
    IDLE,
    OPENING,
    PHASES,
    REFUSING,
    RELAYING,
    RESUMING,
    Action,
    CallActions,
    InvalidTransition,
)

RUNNING = (OPENING, RESUMING, RELAYING, REFUSING)
EVENTS = ("accepted", "refused", "ended", "lost")


def actions(call: CallActions) -> set[Action]:
    return {getattr(call, event) for event in EVENTS}


def test_an_attempt_starts_when_no_call_runs_and_can_always_be_cancelled():
    assert {phase.name for phase in PHASES if phase.start is not Action.IMPOSSIBLE} == {"IDLE"}
    assert all(phase.cancel is Action.STOP for phase in PHASES)


def test_every_loss_of_a_running_call_is_handled():
    for phase in RUNNING:
        assert phase.prefill.lost in (Action.FAIL, Action.NOTE)
        assert phase.decode.lost is Action.FAIL


def test_prefill_cannot_spoil_what_decode_has_begun():
    assert actions(RELAYING.prefill) == {Action.IGNORE, Action.NOTE}


def test_no_error_response_follows_the_beginning_of_a_stream():
    for phase in (RESUMING, RELAYING):
        assert Action.RETRY_OR_REFUSE not in actions(phase.prefill) | actions(phase.decode)


IMPOSSIBLE = [(phase, role, event) for phase in PHASES for role in ("prefill", "decode") for event in EVENTS
              if getattr(getattr(phase, role), event) is Action.IMPOSSIBLE]


def test_what_cannot_happen():
    assert {(phase.name, role, event) for phase, role, event in IMPOSSIBLE} == {
        *(("IDLE", role, event) for role in ("prefill", "decode") for event in EVENTS),
        *((name, "decode", "ended") for name in ("OPENING", "RESUMING")),
        *(("RELAYING", "decode", event) for event in ("accepted", "refused")),
        *(("REFUSING", role, event) for role in ("prefill", "decode") for event in ("accepted", "refused"))}


def happen(relay: PairRelay, call: PairCall, event: str) -> None:
    if event == "ended":
        relay.on_call_end(call, True)
    elif event == "lost":
        relay.on_call_lost(call, Mock())
    else:
        facts = SimpleNamespace(status=200 if event == "accepted" else 400)
        relay.on_call_head(call, Mock(facts=facts, starts_stream=True))


@pytest.mark.parametrize(("phase", "role", "event"), IMPOSSIBLE, ids=lambda value: getattr(value, "name", value))
def test_what_cannot_happen_raises(phase, role, event):
    relay = PairRelay(Mock(), Mock(), Mock())
    relay._phase = phase
    relay._prefill, relay._decode = (PairCall(relay, role, Mock(), Mock()) for role in ("prefill", "decode"))
    with pytest.raises(InvalidTransition, match=f"{role} {event} in {phase.name}"):
        happen(relay, relay._prefill if role == "prefill" else relay._decode, event)


def test_only_an_idle_relay_starts():
    relay = PairRelay(Mock(), Mock(), Mock())
    assert relay._phase is IDLE
    relay._phase = OPENING
    with pytest.raises(AssertionError):
        relay.start()
