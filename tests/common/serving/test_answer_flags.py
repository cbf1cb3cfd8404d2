"""What servers tell and take only where their flags say so, and what is refused with a way out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.tests.helpers.serving import Server

CHAT = {"messages": [{"role": "user", "content": "hello world"}]}


@pytest.mark.parametrize("name,value", [
    ("custom_logit_processor", "module:Name"), ("custom_logit_processor", ["module:Name"]),
    ("return_hidden_states", True), ("return_hidden_states", [True]),
])
async def test_generate_names_the_flag_that_is_missing(http: aiohttp.ClientSession, name: str, value: Any) -> None:
    async with http.post("/generate", json={"text": ["hello"], name: value}) as answer:
        error = (await answer.json())["error"]
    assert answer.status == 400 and error["param"] == name and f"--enable-{name.replace('_', '-')}" in error["message"]
    harmless = [None] if isinstance(value, list) else None
    async with http.post("/generate", json={"text": ["hello"], name: harmless and [False]
                                            if name.startswith("return") else harmless}) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("path,body", [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("name,value,instead", [
    ("prompt_logprobs", 0, "echo and logprobs"), ("prompt_logprobs", 5, "logprob_start_len"),
    ("return_hidden_states", True, "/generate"), ("custom_logit_processor", "a:b", "/generate"),
])
async def test_what_other_endpoints_offer_is_named(http: aiohttp.ClientSession, path: str, body: dict[str, Any],
                                                   name: str, value: Any, instead: str) -> None:
    async with http.post(path, json={**body, name: value}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, name) and instead in error["message"]
    async with http.post(path, json={**body, name: None}) as answer:
        assert answer.status == 200


@pytest.fixture(scope="module")
def silent(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("silent") / "log", "--model-path", str(checkpoint),
                    "--no-enable-cache-report")
    try:
        yield server.wait_ready()
    finally:
        server.kill()


async def test_usage_without_cached_tokens(silent: Server, http: aiohttp.ClientSession) -> None:
    """The fake engine says that one token of each prompt was cached."""
    anthropic = {"max_tokens": 9, "model": "tiny", **CHAT}
    told: dict[bool, list[dict[str, Any]]] = {}
    async with aiohttp.ClientSession(silent.url) as without:
        for session in (http, without):
            usages = told.setdefault(session is http, [])
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello world"}),
                               ("/v1/responses", {"input": "hello world"}), ("/v1/messages", anthropic)):
                async with session.post(path, json=body) as answer:
                    usages.append((await answer.json())["usage"])
            streamed = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
            async with session.post("/v1/chat/completions", json=streamed) as answer:
                assert ('"prompt_tokens_details"' in await answer.text()) is (session is http)
    for usage, key in zip(told[True], ("prompt_tokens_details", "prompt_tokens_details", "input_tokens_details")):
        assert usage[key]["cached_tokens"] == 1
    chat, completion, response, message = told[False]
    assert "prompt_tokens_details" not in chat and "prompt_tokens_details" not in completion
    assert "input_tokens_details" not in response
    assert message["cache_read_input_tokens"] == 0
    assert message["input_tokens"] == told[True][3]["input_tokens"] + 1
