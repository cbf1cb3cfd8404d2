"""``/tokenize``, ``/detokenize`` and the models' entries."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest

from baton.tests.helpers.fake_engine import CONTEXT, EOS


async def ask(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_prompt_there_and_back(http: aiohttp.ClientSession, prefix: str) -> None:
    status, found = await ask(http, f"{prefix}/tokenize", prompt="hello wörld", return_token_strs=True)
    assert status == 200 and found["count"] == len(found["tokens"]) and found["max_model_len"] == CONTEXT
    assert found["token_strs"][0] == "hello" and len(found["token_strs"]) == found["count"]
    status, back = await ask(http, f"{prefix}/detokenize", tokens=found["tokens"])
    assert status == 200 and back == {"text": "hello wörld", "prompt": "hello wörld"}


async def test_batches(http: aiohttp.ClientSession) -> None:
    _, found = await ask(http, "/tokenize", prompt=["hello", "the quick fox"], add_special_tokens=False)
    assert found["count"] == [len(ids) for ids in found["tokens"]] and "token_strs" not in found
    _, back = await ask(http, "/detokenize", tokens=found["tokens"])
    assert back["text"] == ["hello", "the quick fox"]
    _, empty = await ask(http, "/detokenize", tokens=[])
    assert empty["text"] == ""
    _, none = await ask(http, "/tokenize", prompt=[])
    assert (none["tokens"], none["count"]) == ([], [])


async def test_special_tokens_are_sglangs_or_vllms_business(http: aiohttp.ClientSession) -> None:
    _, found = await ask(http, "/tokenize", prompt="hello")
    tokens = [*found["tokens"], EOS]
    assert (await ask(http, "/detokenize", tokens=tokens))[1] == {"text": "hello", "prompt": "hello<end>"}
    assert (await ask(http, "/detokenize", tokens=tokens, skip_special_tokens=False))[1]["text"] == "hello<end>"
    assert (await ask(http, "/detokenize", tokens=tokens, skip_special_tokens=True))[1]["prompt"] == "hello"


async def test_a_chat_counts_as_much_as_its_request(http: aiohttp.ClientSession, client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello world"}]
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for extra in ({}, {"tools": tools}):
        _, found = await ask(http, "/tokenize", messages=messages, **extra)
        answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, **extra)
        assert answer.usage is not None and found["count"] == answer.usage.prompt_tokens


@pytest.mark.parametrize("path, body, param", [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"), ("/tokenize", {"prompt": 3}, "prompt"),
    ("/tokenize", {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True,
                   "add_generation_prompt": True}, "continue_final_message"),
    ("/detokenize", {"tokens": [1, [2]]}, "tokens"), ("/detokenize", {"tokens": [10**7]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {"tokens": ["a"]}, "tokens[0]")])
async def test_refusals(http: aiohttp.ClientSession, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = await ask(http, path, **body)
    assert status == 400 and answer["error"]["param"] == param and answer["error"]["message"].endswith(".")


async def test_one_model(client: openai.AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    listed = (await client.models.list()).data[0]
    model = await client.models.retrieve(listed.id)  # a path, whose slashes the client leaves as they are or encodes
    assert model == listed and model.max_model_len == CONTEXT  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError) as missing:
        await client.models.retrieve("gpt-5")
    assert missing.value.code == "model_not_found"
