"""Sessions: what a request begins with, and the routes."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from baton.common.api.errors import Conflict, InvalidRequest, NotFound
from baton.common.serving.context.sessions import Sessions
from baton.common.serving.protocol.session_params import SessionParams
from baton.tests.helpers.serving import generate


@pytest.fixture
def sessions():
    sessions = Sessions()
    assert sessions.open(100, "s") == "s"
    first = sessions.request(SessionParams("s"), [1, 2, 3], bos=1)
    assert first.prompt == [1, 2, 3]
    first.store("a", [7, 8])
    return sessions


@pytest.mark.parametrize("params, expected", [
    ({}, [1, 5]), ({"rid": "a"}, [1, 2, 3, 7, 8, 5]), ({"rid": "a", "offset": -1}, [1, 2, 3, 7, 8, 5]),
    ({"rid": "a", "offset": 4}, [1, 2, 3, 7, 5]), ({"rid": "a", "offset": 0}, [1, 5]),
    ({"rid": "a", "drop_previous_output": True}, [1, 2, 3, 5]),
])
def test_a_turn_goes_on_from_a_request(sessions, params, expected):
    assert sessions.request(SessionParams("s", **params), [1, 5], bos=1).prompt == expected


def test_branches_and_replacement(sessions):
    sessions.request(SessionParams("s", "a"), [4], None).store("b", [9])
    sessions.request(SessionParams("s", "a"), [5], None).store("c", [9])
    sessions.request(SessionParams("s", "b"), [6], None).store("d", [9])
    assert sessions.request(SessionParams("s", "d"), [0], None).prompt == [1, 2, 3, 7, 8, 4, 9, 6, 9, 0]
    sessions.request(SessionParams("s", "a", replace=True), [4], None).store("e", [9])
    for gone in "bcd":
        with pytest.raises(InvalidRequest, match=repr(gone)):
            sessions.request(SessionParams("s", gone), [4], None)
    assert sessions.request(SessionParams("s", "e"), [0], None).prompt == [1, 2, 3, 7, 8, 4, 9, 0]
    sessions.request(SessionParams("s", replace=True), [4], None)
    with pytest.raises(InvalidRequest, match="'a'"):
        sessions.request(SessionParams("s", "a"), [4], None)


def test_a_long_conversation_is_replaced(sessions):
    sessions.open(10**9, "long")
    sessions.request(SessionParams("long"), [1], None).store("0", [1])
    for turn in range(2000):
        sessions.request(SessionParams("long", str(turn), offset=1), [1], None).store(str(turn + 1), [1])
    sessions.request(SessionParams("long", "0", replace=True), [4], None)
    with pytest.raises(InvalidRequest, match="'2000'"):
        sessions.request(SessionParams("long", "2000"), [4], None)


def test_mistakes_are_sentences(sessions):
    for params, error in (({"rid": "a", "offset": 6}, InvalidRequest), ({"rid": "x"}, InvalidRequest)):
        with pytest.raises(error):
            sessions.request(SessionParams("s", **params), [4], None)
    with pytest.raises(NotFound):
        sessions.request(SessionParams("t"), [4], None)
    with pytest.raises(Conflict):
        sessions.open(5, "s")
    with pytest.raises(InvalidRequest):
        sessions.open(0, None)
    sessions.close("s")
    with pytest.raises(NotFound):
        sessions.close("s")


def test_a_full_session_remembers_no_more(sessions):
    sessions.request(SessionParams("s", "a"), list(range(100)), None).store("b", [9])
    with pytest.raises(InvalidRequest):
        sessions.request(SessionParams("s", "b"), [4], None)


async def posted(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http(http: aiohttp.ClientSession, stream: bool) -> None:
    async with http.post("/open_session", json={"capacity_of_str_len": 1000}) as answer:
        name = await answer.json()
    params = {"max_new_tokens": 4, "ignore_eos": True}
    body = {"text": "hello", "sampling_params": params, "rid": "one", "session_params": {"id": name}, "stream": stream}
    async with http.post("/generate", json=body) as answer:
        assert answer.status == 200
        await answer.read()
    status, second = await generate(http, text=" world", sampling_params=params,
                                    session_params={"id": name, "rid": "one"})
    _, first = await generate(http, text="hello", sampling_params=params)
    _, alone = await generate(http, text=" world", sampling_params=params)
    assert status == 200
    assert second["meta_info"]["prompt_tokens"] == sum(
        [first["meta_info"]["prompt_tokens"], 4, alone["meta_info"]["prompt_tokens"]])
    status, error = await generate(http, text=["a", "b"], session_params={"id": name})
    assert status == 400 and "one prompt" in error["error"]["message"]
    plain = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}
    alone = (await posted(http, "/v1/chat/completions", plain))["usage"]["prompt_tokens"]
    turn = {**plain, "session_params": {"id": name, "rid": "one"}, "rid": "chat", "stream": stream}
    async with http.post("/v1/chat/completions", json=turn) as answer:
        assert answer.status == 200
        await answer.read()
    told = await posted(http, "/v1/completions", {"prompt": "more", "max_tokens": 1, "session_params": {
        "id": name, "rid": "chat"}})
    more = (await posted(http, "/v1/completions", {"prompt": "more", "max_tokens": 1}))["usage"]["prompt_tokens"]
    assert told["usage"]["prompt_tokens"] == first["meta_info"]["prompt_tokens"] + 4 + alone + 4 + more
    for path, body in (("/v1/chat/completions", plain), ("/v1/completions", {"prompt": "more"})):
        async with http.post(path, json={**body, "n": 2, "session_params": {"id": name}}) as answer:
            assert answer.status == 400 and "one answer" in await answer.text()
    async with http.post("/close_session", json={"session_id": name}) as answer:
        assert answer.status == 200
    assert (await generate(http, text="x", session_params={"id": name}))[0] == 404
