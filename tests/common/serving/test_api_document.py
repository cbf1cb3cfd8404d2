"""``/openapi.json``"""

from __future__ import annotations

import re
from typing import Any

import aiohttp
import openai

from baton.common.commands.registry import all_endpoints
from baton.common.serving import app

# What POSTs take no body, or none that is JSON.
BODILESS = {"/begin_weight_update", "/v1/files", "/generate_from_file", "/v1/batches/{batch_id}/cancel", "/flush_cache",
            "/v1/responses/{response_id}/cancel",
            "/continue_generation", "/stop_profile",
            "/start_expert_distribution_record", "/stop_expert_distribution_record", "/get_memory_pool_size",
            "/freeze_gc", "/clear_hicache_storage_backend", "/hicache/storage-backend/clear"}


async def fetch(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/openapi.json") as answer:
        assert answer.status == 200
        return await answer.json()


async def test_the_root_says_what_this_is_and_links_what_is_there(http: aiohttp.ClientSession) -> None:
    async with http.get("/") as answer:
        told = await answer.json()
    assert "unified server" in told["description"]
    for path in told["links"]:
        async with http.get(path) as answer:
            assert answer.status == 200, path
    async with http.get("/", headers={"Accept": "text/html"}) as answer:
        assert answer.content_type == "text/html" and '<a href="/openapi.json">' in await answer.text()


async def test_every_route_is_described(http: aiohttp.ClientSession) -> None:
    document = await fetch(http)
    assert document["openapi"] == "3.1.0"
    ids = []
    for method, path, _ in app.all_routes(all_endpoints()):
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", path)
        operation = document["paths"][path][method.lower()]
        ids.append(operation["operationId"])
        assert re.findall(r"\{(\w+)\}", path) == [
            parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"]
        assert operation["summary"].endswith(".")
        if method == "POST" and path not in BODILESS:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            assert schema, f"{path}: name its request's struct in common/serving/api_document.py"
    assert len(set(ids)) == len(ids)


async def test_references_lead_somewhere(http: aiohttp.ClientSession) -> None:
    document = await fetch(http)
    schemas = document["components"]["schemas"]

    def follow(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].removeprefix("#/components/schemas/") in schemas
            for item in value.values():
                follow(item)
        elif isinstance(value, list):
            for item in value:
                follow(item)

    follow(document)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in schemas)
    chat = schemas["ChatRequest"]
    assert chat["required"] == ["messages"] and {"temperature", "bootstrap_room"} <= chat["properties"].keys()


async def test_openais_other_fields_are_taken(client: openai.AsyncOpenAI) -> None:
    """Documented fields that mean nothing here change nothing."""
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], user="me", metadata={"a": "b"}, store=False,
        service_tier="auto", safety_identifier="x", prompt_cache_key="k", prompt_cache_retention="24h",
        modalities=["text"], verbosity="low", reasoning_effort="low",
        prediction={"type": "content", "content": "hello"})
    assert answer.choices[0].message.content == "hello"
    completion = await client.completions.create(model="tiny", prompt="hello", user="me")
    assert completion.choices[0].text == "hello"
    response = await client.responses.create(
        model="tiny", input="hello", user="me", metadata={"a": "b"}, service_tier="auto", safety_identifier="x",
        prompt_cache_key="k", include=["reasoning.encrypted_content"], text={"verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"}, parallel_tool_calls=True, truncation="disabled")
    assert response.output_text == "hello"
