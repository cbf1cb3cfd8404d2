"""Real pairs of servers with draft models: answers as without, also of a pair that only decode drafts for."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.tests.helpers.chains_plugin import num_following
from baton.tests.helpers.harness import Cluster, Server, post_json
from baton.tests.helpers.plugins import install_plugin
from baton.tests.helpers.ports import free_ports

FLAGS = ["--page-size", "4", "--chunked-prefill-size", "64", "--log-level", "info"]
EAGLE3 = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "tinychat-eagle3"]
CHAINS = ["--speculative-algorithm", "EAGLE3_CHAINS", *EAGLE3[2:]]
STANDALONE = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "tinychat-draft"]
PROMPTS = ["Once upon a time there was a cat. The cat said: hello, hello, hello,",
           "one two three one two three one two",
           "What is the capital of France? The capital of France is", "User: hi"]
SAMPLING = [{"temperature": 0}, {"temperature": 0.8, "sampling_seed": 11}, {"temperature": 0, "stop": ["t"]}]


def answers(url: str) -> tuple[list[object], list[tuple[int, int]]]:
    """Texts and tokens of all requests, sent together, and of each its steps and the drafts that were accepted."""
    bodies = [{"text": prompt, "sampling_params": {"max_new_tokens": 40, **sampling}}
              for prompt in PROMPTS for sampling in SAMPLING]
    with ThreadPoolExecutor(6) as threads:
        replies = list(threads.map(lambda body: post_json(f"{url}/generate", body), bodies))
    assert all(status == 200 for status, _ in replies), replies
    metas = [reply["meta_info"] for _, reply in replies]
    return ([(reply["text"], reply["output_ids"]) for _, reply in replies],
            [(meta.get("spec_verify_ct", 0), meta.get("spec_accept_token_num", 0)) for meta in metas])


def num_accepted(steps: list[tuple[int, int]]) -> int:
    return sum(accepted for _, accepted in steps)


@pytest.fixture(scope="module")
def expected(unified) -> list[object]:
    return answers(unified.url)[0]


@pytest.fixture(scope="module")
def eager_steps(tmp_path_factory, expected) -> list[tuple[int, int]]:
    """The steps and accepted drafts of a pair that drafts by EAGLE3."""
    with Cluster(tmp_path_factory.mktemp("eager"), flags=[*FLAGS, *EAGLE3]) as cluster:
        return check(cluster, expected)


def check(cluster: Cluster, expected: list[object]) -> list[tuple[int, int]]:
    """Compares answers; returns the steps of the first ones."""
    rounds = []
    for _ in range(2):  # the second time over the prefix caches
        found, steps = answers(cluster.url)
        assert found == expected and num_accepted(steps) > 50
        rounds.append(steps)
    for server in cluster.workers:
        server.assert_clean()
    return rounds[0]


@pytest.fixture
def plugin(tmp_path) -> dict[str, str]:
    path = install_plugin(tmp_path / "plugin", "baton.speculative", "EAGLE3_CHAINS",
                          "baton.tests.helpers.chains_plugin")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH")))),
            "CHAINS_FILE": str(tmp_path / "following")}


def test_a_pair_with_a_draft_model(eager_steps):
    assert num_accepted(eager_steps) > 50


def test_a_pair_whose_decode_server_has_the_draft_model(tmp_path, expected):
    with Cluster(tmp_path, flags=FLAGS, decode_flags=STANDALONE) as cluster:
        check(cluster, expected)


def test_a_pair_that_takes_chain_steps(tmp_path, plugin, expected, eager_steps):
    """As on GPUs: decode launches steps ahead of the host, and accepts as many drafts as in other steps."""
    with Cluster(tmp_path, flags=[*FLAGS, *CHAINS], environment=plugin) as cluster:
        assert check(cluster, expected) == eager_steps
    [following] = num_following(plugin["CHAINS_FILE"])
    assert following > 20


def test_two_ranks_that_take_chain_steps(tmp_path, plugin, expected, eager_steps):
    server = Server("baton.launch", ["server", "--model-path", "tinychat", "--device", "cpu", *FLAGS, *CHAINS,
                                     "--tp-size", "2"], free_ports(1)[0], tmp_path / "server.log", **plugin).start()
    try:
        found, steps = answers(server.wait_ready().url)
        assert found == expected
        assert num_accepted(steps) == pytest.approx(num_accepted(eager_steps), rel=0.01)
        server.assert_clean()
    finally:
        assert server.stop() == 0
    first, second = num_following(plugin["CHAINS_FILE"])
    assert first == second > 20
