"""Speculative decoding accepts as much however an engine comes to a verify step, and answers as plain decoding does."""

import dataclasses

import pytest

from baton.tests.bench import speculation_oracle
from baton.tests.helpers.acceptance_parity import ALGORITHMS, SCENARIOS, TREES, Parity, measure, questions
from baton.tests.helpers.flag_engine import Answer, Question, Ran
from baton.tests.helpers.mixed_questions import Mixed

FAST = {("unified", "EAGLE3"), ("unified", "STANDALONE"), ("mixed chunk", "NGRAM"), ("retraction", "NEXTN"),
        ("retraction to host", "EAGLE3"), ("PD", "STANDALONE"), ("PD, prefix delta", "NEXTN"),
        ("PD, failover", "EAGLE3"), ("PD, continuation", "NEXTN"), ("host tier", "NEXTN"), ("storage", "EAGLE3"),
        ("PD, FP8 KV", "EAGLE3"), ("PD", "EAGLE3 tree"), ("priority", "NEXTN"), ("PD, host tier", "STANDALONE"),
        ("PD, n, seeds, logprobs", "EAGLE3")}
MATRIX = [pytest.param(name, algorithm, id=f"{name}, {algorithm}",
                       marks=() if (name, algorithm) in FAST else pytest.mark.slow)
          for name in SCENARIOS for algorithm in (*ALGORITHMS, *TREES)]


@pytest.mark.parametrize(("scenario", "algorithm"), MATRIX)
def test_steps_accept_what_they_should(scenario, algorithm):
    parity = measure(algorithm, SCENARIOS[scenario], questions(9))
    assert parity.steps > 20
    parity.check()


@pytest.mark.parametrize("algorithm", ["EAGLE3", *(pytest.param(name, marks=pytest.mark.slow)
                                                   for name in ALGORITHMS if name != "EAGLE3")])
@pytest.mark.parametrize("scenario", ["unified", pytest.param("chunked", marks=pytest.mark.slow), "PD",
                                      pytest.param("PD, failover", marks=pytest.mark.slow)])
def test_with_grammars_too(scenario, algorithm):
    measure(algorithm, SCENARIOS[scenario], questions(4, grammars=True)).check()


@pytest.mark.parametrize(("algorithm", "least"), [("EAGLE3", 2.5), ("NEXTN", 2.5), ("STANDALONE", 1.7)])
def test_shipped_draft_models_are_worth_it(algorithm, least):
    assert measure(algorithm, SCENARIOS["unified"], questions(18)).acceptance_length > least


@pytest.mark.parametrize("algorithm", ["EAGLE3", *(pytest.param(name, marks=pytest.mark.slow)
                                                   for name in ALGORITHMS if name != "EAGLE3")])
def test_mixed_requests_are_answered_as_by_plain_decoding_bit_by_bit(algorithm):
    tally = speculation_oracle.compare(100, 5, [algorithm], bitwise=True)
    assert not tally.different and tally.tokens[algorithm] > 1.2 * tally.steps[algorithm]


def test_the_oracle_finds_what_differs(capsys):
    plain = Answer(tokens=[1, 2], lengths=[1, 1], steps=[Ran(True, 0), Ran(False, 0)], logprobs=[-0.5, -0.25])
    asked, tally = [Mixed("greedy", Question([1]))], speculation_oracle.Tally()
    for change in ({}, {"tokens": [1, 3]}, {"finish": "stop"}, {"logprobs": [-0.5, -0.26]}):
        tally.add("engine", 0, asked, [plain], [dataclasses.replace(plain, **change)], bitwise=False)
    tally.add("engine", 0, asked, [plain], [dataclasses.replace(plain, logprobs=[-0.5, -0.25 - 1e-9])], bitwise=True)
    assert tally.different == {"engine": 4} and "tokens from 1 on" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"different": 1}, {"accepted": 98}, {"first": (97, 100)}, {"fewer_cached": 9}])
def test_what_is_wrong_is_found(change):
    fine = {"steps": 40, "accepted": 100, "expected": 100, "first": (100, 100), "drafts": 120, "different": 0,
            "fewer_cached": 8, "seconds": 1.0}
    Parity(**fine).check()
    with pytest.raises(AssertionError):
        Parity(**fine | change).check()
