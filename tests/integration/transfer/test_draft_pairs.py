"""Real pairs of servers with draft models: answers as without, also of a pair that only decode drafts for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.tests.helpers.harness import Cluster, Server, post_json
from baton.tests.helpers.ports import free_ports

FLAGS = ["--page-size", "4", "--chunked-prefill-size", "64", "--log-level", "info"]
EAGLE3 = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "tinychat-eagle3"]
STANDALONE = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "tinychat-draft"]
PROMPTS = ["Once upon a time there was a cat. The cat said: hello, hello, hello,",
           "one two three one two three one two",
           "What is the capital of France? The capital of France is", "User: hi"]
SAMPLING = [{"temperature": 0}, {"temperature": 0.8, "sampling_seed": 11}, {"temperature": 0, "stop": ["t"]}]


def answers(url: str) -> tuple[list[object], int]:
    """Texts and tokens of all requests, sent together, and the drafts of these that were accepted."""
    bodies = [{"text": prompt, "sampling_params": {"max_new_tokens": 40, **sampling}}
              for prompt in PROMPTS for sampling in SAMPLING]
    with ThreadPoolExecutor(6) as threads:
        replies = list(threads.map(lambda body: post_json(f"{url}/generate", body), bodies))
    assert all(status == 200 for status, _ in replies), replies
    accepted = sum(reply["meta_info"].get("spec_accept_token_num", 0) for _, reply in replies)
    return [(reply["text"], reply["output_ids"]) for _, reply in replies], accepted


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[object]:
    log = tmp_path_factory.mktemp("plain") / "server.log"
    argv = ["server", "--model-path", "tinychat", "--device", "cpu", *FLAGS]
    server = Server("baton.launch", argv, free_ports(1)[0], log).start()
    try:
        return answers(server.wait_ready().url)[0]
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("flags, decode_flags", [(EAGLE3, []), ([], STANDALONE)], ids=["EAGLE3", "STANDALONE"])
def test_a_pair_with_a_draft_model(tmp_path, expected, flags, decode_flags):
    with Cluster(tmp_path, flags=[*FLAGS, *flags], decode_flags=decode_flags) as cluster:
        for _ in range(2):  # the second time over the prefix caches
            found, accepted = answers(cluster.url)
            assert found == expected and accepted > 50
        for server in cluster.workers:
            server.assert_clean()
