"""Answers of ``/v1/responses`` that the server stores: conversations, the background, and what is forgotten."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from baton.common.api.errors import NotFound, Overloaded
from baton.common.serving.context.response_store import ResponseStore, StoredResponse
from baton.tests.helpers.fake_engine import Seed
from baton.tests.helpers.serving import Server, wait_running

ENDLESS: Any = {"ignore_eos": True}


async def test_a_conversation(client: openai.AsyncOpenAI) -> None:
    """The fake model says the prompt again: what it said last is all that was said before."""
    first = await client.responses.create(model="tiny", input="[one]", instructions="[kind]", metadata={"a": "b"})
    assert first.store is True and first.output_text == "[kind][one]"  # type: ignore[attr-defined]
    kept = await client.responses.retrieve(first.id)
    assert kept.model_dump() == first.model_dump()
    second = await client.responses.create(model="tiny", input=[{"role": "user", "content": "[two]"}],
                                           previous_response_id=first.id)
    assert second.output_text == "[one][kind][one][two]" and second.previous_response_id == first.id
    third = await client.responses.create(model="tiny", input="[three]", previous_response_id=second.id, stream=True)
    last = [event async for event in third][-1]
    assert last.type == "response.completed" and last.response.output_text == (
        "[one][kind][one][two][one][kind][one][two][three]")
    assert (await client.responses.retrieve(last.response.id)).output_text == last.response.output_text
    unstored = await client.responses.create(model="tiny", input="x", store=False)
    with pytest.raises(openai.NotFoundError, match="is not stored here"):
        await client.responses.retrieve(unstored.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="tiny", input="x", previous_response_id=unstored.id)


async def test_input_items(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", input="[one]")
    second = await client.responses.create(model="tiny", previous_response_id=first.id, input=[
        {"role": "user", "content": "[two]"}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "[out]"}])
    pages = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in pages] == ["message", "message", "message", "function_call", "function_call_output"]
    assert [item.content[0].text for item in pages[:3]] == ["[one]", "[one]", "[two]"]  # type: ignore[union-attr]
    assert len({item.id for item in pages}) == 5 and pages[1].id == first.output[0].id
    newest = await client.responses.input_items.list(second.id, limit=1)
    assert newest.has_more and newest.data[0].id == pages[-1].id
    with pytest.raises(openai.BadRequestError, match="after names no input item"):
        await client.responses.input_items.list(second.id, after="x")


async def test_deleted(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input="x")
    await client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel,
                 client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await call(answer.id)


async def ended(client: openai.AsyncOpenAI, name: str) -> Any:
    end = time.monotonic() + 10
    while (found := await client.responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    return found


async def test_the_background(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input="one two", background=True)
    assert answer.status == "queued" and answer.background and answer.output == []
    found = await ended(client, answer.id)
    assert found.status == "completed" and found.output_text == "one two" and found.id == answer.id
    assert (await client.responses.cancel(answer.id)).status == "completed", "what has ended stays as it is"
    cut = await client.responses.create(model="tiny", input="one two three", background=True, max_output_tokens=2)
    assert (await ended(client, cut.id)).status == "incomplete"
    broken = await client.responses.create(model="tiny", input="one two three", background=True, extra_body={
        "seed": Seed.FAIL_LATER})
    found = await ended(client, broken.id)
    assert found.status == "failed" and found.error.message == "The prefill server vanished."
    with pytest.raises(openai.ConflictError, match="The response is failed"):
        await client.responses.create(model="tiny", input="x", previous_response_id=broken.id)
    again = await client.responses.create(model="tiny", input="[next]", previous_response_id=answer.id, background=True)
    assert (await ended(client, again.id)).output_text == "one twoone two[next]"


async def test_background_is_cancelled(client: openai.AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    answer = await client.responses.create(model="tiny", input="one two", background=True, extra_body=ENDLESS)
    await wait_running(http, 1)
    assert (await client.responses.retrieve(answer.id)).status in ("queued", "in_progress")
    with pytest.raises(openai.ConflictError, match="still runs"):
        await client.responses.create(model="tiny", input="x", previous_response_id=answer.id)
    cancelled = await client.responses.cancel(answer.id)
    assert cancelled.status == "cancelled" and (await client.responses.cancel(answer.id)).status == "cancelled"
    await wait_running(http, 0)
    deleted = await client.responses.create(model="tiny", input="one two", background=True, extra_body=ENDLESS)
    await client.responses.delete(deleted.id)
    await wait_running(http, 0)
    plain = await client.responses.create(model="tiny", input="x")
    with pytest.raises(openai.BadRequestError, match="background: true"):
        await client.responses.cancel(plain.id)


async def test_a_stream_of_the_background(client: openai.AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    """Its client leaves in the middle; others read it from where they like, also while it runs."""
    stream = await client.responses.create(model="tiny", input="ab " * 60, background=True, stream=True)
    seen = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert seen[0].response.status == "queued"  # type: ignore[union-attr]
    name = seen[0].response.id  # type: ignore[union-attr]
    rest = [event async for event in await client.responses.retrieve(
        name, stream=True, starting_after=seen[-1].sequence_number)]
    numbers = [event.sequence_number for event in [*seen, *rest]]
    assert numbers == list(range(len(numbers))) and rest[-1].type == "response.completed"
    deltas = [event.delta for event in [*seen, *rest] if event.type == "response.output_text.delta"]
    assert "".join(deltas) == rest[-1].response.output_text
    assert not [event async for event in await client.responses.retrieve(name, stream=True, starting_after=9999)]
    for query in ("stream=true&starting_after=x", "stream=true&starting_after=-3"):
        async with http.get(f"/v1/responses/{name}?{query}") as answer:
            assert answer.status == 400 and (await answer.json())["error"]["param"] == "starting_after"
    plain = await client.responses.create(model="tiny", input="x")
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        await client.responses.retrieve(plain.id, stream=True)
    endless = await client.responses.create(model="tiny", input="a b", background=True, stream=True, extra_body=ENDLESS)
    name = (await anext(aiter(endless))).response.id  # type: ignore[union-attr]
    reading = await client.responses.retrieve(name, stream=True)
    await client.responses.cancel(name)
    assert [event.type async for event in reading][-1] == "response.cancelled"
    await endless.close()


# ---------------------------------------------------------------- servers of their own


@pytest.fixture
async def small(checkpoint: Path, tmp_path: Path) -> AsyncIterator[tuple[Server, openai.AsyncOpenAI]]:
    """A server that stores two answers, and lets requests end for a moment when it stops."""
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--response-store-entries", "2",
                    "--shutdown-grace-secs", "0.3")
    try:
        server.wait_ready()
        yield server, openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    finally:
        server.kill()


async def test_bounds_and_the_end_of_a_server(small: tuple[Server, openai.AsyncOpenAI]) -> None:
    server, client = small
    names = [(await client.responses.create(model="tiny", input="x")).id for _ in range(3)]
    with pytest.raises(openai.NotFoundError, match="made room"):
        await client.responses.retrieve(names[0])
    assert {name[5:17] for name in names} == {server.get("/get_server_info")[1]["response_tag"]}
    running = await client.responses.create(model="tiny", input="a b", background=True, extra_body=ENDLESS)
    streaming = await client.responses.create(model="tiny", input="a b", background=True, stream=True,
                                              extra_body=ENDLESS)
    name = (await anext(aiter(streaming))).response.id  # type: ignore[union-attr]
    with pytest.raises(openai.RateLimitError, match="run in the background"):
        await client.responses.create(model="tiny", input="x", background=True)
    assert (await client.responses.create(model="tiny", input="x")).status == "completed"
    assert {(await client.responses.retrieve(each)).status for each in (running.id, name)} <= {"queued", "in_progress"}
    server.process.send_signal(signal.SIGTERM)
    last = [event async for event in streaming][-1]
    assert last.type == "response.failed" and last.response.error and "shut down" in last.response.error.message
    assert server.process.wait(15) == 0 and "Traceback" not in server.log.read_text()


async def test_without_a_store(checkpoint: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--response-store-entries", "0")
    try:
        server.wait_ready()
        async with aiohttp.ClientSession(server.url) as http:
            async with http.post("/v1/responses", json={"input": "x", "store": True}) as answer:
                assert (await answer.json())["store"] is False
            async with http.post("/v1/responses", json={"input": "x", "background": True}) as answer:
                assert answer.status == 400 and "--response-store-entries" in await answer.text()
        assert server.get("/get_server_info")[1]["response_tag"] is None
    finally:
        server.kill()


# ---------------------------------------------------------------- the store


def test_the_oldest_that_ended_makes_room() -> None:
    store = ResponseStore(3, 100)
    running = StoredResponse(b"r" * 10, b"", in_background=True, streams=True)
    running.task = object()  # type: ignore[assignment]  # only asked whether it is there
    store.put("running", running)
    for name in "abcd":
        store.put(name, StoredResponse(b"x" * 10, b"y" * 10))
    assert [name for name in ("running", *"abcd") if has(store, name)] == ["running", "c", "d"]
    assert store.size == 50 and store.num_evicted == 2 and len(store) == 3
    running.add_events([b"e" * 71])
    store.update("running", running)
    assert not has(store, "d") and has(store, "running"), "one that runs is kept"
    store.check_room()
    running.body = b"r" * 200
    with pytest.raises(Overloaded):
        store.check_room()
    running.task = None
    store.update("running", running)
    assert store.size == 0 and not len(store), "larger than the whole store"
    store.update("running", running)
    assert not len(store), "what was removed stays so"


def has(store: ResponseStore, name: str) -> bool:
    try:
        store.get(name)
    except NotFound as error:
        assert json.dumps(error.to_openai())
        return False
    return True
