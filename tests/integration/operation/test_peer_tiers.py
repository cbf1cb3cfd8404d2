"""A prefill server of two ranks and two decode servers that read each other's host memory, without a storage."""

from __future__ import annotations

import json
import threading
import time

import pytest

from baton.tests.helpers.harness import Cluster, post_json
from baton.tests.integration.operation.test_tiers import POOL, ask, conversation, ids, storage_of

FLAGS = ["--enable-hierarchical-cache", "--hicache-size", "0.1", "--hicache-load-policy", "always",
         "--hicache-storage-backend", "peers",
         "--hicache-storage-prefetch-policy", "wait_complete", "--cluster-secret", "secret",
         "--hicache-storage-backend-extra-config", json.dumps({"stall_seconds": 10})]  # a busy machine, no dead peer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("peers"), decode=2, flags=[*POOL, *FLAGS],
                 prefill_flags=["--tp-size", "2"]) as cluster:
        for seed in (91, 92):  # both decode servers have met prefill
            ask(cluster.url, ids(seed, 40))
        yield cluster


@pytest.fixture(scope="module")
def answers(unified):
    """Those of a server without tiers, by seed."""
    return {seed: conversation(unified.url, seed)[0] for seed in (1, 2, 3)}


def pages_read(cluster: Cluster) -> list[int]:
    return [storage_of(server)["pages_read"] for server in cluster.workers]


def stored(cluster: Cluster) -> None:
    """Wait until host memory has what was computed."""
    last, deadline = None, time.monotonic() + 20
    while last != (now := [server.state()["counters"].get("tier_stored") for server in cluster.workers]):
        assert time.monotonic() < deadline
        last = now
        time.sleep(0.1)


def test_a_turn_finds_the_pages_of_prompts_and_answers_in_decode_servers(cluster, answers):
    """Prefill forgets everything after each turn."""
    def forget() -> None:
        stored(cluster)
        status, body = post_json(cluster.prefill[0].url + "/flush_cache")
        assert status == 200, body

    before = pages_read(cluster)
    given, shares = conversation(cluster.url, 1, forget)
    assert given == answers[1] and min(shares) >= 0.99, shares
    assert pages_read(cluster)[0] - before[0] > 60
    assert not any(storage_of(server)["pages_written"] for server in cluster.workers)


def test_answers_are_found_whichever_decode_server_wrote_them(cluster, answers):
    given, shares = conversation(cluster.url, 2, lambda: stored(cluster))
    assert given == answers[2] and min(shares) >= 0.99, shares


def test_a_decode_server_that_dies_costs_no_token(cluster, answers):
    """It is killed while prefill reads from it; what it had is computed, and found again once it is back."""
    victim = cluster.decode[1]
    found, _ = conversation(cluster.url, 3, lambda: stored(cluster))
    assert found == answers[3]
    post_json(cluster.prefill[0].url + "/flush_cache")
    prompts = [ids(1, 330) + answers[1][0] + ids(1000, 37), ids(2, 330) + answers[2][0] + ids(2000, 37)]
    threading.Timer(0.02, victim.kill).start()
    for prompt, seed in zip(prompts, (1, 2)):
        deadline = time.monotonic() + 30
        while True:
            status, body = post_json(cluster.url + "/generate", {"input_ids": prompt, "sampling_params": {
                "temperature": 0, "max_new_tokens": 40, "ignore_eos": True}})
            if status == 200:
                assert body["output_ids"] == answers[seed][1]
                break
            assert time.monotonic() < deadline, body  # the router still sends requests to the dead server
            time.sleep(0.1)
    victim.start().wait_ready()
    cluster._wait_routed()
    given, _ = conversation(cluster.url, 3, lambda: stored(cluster))
    assert given == answers[3]
    for server in cluster.workers:
        server.assert_clean()
