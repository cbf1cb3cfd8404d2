"""Requests that somebody ends, and servers that stand still for a while, unified and in pairs behind a router."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

LONG = {"max_new_tokens": 3500, "ignore_eos": True, "temperature": 0}
LONG_OPENAI = {"model": "tinychat", "max_tokens": 3500, "ignore_eos": True, "temperature": 0, "stream": True}
COUNT = "Count: 1, 2, 3,"


@pytest.fixture(params=["unified", "relay"])
def serving(request):
    """The servers, and where clients ask."""
    found = request.getfixturevalue(request.param)
    return found, [found] if request.param == "unified" else found.workers


@pytest.fixture
async def http(serving):
    async with aiohttp.ClientSession(serving[0].url, timeout=aiohttp.ClientTimeout(60)) as session:
        yield session
    for server in serving[1]:
        server.assert_clean()


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    assert answer.status == 200, await answer.text()
    async for line in answer.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
    assert line == b"\n", "the last event was cut"


async def test_aborted_streams_end_with_their_tokens(http):
    """Each of three forms, aborted by its id while it runs."""
    for path, body in (("/generate", {"text": COUNT, "sampling_params": LONG, "stream": True}),
                       ("/v1/completions", {"prompt": COUNT, **LONG_OPENAI}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": COUNT}], **LONG_OPENAI})):
        seen = []
        async with http.post(path, json={**body, "rid": f"cut {path}"}) as answer:
            async for event in events(answer):
                seen.append(event)
                if len(seen) == 4:
                    await post(http, "/abort_request", rid=f"cut {path}")
        last = seen[-1]
        if path == "/generate":
            assert last["meta_info"]["finish_reason"] == {"type": "abort", "message": "The request was aborted."}
            assert 3 <= last["meta_info"]["completion_tokens"] == len(last["output_ids"]) < 3500
        else:
            assert last["choices"][0]["finish_reason"] == "abort"


async def test_abort_all_ends_whole_answers_and_waiting_ones(http, serving):
    """More requests than run at once: those that wait end with no tokens, the others with some."""
    ask = {"input_ids": [[i + 5, *range(20, 200)] for i in range(40)], "sampling_params": LONG, "return_logprob": True}
    running = asyncio.ensure_future(post(http, "/generate", **ask))
    await until(lambda: serving[1][-1].state()["num_running"] > 4)
    await post(http, "/abort_request", abort_all=True)
    for answer in await asyncio.wait_for(running, 20):
        info = answer["meta_info"]
        assert info["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) == info["completion_tokens"] == len(info["output_token_logprobs"]) < 3500


async def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_changes_no_token(http, serving, mode):
    ask = {"text": COUNT, "sampling_params": {**LONG, "max_new_tokens": 100}}
    expected = await post(http, "/generate", **ask)
    seen: list[dict[str, Any]] = []

    async def follow():
        async with http.post("/generate", json={**ask, "stream": True}) as answer:
            async for event in events(answer):
                seen.append(event)

    stream = asyncio.ensure_future(follow())
    await until(lambda: len(seen) > 3)
    await post(http, "/pause_generation", mode=mode)
    decode = serving[1][-1]
    count, state = len(seen), decode.state()
    assert (decode.pages()["held"] == 0) is (mode == "retract") and state["num_running"] + state["num_waiting"] == 1
    newcomer = asyncio.ensure_future(post(http, "/generate", text="Hi", sampling_params={"max_new_tokens": 4}))
    async with http.post("/flush_cache") as answer:
        assert (answer.status == 200) is (mode == "retract"), await answer.text()
    await asyncio.sleep(0.2)  # long enough for dozens of steps
    assert len(seen) <= count + 2 and not newcomer.done(), "a paused server went on"
    await post(http, "/continue_generation")
    await asyncio.wait_for(stream, 30)
    assert seen[-1]["output_ids"] == expected["output_ids"]
    assert (await asyncio.wait_for(newcomer, 20))["meta_info"]["completion_tokens"] > 0


async def test_a_pause_aborts_by_default(http):
    ask = {"text": COUNT, "sampling_params": LONG, "stream": True}
    async with http.post("/generate", json=ask) as answer:
        seen = []
        async for event in events(answer):
            seen.append(event)
            if len(seen) == 2:
                await post(http, "/pause_generation")
        assert seen[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    waits = asyncio.ensure_future(post(http, "/generate", text=COUNT, rid="waits", sampling_params=LONG))
    end = time.monotonic() + 20
    while not waits.done() and time.monotonic() < end:
        await post(http, "/abort_request", rid="waits")
        await asyncio.wait([waits], timeout=0.02)
    assert (await waits)["output_ids"] == [] and (await waits)["meta_info"]["finish_reason"]["type"] == "abort"
    async with http.post("/pause_generation", json={"mode": "later"}) as answer:
        assert answer.status in (400, 502) and "mode" in await answer.text()
    await post(http, "/continue_generation")
    assert (await post(http, "/generate", text="Hi", sampling_params={"max_new_tokens": 4}))["output_ids"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_abort_at_one_half_of_a_pair_ends_both(relay, role):
    """The other half stands still and has not heard of the request: it hears of its end as soon as it asks."""
    at, away = (relay.prefill[0], relay.decode[0]) if role == "prefill" else (relay.decode[0], relay.prefill[0])
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as http:
        await post(http, away.url + "/pause_generation", mode="in_place")
        asked = asyncio.ensure_future(post(http, relay.url + "/generate", text=COUNT, rid="half", sampling_params=LONG))
        await until(lambda: at.state()["num_waiting"] + at.state()["num_transferring"] == 1)
        await post(http, at.url + "/abort_request", rid="half")
        await until(lambda: at.state()["num_waiting"] + at.state()["num_transferring"] == 0)
        await post(http, away.url + "/continue_generation")
        answer = await asyncio.wait_for(asked, 20)
    assert answer["output_ids"] == [] and answer["meta_info"]["finish_reason"]["type"] == "abort"
    for server in relay.workers:
        server.assert_clean()
