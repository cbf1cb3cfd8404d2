"""Bodies of megabytes: received, decoded and sent in parts, and the same bytes as ever."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest

from baton.router.net.body import (
    COPIED_BYTES,
    ROUTED_BYTES,
    LargeBody,
    routing_fields,
    with_bootstrap,
    with_previous_room,
)
from baton.router.net.request_reader import _MIN_BUFFERED_BODY_BYTES as BUFFERED
from baton.router.net.request_reader import HeadRules, RequestReader
from baton.router.workers.dp_ranks import with_prefill_rank, with_rank

PATH = b"/v1/chat/completions"


def chat(size: int, **more) -> bytes:
    return json.dumps({**more, "messages": [{"role": "user", "content": "word " * (size // 5)}]}).encode()


def sent(body: bytes | LargeBody) -> bytes:
    whole = b"".join(body.parts) if isinstance(body, LargeBody) else body
    assert len(whole) == len(body)
    return whole


@pytest.mark.parametrize("make", [
    lambda size: chat(size), lambda size: b"\n {" + chat(size)[1:], lambda size: chat(size, data_parallel_rank=7),
    lambda size: chat(size, bootstrap_room=1, bootstrap_host="h"),
    lambda size: json.dumps({"text": ["word " * (size // 5), "b"]}).encode(), lambda size: b"{" + b" " * size + b"}",
], ids=["chat", "spaces", "rank", "bootstrap", "batch", "empty"])
def test_fields_are_added_to_large_bodies_as_to_small_ones(make):
    small, large = ([], [])
    for size, steps in ((100, small), (2 * COPIED_BYTES, large)):
        body = make(size)
        first = with_bootstrap(body, routing_fields(body), "10.0.0.1", 8998, Random(1))
        again = with_previous_room(with_bootstrap(body, routing_fields(body), "10.0.0.2", 8998, Random(2)), first)
        ranked = with_prefill_rank(with_rank(PATH, again, 2), 3)
        for step in (first, again, ranked):
            fields = json.loads(sent(step))
            steps.append((list(fields), {name: value for name, value in fields.items()
                                         if name not in ("messages", "text")}))
            assert fields.get("messages") == json.loads(body).get("messages")
    assert small == large


def test_what_is_added_copies_nothing():
    body = chat(2 * COPIED_BYTES)
    made = with_previous_room(with_bootstrap(body, routing_fields(body), "h", 1, Random(1)),
                              with_bootstrap(body, routing_fields(body), "h", 1, Random(2)))
    assert made.parts[-1].obj is body


def test_routing_looks_at_the_first_megabyte():
    text = routing_fields(chat(3 * ROUTED_BYTES)).routing_text
    assert len(text) == ROUTED_BYTES
    assert routing_fields(chat(4 * ROUTED_BYTES)).routing_text == text


@pytest.mark.parametrize("size", [BUFFERED - 1, BUFFERED, 3 * BUFFERED + 17])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_reader_joins_bodies_of_any_size(size, chunked):
    reader, body = RequestReader(HeadRules(), 10 * BUFFERED), Random(size).randbytes(size)
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % size
    data = b"POST /generate HTTP/1.1\r\nhost: r\r\n%b\r\n\r\n" % framing
    data += b"%x\r\n%b\r\n0\r\n\r\n" % (size, body) if chunked else body
    for small in (b"GET /next HTTP/1.1\r\nhost: r\r\n\r\n",) * 2:
        for start in range(0, len(data), 60_000):
            reader.feed(data[start:start + 60_000])
        reader.feed(small)
    assert [(request.path, request.body) for request in reader.ready] == [(b"/generate", body), (b"/next", b"")] * 2


async def test_megabytes_reach_both_workers_while_other_requests_are_served(start_router, worker, request_to, chat):
    prefill, decode = await worker(disaggregation_mode="prefill"), await worker(disaggregation_mode="decode")
    router = await start_router(prefill=[prefill], decode=[decode])
    body = {"messages": [{"role": "user", "content": "w" * 3_000_000 + "\n\u00e9"}], "seed": 1}
    replies = await asyncio.gather(request_to(router, "POST", PATH.decode(), body), chat(router))
    assert [reply.status for reply in replies] == [200, 200]
    for mock in (prefill, decode):
        large = max(mock.bodies, key=len)
        assert {name: json.loads(large)[name] for name in body} == body
    assert json.loads(max(prefill.bodies, key=len)) == json.loads(max(decode.bodies, key=len))
