from __future__ import annotations

import itertools

import pytest

from baton.kvtransfer.protocol.states import RECEIVER, SENDER, TRANSITIONS, Event, InvalidTransition, Phase, step

SENDER_EXPECTED = {
    "FAILED": "WRITE>FAILED FAIL>FAILED",
    "ABORTING": "WRITE>ABORTING FAIL>ABORTING DRAINED>FAILED",
    "RESERVING": "JOIN>RESERVED FAIL>FAILED",
    "RESERVED": "WRITE>WRITING COMPLETE>DONE FAIL>ABORTING",
    "WRITING": "WRITE>WRITING COMPLETE>DONE FAIL>ABORTING",
    "DONE": "FAIL>DONE",
}
RECEIVER_EXPECTED = {
    "FAILED": "FAIL>FAILED",
    "ABORTING": "FAIL>ABORTING DRAINED>FAILED COMPLETE>FAILED",
    "RESERVING": "PUBLISH>RESERVED FAIL>FAILED",
    "RESERVED": "COMPLETE>DONE FAIL>ABORTING",
    "WRITING": "",
    "DONE": "FAIL>DONE",
}


@pytest.mark.parametrize("table, expected", [(SENDER, SENDER_EXPECTED), (RECEIVER, RECEIVER_EXPECTED)],
                         ids=["sender", "receiver"])
def test_every_pair(table, expected):
    for phase, event in itertools.product(Phase, Event):
        allowed = dict(pair.split(">") for pair in expected[phase.name].split())
        if event.name in allowed:
            assert step(table, phase, event).name == allowed[event.name]
        else:
            with pytest.raises(InvalidTransition, match=f"{event.name} in {phase.name}"):
                step(table, phase, event)


@pytest.mark.parametrize("table", TRANSITIONS.values(), ids=TRANSITIONS.keys())
def test_terminal_phases_are_never_left(table):
    for (phase, _), after in table.items():
        assert not phase.terminal or after is phase


@pytest.mark.parametrize("table", TRANSITIONS.values(), ids=TRANSITIONS.keys())
def test_a_shared_destination_is_freed_only_by_proof(table):
    """Whoever may be writing, or be written to, ends in FAILED after ABORTING."""
    for (phase, event), after in table.items():
        if after is Phase.FAILED and not phase.terminal and phase is not Phase.RESERVING:
            assert phase is Phase.ABORTING and event in (Event.DRAINED, Event.COMPLETE)


def test_minimum_over_ranks_reads_least_advanced_or_failed():
    assert min(Phase.DONE, Phase.WRITING, Phase.RESERVED) is Phase.RESERVED
    assert min(Phase.DONE, Phase.RESERVING, Phase.ABORTING) is Phase.ABORTING
    assert min(Phase.ABORTING, Phase.FAILED) is Phase.FAILED
