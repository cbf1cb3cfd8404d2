"""A server goes on with an answer that another one began: the events that were still to come, and no other."""

from __future__ import annotations

import json

import aiohttp
import pytest

from baton.tests.tinychat.tasks import held_out

PROMPT = {"prompt": "What is the capital of France?", "max_tokens": 24, "ignore_eos": True}
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
QUESTION = held_out(1, seed=5, tasks=("needle",))[0].messages
CASES = {
    "chat greedy": ("/v1/chat/completions", {"messages": QUESTION, "temperature": 0}),
    "chat seeded": ("/v1/chat/completions", {"messages": QUESTION, "temperature": 1.3, "seed": 7, "max_tokens": 20,
                                             "ignore_eos": True, "stream_options": {"include_usage": True}}),
    "chat with tools": ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}], "temperature": 0, "tools": TOOLS}),
    "completion": ("/v1/completions", {**PROMPT, "temperature": 0, "stream_options": {"include_usage": True}}),
    "completion with stop": ("/v1/completions", {**PROMPT, "temperature": 0.9, "seed": 3, "min_tokens": 4,
                                                 "stop": ["zzz", "e e"]}),
    "completion with penalties": ("/v1/completions", {
        **PROMPT, "temperature": 0.8, "seed": 4, "frequency_penalty": 0.9, "repetition_penalty": 1.1, "min_tokens": 9,
        "presence_penalty": 0.4, "logit_bias": {"40": 2}, "echo": True}),
    "chat by a grammar": ("/v1/chat/completions", {
        "messages": QUESTION, "temperature": 1.0, "seed": 4, "max_tokens": 40,
        "regex": "[a-z]{2,6}( [a-z]{2,6}){2,4}"}),
    "native": ("/generate", {"text": PROMPT["prompt"],
                             "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}}),
}


async def stream(http, path, body):
    """The events of a stream, parsed; [DONE] checked and left out."""
    async with http.post(path, json={**body, "stream": True}, headers={"X-Baton-Token-Ids": "1"}) as answer:
        assert answer.status == 200, await answer.text()
        events = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def ids_of(event):
    """Token ids that an event adds (of /generate: all so far)."""
    if "output_ids" in event:
        return event["output_ids"]
    return [token for choice in event["choices"] for token in choice.get("token_ids", ())]


def told(events, path):
    """What a client makes of the events."""
    if path == "/generate":
        last, info = events[-1], events[-1]["meta_info"]
        return last["text"], last["output_ids"], info["finish_reason"], info["completion_tokens"]
    choices = [event["choices"][0] for event in events if event["choices"]]
    deltas = [choice.get("delta", {"content": choice.get("text")}) for choice in choices]
    calls: dict[int, dict[str, str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        so_far = calls.setdefault(call["index"], {"name": "", "arguments": ""})
        for part in so_far:  # several tokens may come in one event
            so_far[part] += call["function"].get(part) or ""
    usage = next((event["usage"] for event in events if event["usage"]), None)
    if usage:
        usage["prompt_tokens_details"] = None  # the second time it is cached
    text = "".join(delta.get("content") or "" for delta in deltas)
    roles, ids = sum("role" in delta for delta in deltas), [token for event in events for token in ids_of(event)]
    return text, roles, calls, choices[-1]["finish_reason"], ids, usage


@pytest.mark.parametrize("name", CASES)
async def test_continued_anywhere_the_answer_is_the_same(unified, name):
    path, body = CASES[name]
    async with aiohttp.ClientSession(unified.url) as http:
        whole = await stream(http, path, body)
        assert len(whole) > 2
        for cut in sorted({2, 3, len(whole) // 2, len(whole) - 2}):
            done = whole[:cut]
            if not ids_of(done[-1]) or any(choice["finish_reason"] for choice in done[-1].get("choices", ())):
                continue  # within a piece that a server sends at once
            tokens = ids_of(done[-1]) if path == "/generate" else [token for event in done for token in ids_of(event)]
            identity = {"id": done[0]["meta_info"]["id"]} if path == "/generate" else {
                "id": done[0]["id"], "created": done[0]["created"]}
            rest = await stream(http, path, {**body, "continuation": {"token_ids": tokens, **identity}})
            assert told(done + rest, path) == told(whole, path), cut
            if path != "/generate":
                assert {(event["id"], event["created"]) for event in rest} == {(whole[0]["id"], whole[0]["created"])}


async def test_ids_are_told_on_request_only(unified):
    path, body = CASES["chat greedy"]
    async with (aiohttp.ClientSession(unified.url) as http,
                http.post(path, json={**body, "stream": True}) as answer):
        assert "token_ids" not in await answer.text()


@pytest.mark.parametrize("change", [{"n": 2}, {"logprobs": 1}, {"max_tokens": 3},
                                    {"continuation": {"token_ids": [10**9]}}])
async def test_what_cannot_be_continued_is_refused(unified, change):
    body = {**PROMPT, "continuation": {"token_ids": [1, 2, 3]}, **change}
    async with aiohttp.ClientSession(unified.url) as http, http.post("/v1/completions", json=body) as answer:
        assert answer.status == 400 and "continuation" in (await answer.json())["error"]["param"]


SPOKEN = {
    "messages": ("/v1/messages", {"messages": QUESTION, "temperature": 0, "max_tokens": 60}),
    "messages with tools": ("/v1/messages", {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}], "temperature": 0, "max_tokens": 60,
        "tools": [{"name": "weather", "description": "Weather of a city",
                   "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]}),
    "response": ("/v1/responses", {"input": QUESTION, "temperature": 0}),
    "response with tools": ("/v1/responses", {
        "input": "What is the weather in Paris?", "temperature": 0,
        "tools": [{"type": "function", **TOOLS[0]["function"]}]}),
}


async def pieces_of(http, path, body):
    """The chunks of a stream as ``(events, ids told in the comment behind them)``."""
    async with http.post(path, json={**body, "stream": True}, headers={"X-Baton-Token-Ids": "1"}) as answer:
        assert answer.status == 200, await answer.text()
        pieces, events = [], []
        for block in (await answer.text()).split("\n\n")[:-1]:
            if block.startswith(": "):
                pieces.append((events, json.loads(block[2:])["token_ids"]))
                events = []
            else:
                events.append(json.loads(block.split("data: ", 1)[1]))
    assert not events, "the last tokens are not told"
    return pieces


def heard(events):
    """What a client makes of the events: neighbouring pieces of one text are one, what differs between runs is none."""
    said = []
    for event in json.loads(json.dumps(events)):
        kind = event["type"]
        for told in (event, event.get("response") or event.get("message") or {}):
            told.pop("usage", None)  # the second time more is cached
            told.pop("completed_at", None)
        event.pop("sequence_number", None)
        if not kind.endswith("delta") or kind == "message_delta":
            said.append(event)
            continue
        delta = event.pop("delta")
        piece = delta if isinstance(delta, str) else delta.get("text") or delta.get("partial_json")
        if said and said[-1].get("type") == kind:
            said[-1]["all"] += piece
        else:
            said.append({**event, "all": piece})
    return said


@pytest.mark.parametrize("name", SPOKEN)
async def test_answers_in_other_apis_are_continued_too(unified, name):
    path, body = SPOKEN[name]
    async with aiohttp.ClientSession(unified.url) as http:
        whole = await pieces_of(http, path, body)
        all_events = [event for events, _ in whole for event in events]
        first = all_events[0].get("response") or all_events[0]["message"]
        assert len(whole) > 4
        for cut in range(1, len(whole) - 1):
            done = [event for events, _ in whole[:cut] for event in events]
            begun = {"token_ids": [token for _, ids in whole[:cut] for token in ids], "id": first["id"]}
            if path == "/v1/responses":
                begun |= {"created": first["created_at"], "sequence_number": done[-1]["sequence_number"]}
            rest = [event for events, _ in await pieces_of(http, path, {**body, "continuation": begun})
                    for event in events]
            assert heard(done + rest) == heard(all_events), cut
            if path == "/v1/responses":
                assert [event["sequence_number"] for event in done + rest] == list(range(len(done + rest)))


@pytest.mark.parametrize("name", SPOKEN)
async def test_comments_are_for_those_who_ask(unified, name):
    path, body = SPOKEN[name]
    async with (aiohttp.ClientSession(unified.url) as http, http.post(path, json={**body, "stream": True}) as answer):
        text = await answer.text()
        assert "token_ids" not in text and "\n: " not in text
