"""Drafts together with what else a pair of servers does: their answers are those of a server that decodes plainly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.tests.bench.acceptance_servers import Results, ask, bodies
from baton.tests.helpers.acceptance_parity import algorithm_flags
from baton.tests.helpers.harness import Cluster

POOL = ["--page-size", "8", "--max-total-tokens", "640", "--schedule-conservativeness", "0"]
"""So small that requests are retracted, and that prompts of the first round are in host memory in the second one."""
FEATURES = [*POOL, "--chunked-prefill-size", "64", "--enable-hierarchical-cache", "--hicache-size", "0.1",
            "--hicache-load-policy", "always", "--enable-priority-scheduling",
            "--priority-scheduling-preemption-threshold", "0", *algorithm_flags("EAGLE3"),
            "--speculative-num-steps", "4", "--speculative-adaptive"]
ASKED = bodies(12)


@pytest.fixture(scope="module")
def expected(unified) -> Results:
    return ask(unified.url, ASKED, 6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("pair"), flags=FEATURES) as cluster:
        yield cluster


def test_answers_are_those_of_plain_decoding(pair, expected):
    """Chains of adaptive length, grammars, several answers, penalties, log-probabilities, priorities, chunks of
    prompts, retraction, prefix hits and host memory; first all at once, then over what is cached, in another order."""
    order = [*range(1, len(ASKED), 2), *range(0, len(ASKED), 2)]
    rounds = [ask(pair.url, ASKED, 12), ask(pair.url, [ASKED[place] for place in order], 9)]
    choices = [body["sampling_params"].get("n", 1) for body in ASKED]
    starts = [sum(choices[:place]) for place in range(len(ASKED))]
    reordered = [starts[place] + choice for place in order for choice in range(choices[place])]
    for found, places in zip(rounds, (range(len(expected.tokens)), reordered)):
        assert found.tokens == [expected.tokens[place] for place in places]
        for values, place in zip(found.logprobs, places):
            assert values == pytest.approx(expected.logprobs[place], abs=1e-3)
    assert sum(rounds[1].cached) > 100
    assert sum(sum(found.accepted) for found in rounds) > 10, "though on a CPU drafts may not pay for long"
    for server in pair.workers:
        server.assert_clean()
    prefill, decode = (server.state()["counters"] for server in pair.workers)
    assert decode["retracted_requests"] > 0 and prefill["tier_pages_loaded"] + decode["tier_pages_loaded"] > 0, (
        prefill, decode)
