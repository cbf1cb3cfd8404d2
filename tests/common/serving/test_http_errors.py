"""Bad input, failures, aborts, clients that leave; what the server tells of itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from baton.tests.helpers.fake_engine import CONTEXT, Seed
from baton.tests.helpers.serving import Server, generate, info, user, wait_running

# ---------------------------------------------------------------- bad input


CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.mark.parametrize(("path", "body", "status", "sentence"), [
    (CHAT, b"{", 400, "not valid JSON"),
    (CHAT, b"[]", 400, "expected object"),
    (CHAT, {"messages": user("hi"), "max_tokens": "many"}, 400, "max_tokens: expected int"),
    (CHAT, {"messages": user("hi"), "max_tokens": -5}, 400, "max_tokens must be 0 or more"),
    (CHAT, {"messages": user("hi"), "max_tokens": 10**30}, 400, "max_tokens: expected int <= 2147483647"),
    (CHAT, {"messages": user("hi"), "seed": 10**30}, 400, "seed: expected int <= 9223372036854775807"),
    (CHAT, {"messages": user("hi"), "model": "other"}, 404, "'other' does not exist"),
    (CHAT, {"messages": user("")}, 400, "messages is empty"),
    (CHAT, {"messages": [{"role": "forbidden", "content": "x"}]}, 400, "messages[0].role must be system, developer,"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content is missing"),
    (CHAT, {"messages": [*user("x"), {"role": "assistant", "content": None}]}, 400, "messages[1].content is missing"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]}, 400,
     "function_call is not supported here; send tool_calls instead."),
    (CHAT, {"messages": user("zq" * CONTEXT)}, 400,
     f"is longer than the model's context length: this model's maximum context length is {CONTEXT} tokens"),
    (TEXT, {"prompt": ""}, 400, "prompt is empty"),
    (TEXT, {"prompt": [5, 10**6]}, 400, "token id 1000000"),
    (TEXT, {"prompt": [5, 10**30]}, 400, "prompt[1]: expected int <= 2147483647"),
    (TEXT, {"prompt": [-1]}, 400, "token id -1"),
    (TEXT, {"prompt": "x", "max_tokens": CONTEXT}, 400, f"this model's maximum context length is {CONTEXT} tokens"),
    (TEXT, {"prompt": "x", "n": 10_000}, 400, "n must be between"),
    (TEXT, {"prompt": "x" * 10_000_000}, 400, "10000000 characters"),
    (NATIVE, {"input_ids": []}, 400, "input_ids is empty"),
    (NATIVE, {"text": "x", "sampling_params": {"max_new_tokens": -1}}, 400, "max_new_tokens must be 0 or more"),
    (NATIVE, {"text": "x", "sampling_params": {"temperature": -1}}, 400, "temperature must be"),
    (NATIVE, {"text": "x", "bootstrap_room": "five"}, 400, "bootstrap_room: expected"),
    (NATIVE, {"text": "x", "logprob_start_len": 5, "return_logprob": True}, 400, "logprob_start_len must be"),
    (NATIVE, {"text": "x", "rid": ""}, 400, "rid must have"),
    ("/abort_request", {}, 400, "Give a rid"),
    ("/nowhere", {}, 404, "no route POST /nowhere"),
    ("/v1/models", {}, 405, "takes GET, HEAD, not POST"),
])
async def test_bad_input(http: aiohttp.ClientSession, path: str, body: Any, status: int, sentence: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with http.post(path, data=data) as answer:
        assert answer.status == status
        error = (await answer.json())["error"]
    assert sentence in error["message"] and {"type", "param", "code"} < error.keys()
    async with http.get("/health") as answer:
        assert answer.status == 200


async def test_too_large_body(http: aiohttp.ClientSession) -> None:
    async with http.post(TEXT, data=b" " * (33 * 1024 * 1024)) as answer:
        assert answer.status == 413
        assert "--max-payload-size" in (await answer.json())["error"]["message"]


async def test_request_ids_are_echoed(http: aiohttp.ClientSession) -> None:
    async with http.get("/health", headers={"X-Request-Id": "abc-1"}) as answer:
        assert answer.headers["X-Request-Id"] == "abc-1"
    async with http.post("/nowhere") as answer:
        assert len(answer.headers["X-Request-Id"]) == 32


async def test_key_is_needed_but_for_health_and_metrics(server: Server) -> None:
    async with aiohttp.ClientSession(server.url) as session:
        for path, status in (("/health", 200), ("/metrics", 200), ("/v1/models", 401), ("/get_server_info", 401)):
            async with session.get(path) as answer:
                assert answer.status == status, path


# ---------------------------------------------------------------- errors, aborts, disconnects


async def test_errors_before_and_within_a_stream(http: aiohttp.ClientSession) -> None:
    body: dict[str, Any] = {"messages": user("hello world"), "stream": True, "seed": Seed.FAIL_FIRST}
    async with http.post(CHAT, json=body) as answer:
        assert answer.status == 502 and answer.content_type == "application/json"
        assert (await answer.json())["error"]["code"] == "kv_transfer_failed"
    async with http.post(CHAT, json=body | {"seed": Seed.FAIL_LATER}) as answer:
        assert answer.status == 200
        lines = [line async for line in answer.content if line.strip()]
    assert json.loads(lines[-1][6:])["error"]["code"] == "kv_transfer_failed"
    assert b"[DONE]" not in b"".join(lines)
    async with http.get("/metrics") as answer:
        assert 'outcome="kv_transfer_failed"} 2.0' in await answer.text()


@pytest.mark.parametrize("body", [
    {"text": ["hello", "fox"], "sampling_params": {"seed": int(Seed.SILENT)}},
    {"text": "hello", "sampling_params": {"seed": int(Seed.SILENT)}, "stream": True},
    {"text": "hello", "sampling_params": {"ignore_eos": True, "max_new_tokens": CONTEXT - 9}, "stream": True},
])
async def test_a_client_that_leaves_frees_the_engine(http: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    aborted = (await info(http))["counters"]["aborted_requests"]
    task = asyncio.create_task(generate(http, **body))
    await wait_running(http, 2 if isinstance(body["text"], list) else 1)
    task.cancel()
    assert await wait_running(http, 0) < 3
    assert (await info(http))["counters"]["aborted_requests"] > aborted


async def test_abort_request_and_flush(http: aiohttp.ClientSession) -> None:
    for order in ({"rid": "job"}, {"abort_all": True}):
        task = asyncio.create_task(generate(http, text="hello", rid="job", sampling_params={"seed": int(Seed.SILENT)}))
        await wait_running(http, 1)
        async with http.post("/flush_cache") as answer:
            refused = await answer.json()
        assert answer.status == 400 and refused["success"] is False
        assert refused["message"] == refused["error"]["message"] == "Requests run."
        status, answer_body = await generate(http, text="hello", rid="job")
        assert status == 409 and "'job' is in use" in answer_body["error"]["message"]
        async with http.post("/abort_request", json=order) as answer:
            assert answer.status == 200
        status, answer_body = await task
        assert status == 200 and answer_body["output_ids"] == []
        assert answer_body["meta_info"]["finish_reason"] == {"type": "abort", "message": "The request was aborted."}
    async with http.get("/flush_cache") as answer:
        assert answer.status == 200


async def test_requests_that_wait_for_a_grammar_are_aborted(http: aiohttp.ClientSession) -> None:
    """The fake engine never says that a grammar is ready."""
    async def chat() -> str:
        ask = {"messages": user("hello"), "regex": "[a-z]+", "n": 2, "rid": "chat", "stream": True}
        async with http.post(CHAT, json=ask) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.text()

    text = asyncio.create_task(chat())
    whole = asyncio.create_task(generate(http, text="hello", rid="job", sampling_params={"regex": "[a-z]+"}))
    end = asyncio.get_running_loop().time() + 20
    while not (whole.done() and text.done()):
        assert asyncio.get_running_loop().time() < end
        for rid in ("job", "chat"):
            async with http.post("/abort_request", json={"rid": rid}) as answer:
                assert answer.status == 200
        await asyncio.sleep(0.05)
    status, body = await whole
    assert status == 200 and body["output_ids"] == [] and body["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await text).count('"finish_reason":"abort"') == 2
    assert (await info(http))["num_running"] == 0


async def test_info_and_metrics(http: aiohttp.ClientSession) -> None:
    await generate(http, text="hello")
    await generate(http, text=[])
    async with http.get("/get_server_info") as answer:
        found = await answer.json()
    assert found["disaggregation_mode"] == "null" and found["disaggregation_bootstrap_port"] == 8998
    assert found["api_key"] is None and found["internal_states"][0]["free_pages"] == 10
    for path in ("/get_model_info", "/model_info"):
        async with http.get(path) as answer:
            assert (await answer.json())["context_length"] == CONTEXT
    async with http.get("/health_generate") as answer:
        assert answer.status == 200
    async with http.get("/metrics") as answer:
        text = await answer.text()
    assert 'outcome="invalid_request"}' in text and 'outcome="stop"}' in text
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
    for name in ("num_requests_running", "token_usage", "kv_pages_free", "event_loop_lag_seconds_count"):
        assert f"baton:{name}" in values
    for name in ("prompt_tokens_total", "generation_tokens_total", "cached_tokens_total", "num_requests_total",
                 "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
                 "e2e_request_latency_seconds_count", "engine_finished_requests_total"):
        assert values[f"baton:{name}"] > 0, name


async def test_64_streams_at_once(client: openai.AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    async def ask(i: int) -> None:
        text = f"request {i} " * (1 + i % 5)
        stream = await client.chat.completions.create(model="tiny", messages=user(text), stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text

    await asyncio.gather(*(ask(i) for i in range(64)))
    assert (await info(http))["num_running"] == 0


async def test_a_command_that_is_refused_says_no_success(http: aiohttp.ClientSession) -> None:
    """In SGLang's words and with OpenAI's error object."""
    async with http.post("/update_weights_from_disk", json={}) as answer:
        refused = await answer.json()
    assert answer.status == 400 and refused["success"] is False
    assert refused["message"] == refused["error"]["message"] and "model_path" in refused["message"]
