"""The parts of a step with drafts."""

from __future__ import annotations

import pytest

from baton.common.bench.client.draft_timer import DraftTimer


class Parts:
    """A runner, an executor, a drafter and a planner whose calls take known times."""

    def __init__(self, on_device):
        self.now = 0.0
        self.runner = Runner(self, on_device)
        self.executor = Executor(self)
        self.drafting = Planner(self)

    def take(self, seconds):
        self.now += seconds


class Runner:
    def __init__(self, parts, on_device):
        self.parts, self.drafter = parts, Drafter(parts) if on_device else None

    def step(self):
        self.parts.take(10)
        return "logits"

    def verify_chains(self):
        self.parts.take(20)

    def draft_chains(self):
        self.parts.take(5)


class Drafter:
    def __init__(self, parts):
        self.parts = parts

    def run(self):
        self.parts.take(2)


class Executor:
    def __init__(self, parts):
        self.parts = parts

    def launch(self, *, captured=False):
        if captured:
            self.parts.runner.verify_chains()
            self.parts.take(0.5)
            self.parts.runner.draft_chains()
            return "launched"
        found = self.parts.runner.step()
        self.parts.take(0.5)
        return found


class Planner:
    def __init__(self, parts):
        self.parts = parts

    def plan_decode(self):
        self.parts.take(3)


@pytest.mark.parametrize(("on_device", "draft"), [(True, 2), (False, 3)])
def test_parts_add_up_to_the_step(on_device, draft):
    parts = Parts(on_device)
    timer = DraftTimer(lambda: parts.take(1), lambda: parts.now)
    for _ in range(2):
        with timer.timing(parts.runner, parts.executor, parts.drafting):
            parts.drafting.plan_decode()
            assert parts.executor.launch() == "logits"
            if on_device:
                parts.runner.drafter.run()
    waits = 1  # for the device, at the end of each part
    assert timer.seconds == {"draft": 2 * (draft + waits), "verify": 2 * (10 + waits), "accept": 2 * (0.5 + waits)}
    assert "step" not in vars(parts.runner) and "launch" not in vars(parts.executor)


def test_parts_of_captured_steps():
    parts = Parts(on_device=True)
    timer = DraftTimer(lambda: parts.take(1), lambda: parts.now)
    with timer.timing(parts.runner, parts.executor, parts.drafting):
        assert parts.executor.launch(captured=True) == "launched"
    assert timer.seconds == {"draft": 5 + 1, "verify": 20 + 1, "accept": 0.5 + 1}
