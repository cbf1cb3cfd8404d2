"""Servers whose ranks form attention groups, through HTTP: whole servers, pairs, and behind the router."""

from __future__ import annotations

import json

import jsonschema
import openai
import psutil
import pytest
from transformers import AutoTokenizer

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Cluster, Server, get_json, post_json
from baton.tests.helpers.ports import free_port
from baton.tests.integration.transfer.test_relay import encode, generate, greedy_by_transformers
from baton.tests.tinychat.tasks import held_out

DP2 = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")


def loads(url: str) -> list[dict]:
    return get_json(url + "/get_load")


def states(server: Server) -> list[dict]:
    return get_json(server.url + "/get_server_info")["internal_states"]


def assert_clean(server: Server) -> None:
    for state in states(server):
        assert state["held_pages"] == 0 and state["free_pages"] + state["cached_pages"] == state["total_pages"]


@pytest.fixture(scope="module")
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    return [encode(tokenizer, example) for example in held_out(40, seed=12)]


@pytest.fixture(scope="module")
def expected(prompts):
    return greedy_by_transformers(prompts)


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """A unified server of two attention groups."""
    folder = tmp_path_factory.mktemp("dp")
    argv = ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning", *DP2,
            "--chunked-prefill-size", "64", "--constrained-json-disable-any-whitespace"]
    server = Server("baton.launch", argv, free_port(), folder / "server.log").start()
    try:
        yield server.wait_ready()
    finally:
        server.kill()


async def test_greedy_tokens_of_concurrent_requests(groups, prompts, expected):
    assert await generate(groups.url, prompts) == expected
    assert await generate(groups.url, prompts, concurrency=3) == expected
    finished = [state["counters"]["finished_requests"] for state in states(groups)]
    assert finished == [40, 40], "round robin"
    assert_clean(groups)


def test_a_request_names_its_rank(groups, prompts, expected):
    chosen = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    for field in ("data_parallel_rank", "routed_dp_rank"):
        before = [state["counters"]["finished_requests"] for state in states(groups)]
        body = {"input_ids": prompts[chosen], "sampling_params": {"temperature": 0, "max_new_tokens": 64}, field: 1}
        answers = [post_json(groups.url + "/generate", body) for _ in range(2)]
        assert [status for status, _ in answers] == [200, 200] and answers[0][1]["output_ids"] == expected[chosen]
        assert answers[1][1]["meta_info"]["cached_tokens"] > 0, "its prefix cache has the prompt"
        after = [state["counters"]["finished_requests"] for state in states(groups)]
        assert [late - early for early, late in zip(before, after)] == [0, 2]
    status, answer = post_json(groups.url + "/generate", {**body, "data_parallel_rank": 2})
    assert status == 400 and "data_parallel_rank must be between 0 and 1" in answer["error"]["message"]


def test_it_tells_of_its_ranks(groups):
    info = get_json(groups.url + "/get_server_info")
    assert info["dp_size"] == 2 and [state["dp_rank"] for state in info["internal_states"]] == [0, 1]
    assert [entry["dp_rank"] for entry in loads(groups.url)] == [0, 1]


def test_chats_grammars_and_samples(groups):
    client = openai.OpenAI(base_url=groups.url + "/v1", api_key="x", max_retries=0)
    asked = {"model": "tinychat", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    for _ in range(2):
        assert "Paris" in client.chat.completions.create(**asked, temperature=0).choices[0].message.content
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}
    for rank in (0, 1):
        body = {"text": "x", "data_parallel_rank": rank, "sampling_params": {
            "json_schema": json.dumps(schema), "temperature": 1.0, "max_new_tokens": 80}}
        jsonschema.validate(json.loads(post_json(groups.url + "/generate", body)[1]["text"]), schema)
    seeded = {"text": "Tell me", "sampling_params": {"sampling_seed": 3, "temperature": 1.5, "max_new_tokens": 12}}
    told = [post_json(groups.url + "/generate", seeded)[1]["output_ids"] for _ in range(2)]
    assert told[0] == told[1], "a seed's tokens do not depend on the rank"


def test_commands_reach_all_ranks(groups):
    url = groups.url
    post_json(url + "/generate", {"text": "some words to keep", "data_parallel_rank": 1})
    assert states(groups)[1]["cached_pages"] > 0
    with openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(model="tinychat", prompt="x", max_tokens=2000, stream=True, extra_body={
            "ignore_eos": True, "rid": "long", "data_parallel_rank": 1})
        next(iter(stream))
        assert [entry["num_reqs"] for entry in loads(url)] == [0, 1]
        status, answer = post_json(url + "/flush_cache")
        assert status == 400, "one of the groups is busy"
        assert post_json(url + "/abort_request", {"rid": "long"})[0] == 200
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
    assert post_json(url + "/flush_cache")[0] == 200
    assert [state["cached_pages"] for state in states(groups)] == [0, 0]
    assert post_json(url + "/update_weights_from_disk", {"model_path": str(CHECKPOINT)})[0] == 200
    assert post_json(url + "/update_weights_from_disk", {"model_path": "/nowhere"})[0] == 400
    assert post_json(url + "/generate", {"text": "x"})[0] == 200


def test_it_stops_when_told(groups):
    children = psutil.Process(groups.process.pid).children(recursive=True)
    assert groups.stop() == 0, repr(groups)
    assert not psutil.wait_procs(children, timeout=20)[1], "a process is left"


@pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=pytest.mark.slow)])
async def test_pairs_of_unequal_sizes(tmp_path, prompts, expected, side):
    flags = {f"{side}_flags": DP2}
    router = ["--policy", "round_robin", *(["--dp-aware"] if side == "decode" else [])]
    with Cluster(tmp_path, router_flags=router, **flags) as cluster:
        assert await generate(cluster.url, prompts) == expected
        (wide,) = getattr(cluster, side)
        shares = [state["counters"]["finished_requests"] for state in states(wide)]
        assert min(shares) > 0 and sum(shares) == 40
        for server in cluster.workers:
            assert_clean(server)
