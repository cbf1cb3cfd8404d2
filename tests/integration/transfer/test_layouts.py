"""Prefill and decode servers that are cut differently, as launched: numbers of ranks, sizes of pages, element types."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from baton.tests.helpers.harness import Cluster
from baton.tests.tinychat.tasks import held_out, matches

slow = pytest.mark.slow


def cluster_of(folder, prefill_flags, decode_flags):
    cluster = Cluster(folder, router_flags=["--policy", "round_robin", "--retry-max-retries", "0"])
    cluster.prefill[0].argv += prefill_flags.split()
    cluster.decode[0].argv += decode_flags.split()
    return cluster


async def ask(session, url, example):
    body = {"model": "tinychat", "messages": example.messages, "temperature": 0}
    async with session.post(url + "/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.json()


async def assert_answers_are_right(cluster):
    """Asks twelve questions twice, the second time from both prefix caches; returns how many requests these were."""
    examples = held_out(12, seed=77, tasks=("needle", "capitals", "sums"))
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            answers = await asyncio.gather(*(ask(session, cluster.url, example) for example in examples))
            assert [status for status, _ in answers] == [200] * len(examples), answers
            right = sum(matches(example, told["choices"][0]["message"])
                        for example, (_, told) in zip(examples, answers))
            assert right >= 11
    for server in cluster.workers:
        server.assert_clean()
    return 2 * len(examples)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("prefill_flags, decode_flags", [
    ("--tp-size 2 --page-size 32 --num-layer-groups 2 --chunked-prefill-size 80", "--page-size 16"),
    pytest.param("--tp-size 2", "--tp-size 1", marks=slow),
    pytest.param("--tp-size 1", "--tp-size 2", marks=slow),
    pytest.param("--tp-size 2", "--tp-size 4", marks=slow),
    pytest.param("--page-size 16 --chunked-prefill-size 80", "--page-size 64", marks=slow),
    pytest.param("--page-size 64", "--page-size 16", marks=slow),
    pytest.param("--tp-size 1 --page-size 8", "--tp-size 2 --page-size 32 --num-layer-groups 3", marks=slow),
])
async def test_answers_are_right_whatever_the_cut(tmp_path, prefill_flags, decode_flags):
    with cluster_of(tmp_path, f"{prefill_flags} --kv-checksum full", f"{decode_flags} --kv-checksum full") as cluster:
        num_requests = await assert_answers_are_right(cluster)
        assert_all_counted(cluster.prefill[0].state(), cluster.decode[0].state(), num_requests)


def assert_all_counted(prefill, decode, num_requests):
    """Every counter and gauge of a pair that has served ``num_requests``: none is of one rank, or of one stage, alone,
    and none counts a request once a rank."""
    sent, received = dict(prefill["counters"]), dict(decode["counters"])
    for counters in (sent, received):
        for name in [name for name in counters if name.endswith("_seconds")]:
            assert counters.pop(name) >= 0
        # On a busy machine a handshake is repeated, and its second answer is dropped; no request's message is.
        assert counters.pop("kv_messages_dropped") < num_requests
    assert sent["kv_bytes_sent"] == received["kv_bytes_received"] > 0
    prompts = received["prompt_tokens"]
    assert prompts > received["cached_tokens"] and received["generation_tokens"] >= num_requests
    shared = {"kv_transfers_done": num_requests, "finished_requests": num_requests, "failed_requests": 0,
              "non_finite_requests": 0, "prompt_tokens": prompts}
    assert sent == shared | {"kv_bytes_sent": sent["kv_bytes_sent"], "cached_tokens": sent["cached_tokens"],
                             "generation_tokens": num_requests, "reused_prompts": 0}
    assert received == shared | {
        "kv_bytes_received": received["kv_bytes_received"], "cached_tokens": received["cached_tokens"],
        "generation_tokens": received["generation_tokens"], "retracted_requests": 0, "preempted_requests": 0,
        "swapped_out_requests": 0}
    for state in (prefill, decode):
        usage = state["gauges"].pop("token_usage")
        assert 0 <= usage <= 1 and not any(value for name, value in state["gauges"].items()
                                           if name != "kv_prompts_retained")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("prefill_flags, decode_flags, words", [
    pytest.param("--dtype bfloat16", "--dtype float32",
                 "dtype of the KV layout is 'float32' here and 'bfloat16' there", marks=slow),
    pytest.param("--page-size 24", "--page-size 16", "neither is a multiple of the other", marks=slow),
])
async def test_servers_that_do_not_fit_say_why(tmp_path, prefill_flags, decode_flags, words):
    (example,) = held_out(1, seed=78, tasks=("sums",))
    with cluster_of(tmp_path, prefill_flags, decode_flags) as cluster:
        async with aiohttp.ClientSession() as session:
            status, told = await ask(session, cluster.url, example)
        assert status == 502 and words in told["error"]["message"], told
        for server in cluster.workers:
            server.assert_clean()
