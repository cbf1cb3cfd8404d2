"""Servers whose layers are parted into stages, as launched: answers, what ends early, and stages that die."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.harness import Cluster, Server, post_json
from baton.tests.helpers.ports import free_ports
from baton.tests.integration.faults.test_dead_processes import (
    ENDS_WITHIN,
    Hosts,
    assert_answers,
    ranks_of,
    wait_running,
)
from baton.tests.integration.transfer.test_layouts import assert_all_counted

slow = pytest.mark.slow
FULL = ("--kv-checksum", "full")
STAGES = ("--pp-size", "2", "--chunked-prefill-size", "64")


def prompts_of(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(300, 4000, length).tolist() for length in (5, 200, 64, 33, 150, 400)]
    return [*prompts, prompts[1] + prompts[0]]  # the last one begins with what the prefix cache may have


def alone(prompts: list[list[int]]) -> list[list[int]]:
    """What one rank answers."""
    engine = Engine(CHECKPOINT, page_size=16, max_total_tokens=8192)
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt, max_new_tokens=12, ignore_eos=True)
    tokens = tokens_of(engine.run())
    return [tokens[str(i)] for i in range(len(prompts))]


def generate(url: str, prompt: list[int], **fields) -> tuple[int, dict]:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True} | fields.pop("sampling", {})
    return post_json(url + "/generate", {"input_ids": prompt, "sampling_params": sampling, **fields})


def assert_same_tokens(url: str, seed: int) -> None:
    prompts = prompts_of(seed)
    expected = alone(prompts)
    for _ in range(2):  # the second time from the prefix caches
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda prompt: generate(url, prompt), prompts))
        assert [status for status, _ in answers] == [200] * len(prompts), answers
        assert [answer["output_ids"] for _, answer in answers] == expected


def test_a_pair_with_stages(tmp_path):
    """Tokens and log-probabilities come from the last stage, pages from all. Then a stage is killed."""
    cluster = Cluster(tmp_path, prefill_flags=[*STAGES, *FULL], decode_flags=FULL)
    cluster.__enter__()
    try:
        assert_same_tokens(cluster.url, 1)
        prompt = prompts_of(2)[1]
        status, told = generate(cluster.url, prompt, return_logprob=True, logprob_start_len=0)
        assert status == 200 and len(told["meta_info"]["input_token_logprobs"]) == len(prompt)
        assert len(told["meta_info"]["output_token_logprobs"]) == 12
        for server in cluster.workers:
            server.assert_clean()
        assert_all_counted(cluster.prefill[0].state(), cluster.decode[0].state(), 15)
        kill_a_stage(cluster)
    finally:
        cluster._kill()


def kill_a_stage(cluster: Cluster) -> None:
    prefill = cluster.prefill[0]
    parts = psutil.Process(prefill.process.pid).children(recursive=True)
    prompt = np.random.default_rng(4).integers(300, 4000, 1500).tolist()
    with ThreadPoolExecutor(2) as threads:
        held = [threads.submit(generate, cluster.url, [i, *prompt]) for i in range(300, 302)]
        ranks_of(prefill)[1].send_signal(signal.SIGKILL)
        answers = [one.result() for one in held]  # of decode alone where the router tries again
    assert all(status == 200 or answer["error"]["message"] for status, answer in answers), answers
    assert prefill.process.wait(ENDS_WITHIN) == 1
    assert "Rank 1 of the engine ended with exit code -9" in prefill.log.read_text().splitlines()[-1]
    _, left = psutil.wait_procs(parts, timeout=10)
    assert not [part for part in left if part.status() != psutil.STATUS_ZOMBIE]
    cluster.decode[0].assert_clean(30)


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("prefill_flags, decode_flags", [
    ("--pp-size 2", "--tp-size 2"),
    ("--pp-size 2 --tp-size 2 --page-size 32 --chunked-prefill-size 40", "--num-layer-groups 2"),
    ("--pp-size 3 --pp-layer-partition 1 4 2 --num-layer-groups 2 --page-size 8", "--page-size 32"),
])
def test_pairs_that_are_cut_differently(tmp_path, prefill_flags, decode_flags):
    with Cluster(tmp_path, prefill_flags=[*prefill_flags.split(), *FULL],
                 decode_flags=[*decode_flags.split(), *FULL]) as cluster:
        assert_same_tokens(cluster.url, 5)
        status, told = generate(cluster.url, prompts_of(3)[0], sampling={"regex": "(ab|cd){3}", "ignore_eos": False})
        assert status == 200 and len(told["text"]) == 6 and set(told["text"]) <= set("abcd"), told
        for server in cluster.workers:
            server.assert_clean()


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_unified_server_with_stages(tmp_path, tp_size):
    argv = ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning", *STAGES,
            "--tp-size", str(tp_size)]
    server = Server("baton.launch", argv, free_ports(1)[0], tmp_path / "log").start()
    try:
        server.wait_ready()
        assert_same_tokens(server.url, 6)
        schema = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
        status, told = generate(server.url, prompts_of(7)[0], sampling={
            "json_schema": schema, "ignore_eos": False, "max_new_tokens": 60})
        assert status == 200 and told["meta_info"]["finish_reason"]["type"] in ("stop", "length"), told
        status, told = generate(server.url, prompts_of(7)[0], sampling={"regex": "("})
        assert status == 400, told
        for path in ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"):
            assert post_json(server.url + path)[0] == 200
        assert_same_tokens(server.url, 6)
        status, told = post_json(server.url + "/update_weights_from_disk", {"model_path": str(CHECKPOINT)})
        assert status == 200, told
        assert_same_tokens(server.url, 6)
        server.assert_clean()
    finally:
        assert server.stop() == 0


@slow
@pytest.mark.timeout(300)
def test_stages_on_two_hosts(tmp_path):
    with Hosts(tmp_path, "--tp-size", "1", "--pp-size", "2") as hosts:
        assert_answers(hosts.first)
        assert_same_tokens(hosts.first.url, 8)
        with ThreadPoolExecutor(1) as threads:
            held = threads.submit(generate, hosts.first.url, prompts_of(9)[0], sampling={"max_new_tokens": 3000})
            wait_running(hosts.first, 1)
            hosts.second.kill()
            status, answer = held.result()
        assert status == 503 and "of the engine" in answer["error"]["message"], answer
        assert hosts.first.process.wait(ENDS_WITHIN) == 1
