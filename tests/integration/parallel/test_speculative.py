"""Speculative decoding in real servers: a plug-in's algorithm, and NGRAM, answer as a server without any."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.tests.helpers.harness import Cluster, Server, post_json
from baton.tests.helpers.plugins import install_plugin
from baton.tests.helpers.ports import free_ports

FLAGS = ["--model-path", "tinychat", "--device", "cpu", "--log-level", "warning", "--max-total-tokens", "400",
         "--schedule-conservativeness", "0", "--page-size", "4"]
TOY = ["--speculative-algorithm", "TOY_REPEAT", "--speculative-num-draft-tokens", "3"]
NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-adaptive"]
DEVICE = ["--speculative-algorithm", "TOY_DEVICE", "--speculative-num-steps", "3", "--tp-size", "2",
          "--enable-mixed-chunk", "--chunked-prefill-size", "16",
          "--max-total-tokens", "240"]  # retractions do not depend on how close together requests arrive
PROMPTS = ["Once upon a time there was a cat. The cat said: hello, hello, hello,",
           "one two three one two three one two", "What is the capital of France? The capital of France is",
           "a b a b a b a b", "User: hi"]
SAMPLING = [{"temperature": 0}, {"temperature": 0.8, "sampling_seed": 11}, {"temperature": 0, "stop": ["t", "e "]},
            {"temperature": 1.0, "sampling_seed": 12, "n": 2}, {"temperature": 0, "frequency_penalty": 0.5},
            {"temperature": 0, "min_new_tokens": 20}]


def answers(url: str) -> list[object]:
    """Texts, tokens and reasons of all requests, sent together so that some are retracted."""
    bodies = [{"text": prompt, "sampling_params": {"max_new_tokens": 60, **sampling}, "return_logprob": i % 7 == 3}
              for i, (prompt, sampling) in enumerate((prompt, sampling) for prompt in PROMPTS for sampling in SAMPLING)]
    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda body: post_json(f"{url}/generate", body), bodies))
    assert all(status == 200 for status, _ in replies), replies
    return [[(one["text"], one["output_ids"], one["meta_info"]["finish_reason"]["type"],
              one["meta_info"]["completion_tokens"]) for one in (reply if isinstance(reply, list) else [reply])]
            for _, reply in replies]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plugin")
    path = install_plugin(folder, "baton.speculative", "TOY_REPEAT", "baton.tests.helpers.toy_proposer_plugin")
    install_plugin(folder, "baton.speculative", "TOY_DEVICE", "baton.tests.helpers.toy_drafter")
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": paths, "TOY_PROPOSER_FILE": str(folder / "counts"),
            "TOY_DRAFTER_FILE": str(folder / "accepted")}


@pytest.fixture(scope="module")
def expected(unified) -> list[object]:
    return answers(unified.url)


def assert_drafts_are_reported(url: str) -> None:
    body = {"text": PROMPTS[0], "sampling_params": {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0, "n": 2}}
    for one in post_json(f"{url}/generate", body)[1]:
        meta = one["meta_info"]
        assert sum(meta["spec_accept_histogram"]) <= meta["spec_verify_ct"] <= 39
        assert meta["spec_verify_ct"] + meta["spec_accept_token_num"] == 39
        assert meta["spec_accept_length"] == 40 / meta["spec_verify_ct"]
        assert meta["spec_accept_token_num"] <= meta["spec_draft_token_num"]
        assert "spec_acceptance_simulated" not in meta
    body["sampling_params"]["stop"] = [one["text"][8:16]]  # in the middle
    for one in post_json(f"{url}/generate", body)[1]:
        meta = one["meta_info"]
        assert meta["finish_reason"]["matched"] and meta["completion_tokens"] < 40
        assert meta["spec_verify_ct"] + meta["spec_accept_token_num"] == meta["completion_tokens"] - 1
    status, chat = post_json(f"{url}/v1/chat/completions", {
        "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 20, "ignore_eos": True})
    details = chat["usage"]["completion_tokens_details"]
    assert status == 200 and details["accepted_prediction_tokens"] >= 0 <= details["rejected_prediction_tokens"]


def accepted(plugin: dict[str, str]) -> int:
    """The drafts that a server's model has accepted."""
    drafted, count = map(int, Path(plugin["TOY_PROPOSER_FILE"]).read_text().splitlines()[-1].split())
    assert drafted > count
    return count


@pytest.mark.parametrize("flags", [TOY, NGRAM, DEVICE], ids=["plug-in", "ngram", "device"])
def test_a_unified_server(tmp_path, plugin, expected, flags):
    argv = ["server", *FLAGS, *flags]
    server = Server("baton.launch", argv, free_ports(1)[0], tmp_path / "server.log", **plugin).start()
    try:
        assert answers(server.wait_ready().url) == expected
        assert server.state()["counters"]["retracted_requests"] > 0
        assert_drafts_are_reported(server.url)
        server.assert_clean()
    finally:
        assert server.stop() == 0
    if flags is DEVICE:  # on two ranks
        assert int(Path(plugin["TOY_DRAFTER_FILE"]).read_text()) > 10
    assert flags is not TOY or accepted(plugin) > 10


def test_a_pair_whose_decode_server_drafts(tmp_path, plugin, expected):
    with Cluster(tmp_path, flags=FLAGS[6:], decode_flags=TOY, environment=plugin) as cluster:
        assert answers(cluster.url) == expected
        assert_drafts_are_reported(cluster.url)
        for server in cluster.workers:
            server.assert_clean()
    assert accepted(plugin) > 10
