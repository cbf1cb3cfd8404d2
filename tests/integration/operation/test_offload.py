"""Servers with layers in host memory: a pair of them answers as a server without, with two ranks and drafts, after an
update of the weights, and after its memory was given back."""

from __future__ import annotations

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Cluster, post_json

PROMPTS = ["What is the capital of France?", "Once upon a time", "1 2 3 4"]


def answers(url: str) -> list[str]:
    body = {"text": PROMPTS, "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}}
    status, found = post_json(url + "/generate", body)
    assert status == 200, found
    return [each["text"] for each in found]


def test_a_pair_with_layers_in_host_memory(tmp_path, unified):
    expected = answers(unified.url)
    drafts = ["--speculative-algorithm", "NGRAM"]
    with Cluster(tmp_path, prefill_flags=["--offload-group-size", "2", "--tp-size", "2"],
                 decode_flags=["--cpu-offload-gb", "1", "--offload-prefetch-step", "2", *drafts]) as cluster:
        assert answers(cluster.url) == expected
        for server in cluster.workers:
            for path, body in (("/update_weights_from_disk", {"model_path": str(CHECKPOINT)}),
                               ("/release_memory_occupation", {"tags": ["weights"]}),
                               ("/resume_memory_occupation", {"tags": ["weights"]})):
                status, told = post_json(server.url + path, body)
                assert status == 200, told
        assert answers(cluster.url) == expected
