"""Speculative decoding on a GPU: answers are those of plain decoding.

A verify step has other shapes than a decode step, so that other kernels may compute it, which add up in another order:
answers are equal bit by bit in deterministic mode, and almost always without.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from baton.kernels.tuning.policy import set_batch_invariant
from baton.tests.helpers.acceptance_parity import BASE, ROOMY, algorithm_flags
from baton.tests.helpers.flag_engine import Answer, FlagEngine, Question
from baton.tests.helpers.mixed_questions import Mixed, chunks, differences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICE = ("--device", "cuda", "--attention-backend", "triton", "--max-running-requests", "24",
          "--cuda-graph-bs", "1", "4", "12", "24")
"""So few at once that requests join others that decode, and leave them."""
DETERMINISTIC = ("--enable-deterministic-inference",)
FLOAT8 = ("--kv-cache-dtype", "fp8_e4m3")
EAGER = ("--disable-cuda-graph",)
COUNT = 100


@cache
def mixed() -> list[Mixed]:
    [asked] = chunks(5, COUNT, COUNT)
    return asked


def answers(*flags: str) -> tuple[FlagEngine, list[Answer]]:
    try:
        engine = FlagEngine(*BASE, *ROOMY, *DEVICE, *flags)
        return engine, engine.answers([each.question for each in mixed()])
    finally:
        set_batch_invariant(False)


@cache
def plain(*flags: str) -> list[Answer]:
    return answers(*flags)[1]


def num_accepted(engine: FlagEngine) -> int:
    assert engine.parts.batcher.drafting is not None
    return engine.parts.batcher.drafting.num_accepted


def assert_equal(expected: list[Answer], found: list[Answer], *, bitwise: bool) -> None:
    places = differences(expected, found, bitwise)
    assert not places, [(place, mixed()[place].kind, expected[place].tokens, found[place].tokens) for place in places]


@pytest.mark.parametrize(("algorithm", "flags"), [
    ("EAGLE3", ()), ("NEXTN", ()), ("STANDALONE", ()), ("NGRAM", ()), ("EAGLE3", EAGER), ("STANDALONE", EAGER),
    ("EAGLE3", ("--disable-overlap-schedule",)), ("EAGLE3", ("--speculative-num-steps", "7")),
    ("NEXTN", ("--speculative-num-steps", "1")), ("EAGLE3", ("--speculative-num-steps", "5", "--speculative-adaptive")),
    ("EAGLE3", ("--chunked-prefill-size", "64", "--enable-mixed-chunk")),
    ("EAGLE3", ("--max-total-tokens", "4096")),  # requests are retracted
], ids=str)
def test_mixed_requests_have_the_answers_of_plain_decoding(algorithm, flags):
    """Tokens and logprobs bit by bit: greedy and seeded, with penalties, grammars, stop tokens, shared prefixes."""
    engine, found = answers(*DETERMINISTIC, *algorithm_flags(algorithm), *flags)
    assert_equal(plain(*DETERMINISTIC), found, bitwise=True)
    captured = engine.parts.batcher.chains is not None
    assert captured == (algorithm != "NGRAM" and flags != EAGER), "a warning says why steps are not captured"
    if "--speculative-adaptive" not in flags:  # which may find that drafts do not pay
        assert num_accepted(engine) > (10 if algorithm == "NGRAM" else 100)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN", "STANDALONE"])
def test_a_float8_cache(algorithm):
    engine, found = answers(*DETERMINISTIC, *FLOAT8, *algorithm_flags(algorithm))
    assert_equal(plain(*DETERMINISTIC, *FLOAT8), found, bitwise=True)
    assert num_accepted(engine) > 100


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN", "STANDALONE"])
def test_answers_are_almost_always_equal_without_deterministic_mode(algorithm):
    """In float32 rounding hardly ever decides; in bfloat16 two tokens are sometimes as likely."""
    for dtype, least in (("float32", 0.97), ("bfloat16", 0.7)):
        engine, found = answers("--dtype", dtype, *algorithm_flags(algorithm))
        expected = plain("--dtype", dtype)
        share = sum(one.tokens == other.tokens for one, other in zip(expected, found)) / COUNT
        print(f"{algorithm}, {dtype}: {share:.0%} of the texts are equal, {num_accepted(engine)} drafts accepted")
        assert share >= least and num_accepted(engine) > 100


def test_long_prompts_and_answers():
    """Contexts of many pages, whose attention is split over several programs."""
    asked = [Question([*each.question.prompt, *each.question.prompt] * 4, each.question.sampling)
             for each in mixed() if each.kind in ("greedy", "seeded") and len(each.question.prompt) > 60][:12]
    found = []
    for flags in ((), algorithm_flags("EAGLE3")):
        try:
            found.append(FlagEngine(*BASE, "--max-total-tokens", "65536", *DEVICE, *DETERMINISTIC, *flags)
                         .answers(asked))
        finally:
            set_batch_invariant(False)
    assert not differences(*found, bitwise=True)
