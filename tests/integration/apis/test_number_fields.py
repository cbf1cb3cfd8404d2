"""Extreme numbers in every number that a request body, a URL or a form holds: no 5xx, and an engine that goes on.

The fields are derived from the servers' OpenAPI document, so that a field to come is tried, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp

from baton.tests.bench.api_fuzz import assert_well, document_of

EXTREMES = ("0", "-1", str(2**31), str(2**63), str(-(2**63) - 1), str(2**64 - 1), str(2**64), "1e308", "1e400", "NaN",
            "-0.0", "4.9e-324")
MARK = "@number@"
HELLO = [{"role": "user", "content": "Hi"}]
# A valid body for each path, to which one number is added. Where none is named here, the body is empty.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 1}},
    "/v1/embeddings": {"input": "Hi"}, "/encode": {"text": "Hi"}, "/classify": {"text": "Hi"},
    "/v1/rerank": {"query": "a", "documents": ["b"]}, "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [5]},
    "/score": {"query": "a", "items": ["b"], "label_token_ids": [5]},
    "/v1/tokenize": {"prompt": "Hi"}, "/tokenize": {"prompt": "Hi"},
    "/v1/detokenize": {"tokens": [5]}, "/detokenize": {"tokens": [5]},
    "/v1/batches": {"input_file_id": "file-none", "endpoint": "/v1/completions"},
    "/parse_function_call": {"text": "Hi", "tools": []}, "/separate_reasoning": {"text": "Hi"},
    "/open_session": {"capacity_of_str_len": 9}, "/close_session": {"session_id": "none"},
    "/abort_request": {"rid": "none"},
    "/update_weights_from_disk": {"model_path": "/nowhere"}, "/set_internal_state": {"server_args": {}},
}
# What a number needs beside it to be looked at.
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True}, "token_ids_logprob": {"return_logprob": True},
    "top_logprobs_num": {"return_logprob": True}, "logprob_start_len": {"return_logprob": True},
    "input_ids": {"text": None}, "input_embeds": {"text": None},
    "bootstrap_port": {"bootstrap_host": "127.0.0.1", "bootstrap_room": 5},
    "custom_params": {"custom_logit_processor": "baton.common.sampling.builtin_processors:DisallowedTokens"},
}


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    return schema


def numbers(document: dict[str, Any], schema: dict[str, Any], seen: tuple[int, ...] = ()) -> Iterator[Any]:
    """A value of the schema for each number in it, which stands in its place as MARK; optional parts alone."""
    schema = resolved(document, schema)
    if id(schema) in seen:
        return
    seen = (*seen, id(schema))
    for option in schema.get("anyOf", ()):
        yield from numbers(document, option, seen)
    kind = schema.get("type")
    if kind in ("integer", "number"):
        yield MARK
    elif kind == "array" and "prefixItems" not in schema:
        for inner in numbers(document, schema.get("items") or {}, seen):
            yield [inner]
    elif kind == "object" or "properties" in schema:
        whole = {} if len(seen) == 1 else sample(document, schema)  # the outermost object has its entry in BODIES
        for name, field in schema.get("properties", {}).items():
            for inner in numbers(document, field, seen):
                yield {**whole, name: inner}
        if isinstance(extra := schema.get("additionalProperties"), dict):
            for inner in numbers(document, extra, seen):
                yield {"5": inner}
        elif "properties" not in schema:
            yield {"x": MARK}
    elif not schema.keys() - {"default", "description", "title"}:  # anything
        yield {"x": MARK}


def sample(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    """A plain value of the schema."""
    schema = resolved(document, schema)
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return sample(document, schema["anyOf"][0])
    if schema.get("type") == "object" or "properties" in schema:
        return {name: sample(document, schema["properties"][name]) for name in schema.get("required", ())}
    return {"array": [], "integer": 1, "number": 1, "boolean": True, "null": None}.get(schema.get("type", ""), "user")


def merged(body: Any, added: Any) -> Any:
    """``added`` on top of ``body``: objects join."""
    if isinstance(body, dict) and isinstance(added, dict):
        return {**body, **{name: merged(body.get(name), value) for name, value in added.items()}}
    return added


def requests(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and JSON, with MARK (in quotes) in place of one number, for each number of each body."""
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" not in content or path == "/start_profile":
            continue
        for added in numbers(document, content["application/json"]["schema"]):
            text = json.dumps(merged(BODIES.get(path, {}), added))
            for name, beside in BESIDE.items():
                if f'"{name}"' in text:
                    text = json.dumps(merged(json.loads(text), beside))
            yield path, text


def test_numbers_are_found(unified):
    found = list(requests(document_of(unified.url)))
    assert len(found) > 200 and {path for path, _ in found} >= BODIES.keys() - {
        "/separate_reasoning", "/close_session", "/abort_request", "/update_weights_from_disk"}
    for name in ("disagg_prefill_dp_rank", "logit_bias", "label_token_ids", "custom_params", "seconds",
                 "chunked_prefill_size", "input_embeds", "continuation"):
        assert any(f'"{name}"' in text for _, text in found), name


async def answers(url: str, sent: list[tuple[str, str]]) -> list[str]:
    """What failed of the requests, with a body or without: 5xx, or no answer."""
    failures: list[str] = []
    waiting = iter(sent)

    async def client(http: aiohttp.ClientSession) -> None:
        for path, text in waiting:
            try:
                async with http.request("POST" if text else "GET", url + path, data=text,
                                        headers={"Content-Type": "application/json"}) as answer:
                    told = await answer.text()
                    if answer.status >= 500:
                        failures.append(f"{path} {text[:300]}: {answer.status} {told[:300]}")
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                failures.append(f"{path} {text[:300]}: {error!r}")

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as http:
        await asyncio.gather(*[client(http) for _ in range(8)])
    return failures


def test_no_number_breaks_a_server(unified):
    sent = [(path, text.replace(f'"{MARK}"', extreme)) for path, text in requests(document_of(unified.url))
            for extreme in EXTREMES]
    sent += [(f"{path}?limit={extreme}", "") for path in ("/v1/files", "/v1/batches") for extreme in EXTREMES]
    assert not (failures := asyncio.run(answers(unified.url, sent))), "\n".join(failures[:30])
    assert_well(unified, [unified])


def test_no_number_breaks_a_pair(relay):
    """The fields that a unified server does not look at, or that another server is told of."""
    found = [(path, text) for path, text in requests(document_of(relay.decode[0].url))
             if any(name in text for name in ("_rank", "previous_room", "custom_params", "continuation"))]
    sent = [(path, text.replace(f'"{MARK}"', extreme)) for path, text in found for extreme in EXTREMES]
    assert len(sent) > 300
    assert not (failures := asyncio.run(answers(relay.url, sent))), "\n".join(failures[:30])
    assert_well(relay.router, relay.workers)
