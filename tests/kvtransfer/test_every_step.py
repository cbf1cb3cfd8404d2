"""Each fault, before and after each step of one transfer: what the random schedules reach by chance, in order.

Whatever struck, and when: the room ends on both sides, no late write arrives, no page leaks, and the next request is
answered.
"""

from __future__ import annotations

import pytest

from baton.kvtransfer.protocol.states import Phase
from baton.tests.kvtransfer.simulation import World

ROOM, NEXT_ROOM = 2, 1
CASES = (((1, 1, 0.0, "off"), "expect", "reserve"), ((1, 2), "reserve", "expect"))  # world, and which side comes first
FAULTS = [("abort_prefill", ROOM), ("abort_decode", ROOM), ("decline", ROOM), ("cut", 0), ("cut", 8 + 32),
          ("kill_prefill", 0), ("kill_prefill", 255), ("kill_decode", 0), ("stop", 0), ("outage", 8), ("fail_write", 0),
          ("repeat", 0), ("repeat", 2), ("repeat", 4)]


def script(first: str, second: str) -> list[tuple[str, int]]:
    """One transfer, in steps: a message on each connection, a chunk, the posting of its writes, the landing of each."""
    ranks = [("run_rank", 0), ("run_rank", 1), ("run_rank", 3)]
    to_sender, to_receiver = [("deliver", 0), ("deliver", 2)], [("deliver", 1), ("deliver", 3)]
    chunk = [("push", 6 * 5 + ROOM), ("post", 0), ("land", 0), ("land", 0)]
    return [(first, ROOM), *ranks, (second, ROOM), *ranks,
            *to_sender, *to_receiver, *to_receiver, *to_sender, *to_sender, *chunk, *chunk, *chunk,
            ("finish", ROOM), ("run_rank", 0), *to_receiver, ("verify", 1), ("verify", 1),
            ("poll_decode", 0), ("poll_prefill", 0)]


def phases(world: World) -> set[tuple[str, Phase]]:
    sides = (("sender", world.prefill), ("receiver", world.decode))
    return {(side, core.transfers[ROOM].phase) for side, group in sides for core in group.cores
            if ROOM in core.transfers}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault)))
def test_a_fault_at_each_step(fault):
    struck = set()
    for shape, first, second in CASES:
        steps = script(first, second)
        for place in range(len(steps) + 1):
            world = World(*shape)
            for name, n in steps[:place]:
                getattr(world, name)(n)
                world.settle()
            struck |= phases(world)
            world.run([fault, *steps[place:]])
            answered = world.completed
            world.run([("meet", NEXT_ROOM)])
            assert world.completed == answered + 1, f"no service after {fault} at step {place} of {shape}"
    live = {Phase.RESERVING, Phase.RESERVED, Phase.DONE}
    assert struck >= {("receiver", phase) for phase in live} | {("sender", phase) for phase in live | {Phase.WRITING}}
