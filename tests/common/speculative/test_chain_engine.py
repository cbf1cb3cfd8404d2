"""Chain steps through whole engines: answers are those of plain decoding, and acceptance is that of other steps."""

from __future__ import annotations

from functools import cache

import pytest

from baton.common.request.step_input import StepInput
from baton.kernels.tuning.policy import set_batch_invariant
from baton.tests.helpers.acceptance_parity import BASE, ROOMY, SCENARIOS, algorithm_flags, measure, questions
from baton.tests.helpers.chains_on_cpu import chains_on_cpu, num_following
from baton.tests.helpers.flag_engine import Answer, FlagEngine
from baton.tests.helpers.mixed_questions import Mixed, chunks, differences

FEW = ("--max-running-requests", "12")
"""So few at once that requests join others that decode, and leave them."""
DETERMINISTIC = ("--enable-deterministic-inference",)
WITHOUT_EXTRAS = ("greedy", "seeded", "top-p, top-k, min-p", "stop tokens", "no end")
"""Kinds of requests whose chain steps follow each other."""
COUNT = 40


@cache
def mixed(follows: bool) -> list[Mixed]:
    """Requests of all kinds, or those whose steps follow each other."""
    [asked] = chunks(7, 6 * COUNT, 6 * COUNT)
    if follows:
        asked = [each for each in asked if each.kind in WITHOUT_EXTRAS and not each.question.fields]
    return asked[:COUNT]


def answers(follows: bool, *flags: str) -> list[Answer]:
    try:
        return FlagEngine(*BASE, *ROOMY, *FEW, *flags).answers([each.question for each in mixed(follows)])
    finally:
        set_batch_invariant(False)


@cache
def plain(follows: bool, *flags: str) -> list[Answer]:
    return answers(follows, *flags)


def check(follows: bool, algorithm: str, *flags: str) -> list[StepInput]:
    """Compares answers with those of plain decoding; returns the chain steps."""
    deterministic = flags == DETERMINISTIC
    expected = plain(follows, *(flags if deterministic else ()))
    with chains_on_cpu() as steps:
        found = answers(follows, *algorithm_flags(algorithm), *flags)
    places = differences(expected, found, bitwise=deterministic)
    assert not places, [(place, mixed(follows)[place].kind, expected[place], found[place]) for place in places]
    return steps


FLAGS = [("EAGLE3", ()), ("NEXTN", ()), ("STANDALONE", ()), ("EAGLE3", DETERMINISTIC),
         ("EAGLE3", ("--speculative-num-steps", "6")), ("NEXTN", ("--speculative-num-steps", "1")),
         ("STANDALONE", ("--max-total-tokens", "1024")), ("EAGLE3", ("--max-total-tokens", "1024", "--page-size", "4")),
         ("NEXTN", ("--max-total-tokens", "768", "--page-size", "1")), ("EAGLE3", ("--chunked-prefill-size", "64"))]


def cases(*fast: int) -> list[object]:
    """All of ``FLAGS``; those but the ``fast`` ones are slow."""
    return [pytest.param(*each, id=" ".join([each[0], *each[1]]), marks=() if place in fast else pytest.mark.slow)
            for place, each in enumerate(FLAGS)]


@pytest.mark.parametrize(("algorithm", "flags"), cases(0, 6, 8))
def test_steps_that_follow_each_other(algorithm, flags):
    """Greedy and seeded requests, which join, end within runs of tokens, and are retracted where pages are short."""
    steps = check(True, algorithm, *flags)
    assert num_following(steps) > 20


@pytest.mark.parametrize(("algorithm", "flags"), cases(3))
def test_mixed_requests(algorithm, flags):
    """Penalties, grammars and logprobs, too, for which the host waits."""
    assert len(check(False, algorithm, *flags)) > 10


@pytest.mark.slow
def test_other_steps_between():
    """A mixed chunk is no chain step, nor is any where steps do not overlap."""
    check(False, "EAGLE3", "--chunked-prefill-size", "64", "--enable-mixed-chunk")
    assert not num_following(check(False, "EAGLE3", "--disable-overlap-schedule"))


FAST = {("unified", "EAGLE3"), ("PD", "NEXTN")}


@pytest.mark.parametrize(("scenario", "algorithm"), [
    pytest.param(name, algorithm, id=f"{name}, {algorithm}",
                 marks=() if (name, algorithm) in FAST else pytest.mark.slow)
    for name in SCENARIOS for algorithm in ("EAGLE3", "NEXTN", "STANDALONE")])
def test_chain_steps_accept_what_they_should(scenario, algorithm):
    with chains_on_cpu() as steps:
        measure(algorithm, SCENARIOS[scenario], questions(9)).check()
    assert scenario == "TP 2" or num_following(steps) > 5
