"""Another decode server gets the draft's pages and the same drafts of a prompt that prefill computed for the first."""

import pytest

from baton.tests.helpers.hash_drafter import HashDrafter
from baton.tests.integration.faults.test_failover_in_process import (  # noqa: F401 (fixtures)
    LENGTHS,
    Fleet,
    answer,
    answered,
    bootstrap_port,
    checkpoint,
    drain,
    prompt_of,
    tokens_in,
    wait_until,
)


@pytest.fixture(params=["HASH", "PLAIN_HASH"])
def drafting_fleet(request, checkpoint, bootstrap_port):  # noqa: F811
    fleet = Fleet(checkpoint, bootstrap_port, request.param)
    yield fleet
    fleet.close()


def test_the_draft_is_sent_again(drafting_fleet, answer, monkeypatch):  # noqa: F811
    """Its slots are compared by the second decode server's drafter, whose first step accepts the drafts."""
    fleet = drafting_fleet
    for length in LENGTHS:
        prompt, first, second = prompt_of(length), fleet.decode(), fleet.decode()
        wanted = answer(prompt)
        monkeypatch.setattr(HashDrafter, "answers", {"a": wanted})
        fleet.prefill.drafter.errs = False
        req, room = fleet.start(prompt, first, rid="a")
        fleet.until_computed(req, first)
        wait_until(lambda: fleet.prefill.scheduler.step(0.0) or fleet.prefill.scheduler.idle, 20)
        fleet.kill(first)
        launches, computed = fleet.launches, len(fleet.prefill.drafter.prompts)
        fleet.start(prompt, second, previous=room, rid="a")
        assert tokens_in(answered(fleet, second)) == wanted
        assert (launches, computed) == (fleet.launches, len(fleet.prefill.drafter.prompts)), "it was computed again"
        drafting = second.scheduler.batcher.drafting
        assert drafting.num_steps == 1 and drafting.num_accepted == 3 and not second.drafter.prompts
        assert second.drafter.checked >= length
        drain(fleet)
