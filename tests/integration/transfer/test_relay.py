"""The main job through real processes: router, prefill and decode answer chat requests with the shipped model."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Cluster, get_json
from baton.tests.tinychat.tasks import held_out, matches

MAX_NEW = 64


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def encode(tokenizer, example):
    ids = tokenizer.apply_chat_template(example.messages, tools=example.tools, add_generation_prompt=True)
    return list(ids["input_ids"] if not isinstance(ids, list) else ids)


async def generate(url, prompts, *, concurrency=16, **sampling):
    """Output token ids of each prompt through /generate."""
    gate = asyncio.Semaphore(concurrency)
    params = {"temperature": 0, "max_new_tokens": MAX_NEW} | sampling

    async def one(session, ids):
        async with gate, session.post(url + "/generate", json={"input_ids": ids, "sampling_params": params}) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["output_ids"]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        return await asyncio.gather(*(one(session, ids) for ids in prompts))


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [encode(tokenizer, example) for example in held_out(60, seed=11)]


def greedy_by_transformers(prompts):
    """MAX_NEW tokens or fewer of each prompt, in float32."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW, do_sample=False)
        answers.append(out[0, len(prompt):].tolist())
    return answers


@pytest.fixture(scope="module")
def expected(prompts):
    return greedy_by_transformers(prompts)


async def test_greedy_tokens_equal_transformers(unified, relay, prompts, expected):
    assert await generate(unified.url, prompts) == expected
    assert await generate(relay.url, prompts) == expected
    assert await generate(relay.url, prompts[:30]) == expected[:30], "over the prefix caches of both servers"
    for server in (unified, *relay.workers):
        server.assert_clean()


@pytest.mark.parametrize("shape", [
    {"prefill": 2, "decode": 2, "flags": ["--disaggregation-transfer-backend", "auto"]}, {"flags": ["--tp-size", "2"]}],
    ids=["2P2D, auto", "TP2"])
async def test_other_shapes_give_equal_tokens(tmp_path, prompts, expected, shape):
    with Cluster(tmp_path, **shape) as cluster:
        assert await generate(cluster.url, prompts[:24]) == expected[:24]
        for server in cluster.workers:
            server.assert_clean()
            assert server.pages()["cached"] > 0, "every worker was meant to have work"


async def test_answers_through_the_openai_client(relay):
    client = openai.AsyncOpenAI(base_url=relay.url + "/v1", api_key="none")
    examples = held_out(48, seed=5)

    async def ask(example):
        options = {"tools": example.tools} if example.tools else {}
        reply = await client.chat.completions.create(
            model="tinychat", messages=example.messages, temperature=0, **options)
        return matches(example, reply.choices[0].message)

    right = await asyncio.gather(*map(ask, examples))
    assert sum(right) >= 0.95 * len(examples), [e.task for e, ok in zip(examples, right) if not ok]


def open_files(cluster):
    """Open file descriptors (sockets among them) of each front process and the router."""
    return [psutil.Process(server.process.pid).num_fds() for server in (cluster.router, *cluster.workers)]


async def test_64_streams_of_mixed_lengths(relay):
    """All end, the answers are right, every page is accounted for afterwards, and no socket is left."""
    before = open_files(relay)
    client = openai.AsyncOpenAI(base_url=relay.url + "/v1", api_key="none", max_retries=0, timeout=120)
    examples = held_out(64, seed=21, tasks=("needle", "recall", "repeat", "capitals", "sums", "json"))

    async def stream(example):
        text, finish, usage = "", None, None
        async for chunk in await client.chat.completions.create(
                model="tinychat", messages=example.messages, temperature=0, stream=True,
                stream_options={"include_usage": True}):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
            usage = chunk.usage or usage
        assert finish == "stop" and usage.completion_tokens > 0
        return matches(example, text)

    right = await asyncio.gather(*map(stream, examples))
    assert sum(right) >= 0.95 * len(examples), [e.task for e, ok in zip(examples, right) if not ok]
    for server in relay.workers:
        server.assert_clean()
        state = server.state()
        assert state["num_running"] == state["num_waiting"] == state["num_transferring"] == 0
    await client.close()
    deadline = time.monotonic() + 15  # the router keeps idle connections to workers for some seconds
    while any(now > then + 2 for now, then in zip(open_files(relay), before)):
        assert time.monotonic() < deadline, (before, open_files(relay))
        await asyncio.sleep(0.2)


async def running_on(server, seconds=30.0):
    """Wait until a request has a place in the server's steps."""
    deadline = time.monotonic() + seconds
    while not (await asyncio.to_thread(server.state))["num_running"]:
        assert time.monotonic() < deadline, repr(server)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_frees_its_pages_within_a_second(relay, streaming):
    body = {"model": "tinychat", "prompt": "Count from 1 to 2000: 1, 2, 3,", "max_tokens": 3500, "stream": streaming,
            "ignore_eos": True, "temperature": 0}
    async with aiohttp.ClientSession() as session:
        request = session.post(relay.url + "/v1/completions", json=body)
        if streaming:
            async with request as answer:
                await answer.content.readline()
                answer.close()
        else:
            task = asyncio.ensure_future(request)
            await running_on(relay.decode[0])
            task.cancel()
        left = time.monotonic()
    for server in relay.workers:
        server.assert_clean(seconds=max(0.1, left + 1 - time.monotonic()))


async def test_an_abort_by_rid_ends_both_halves(relay):
    body = {"text": "Count: 1, 2, 3,", "rid": "to-be-aborted",
            "sampling_params": {"max_new_tokens": 3500, "ignore_eos": True, "temperature": 0}}
    async with aiohttp.ClientSession() as session:
        running = asyncio.ensure_future(session.post(relay.url + "/generate", json=body))
        await running_on(relay.decode[0])
        async with session.post(relay.url + "/abort_request", json={"rid": "to-be-aborted"}) as answer:
            assert answer.status == 200
        await asyncio.wait_for(running, 5)
    for server in relay.workers:
        server.assert_clean(seconds=2)


async def test_sampling_is_equal_on_both_kinds_of_server(unified, relay, prompts):
    options = {"temperature": 1.0, "seed": 3, "top_p": 0.9, "max_new_tokens": 24}
    assert await generate(unified.url, prompts[:12], **options) == await generate(relay.url, prompts[:12], **options)


async def test_logprobs_are_equal_on_both_kinds_of_server(unified, relay):
    answers = []
    for url in (unified.url, relay.url):
        client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none")
        reply = await client.chat.completions.create(
            model="tinychat", messages=[{"role": "user", "content": "What is the capital of Italy?"}], temperature=0,
            logprobs=True, top_logprobs=3)
        answers.append(reply.choices[0])
    first, second = answers
    assert first.message.content == second.message.content == "Rome"
    for a, b in zip(first.logprobs.content, second.logprobs.content, strict=True):
        assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-3 and len(b.top_logprobs) == 3


def test_flush_empties_the_caches(relay):
    for server in relay.workers:
        server.assert_clean()
        get_json_or_text(server.url + "/flush_cache")
        pages = server.pages()
        assert pages["free"] == pages["total"]


def get_json_or_text(url):
    try:
        return get_json(url)
    except ValueError:
        return None
