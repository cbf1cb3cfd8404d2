"""Whole workers: what reaches the worker, what reaches the client, and what happens when either fails."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct

import pytest


async def test_bytes_pass_untouched_in_both_directions(start_router, worker, connect):
    """Number formats, key order, unknown fields, header spelling: nothing is re-serialized."""
    answer_body = b'{ "b":1.50,\t"a" : 1e3, "u": "\\u00e4" }'

    async def reply(served):
        served.answer(201, answer_body, extra=b"X-Worker-Says: Hi\r\n")

    mock = await worker(reply)
    client = await connect(await start_router(mock))
    body = b'{"rid": "r-1",  "messages":[ ], "x": 1.50, "x": 2}  '
    client.send("POST", "/v1/chat/completions?a=1&b=%20", body, "X-Custom: Some Value\r\nAuthorization: Bearer k\r\n")
    reply_ = await client.reply()
    assert (reply_.status, reply_.body) == (201, answer_body)
    assert b"X-Worker-Says: Hi\r\n" in reply_.raw
    served = mock.posts[0]
    assert (served.target, served.body) == (b"/v1/chat/completions?a=1&b=%20", body)
    assert (b"X-Custom", b"Some Value") in served.headers
    assert (b"Authorization", b"Bearer k") in served.headers


async def test_stream_is_relayed_byte_for_byte(start_router, worker, script, connect):
    events = [json.dumps({"i": i, "text": "ü" * i}) for i in range(50)] + ["[DONE]"]
    client = await connect(await start_router(await worker(script.stream(*events))))
    client.send("POST", "/generate", b'{"text": "a", "stream": true}')
    reply = await client.reply()
    assert reply.body == b"".join(b"data: " + event.encode() + b"\n\n" for event in events)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_request_id_is_passed_or_made(start_router, worker, request_to):
    mock = await worker()
    router = await start_router(mock)
    given = await request_to(router, "POST", "/generate", {"text": "a"}, "X-Request-Id: mine\r\n")
    made = await request_to(router, "POST", "/generate", {"text": "a"})
    assert given.headers["x-request-id"] == "mine"
    assert len(made.headers["x-request-id"]) == 32
    for served, reply in zip(mock.posts, (given, made)):
        assert dict(served.headers)[b"x-request-id"].decode() == reply.headers["x-request-id"]


async def test_connections_stay_open_and_pipelined_requests_are_served_in_order(start_router, worker, connect):
    async def echo(served):
        await asyncio.sleep(0.01 if b"0" in served.body else 0)
        served.answer(body=served.body)

    mock = await worker(echo)
    client = await connect(await start_router(mock))
    accepted = mock.accepted
    bodies = [b'{"text": "%d"}' % i for i in range(20)]
    for body in bodies:
        client.send("POST", "/generate", body)
    raw = b""
    while raw.count(b"HTTP/1.1 200") < 20 or not raw.endswith(bodies[-1]):
        raw += await asyncio.wait_for(client.reader.read(65536), 5)
    assert [part.rpartition(b"\r\n\r\n")[2] for part in raw.split(b"HTTP/1.1 200 X")[1:]] == bodies
    assert mock.accepted - accepted <= 1


async def test_chunked_body_and_expect_continue(start_router, worker, connect):
    async def echo(served):
        served.answer(body=served.body)

    client = await connect(await start_router(await worker(echo)))
    client.writer.write(b"POST /generate HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\n"
                        b"transfer-encoding: chunked\r\n\r\n")
    assert await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.writer.write(b"5\r\n{\"tex\r\n8\r\nt\": \"ab\"\r\n1\r\n}\r\n0\r\n\r\n")
    assert (await client.reply()).body == b'{"text": "ab"}'


async def test_offer_of_another_protocol_is_ignored(start_router, worker, connect):
    """Java's client offers HTTP/2 on its first request; the body must not get lost."""
    mock = await worker()
    client = await connect(await start_router(mock))
    client.send("POST", "/generate", b'{"text": "a"}',
                "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n")
    assert (await client.reply()).status == 200
    assert mock.bodies == [b'{"text": "a"}']
    client.send("POST", "/generate", b'{"text": "b"}')
    assert (await client.reply()).status == 200


async def test_head_and_http_1_0(start_router, worker, request_to, connect):
    async def old(served):
        if served.method == b"HEAD":
            served.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
            return
        assert served.parser.get_http_version() == "1.0"
        served.write(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")
        served.transport.close()

    router = await start_router(await worker(old))
    head = await request_to(router, "HEAD", "/v1/models")
    assert (head.status, head.headers["content-length"], head.body) == (200, "100", b"")
    client = await connect(router)
    client.writer.write(b"POST /generate HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    assert (await asyncio.wait_for(client.reader.read(-1), 5)).endswith(b"until the end")


@pytest.mark.parametrize("failure", ["die", "status_500", "status_503"])
async def test_failed_attempt_moves_to_another_worker(start_router, worker, script, chat, failure):
    bad = await worker(script.die if failure == "die" else script.status(int(failure[-3:])))
    good = await worker()
    router = await start_router(bad, good, policy="round_robin")
    replies = [await chat(router) for _ in range(4)]
    assert [reply.status for reply in replies] == [200] * 4
    assert len(good.posts) == 4
    assert bad.posts
    attempts = 2 if failure == "die" else 1  # one that takes a health check's idle connection is sent once more
    assert len(bad.posts) / attempts <= sum(router.metrics.retries.values()) <= len(bad.posts)


async def test_retry_excludes_the_failed_worker(start_router, worker, script, chat):
    """cache_aware alone would send the retry where the first attempt went: that worker has seen the prompt."""
    bad, good = await worker(script.die), await worker()
    router = await start_router(bad, good, policy="cache_aware", retry_max_retries=1)
    for i in range(6):
        assert (await chat(router, messages=[{"role": "user", "content": f"{i} " * 400}])).status == 200
    assert bad.posts


async def test_worker_s_5xx_is_relayed_when_no_worker_is_left(start_router, worker, script, chat):
    workers = [await worker(script.status(500)) for _ in range(2)]
    reply = await chat(await start_router(*workers))
    assert (reply.status, reply.error["message"]) == (500, "scripted 500")
    assert [len(mock.posts) for mock in workers] == [1, 1]


async def test_worker_s_5xx_is_relayed_when_no_retry_is_left(start_router, worker, script, chat):
    workers = [await worker(script.status(500)) for _ in range(2)]
    reply = await chat(await start_router(*workers, retry_max_retries=0))
    assert (reply.status, reply.error["message"]) == (500, "scripted 500")
    assert sum(len(mock.posts) for mock in workers) == 1


@pytest.mark.parametrize("code", [400, 404, 409])
async def test_4xx_is_never_retried_and_never_counts(start_router, worker, script, chat, code):
    workers = [await worker(script.status(code)) for _ in range(2)]
    router = await start_router(*workers)
    for _ in range(20):
        assert (await chat(router)).status == code
    assert sum(len(mock.posts) for mock in workers) == 20
    assert all(w.state == "healthy" for w in router.registry)


async def test_retries_end(start_router, worker, script, chat):
    mock = await worker(script.die)
    reply = await chat(await start_router(mock, retry_max_retries=3))
    assert (reply.status, reply.error["code"]) == (503, "worker_unavailable")
    assert reply.headers["retry-after"] == "1"
    assert 4 <= len(mock.posts) <= 8  # 1 + 3 retries; some took an idle connection, whose loss proves nothing


async def test_stale_idle_connection_costs_no_retry(start_router, worker, chat):
    """A worker that closes an idle connection just as a request is sent did not fail."""
    seen = set()

    async def once_a_connection(served):
        if served in seen:
            served.transport.close()
        else:
            seen.add(served)
            served.answer()

    mock = await worker(once_a_connection)
    router = await start_router(mock, health_check_interval_secs=60)
    assert [(await chat(router)).status for _ in range(3)] == [200] * 3
    assert len(mock.posts) > len(seen)
    assert not router.metrics.retries


async def test_stream_that_breaks_between_events_ends_with_an_error_event(start_router, worker, connect):
    async def break_off(served):
        served.head()
        served.event("one")
        await asyncio.sleep(0.02)
        served.die()

    client = await connect(await start_router(await worker(break_off)))
    client.send("POST", "/generate", b'{"stream": true}')
    reply = await client.reply()
    events = [event for event in reply.body.split(b"\n\n") if event]
    assert events[0] == b"data: one"
    assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == "worker_unavailable"
    assert len(events) == 2
    assert await asyncio.wait_for(client.reader.read(), 5) == b""  # and the connection is closed


async def test_stream_that_breaks_inside_a_chunk_is_cut(start_router, worker, connect):
    """No event can be put there: the client's parser would take it for the rest of the chunk."""
    async def break_off(served):
        served.head()
        served.write(b"40\r\ndata: half of an ev")
        await asyncio.sleep(0.02)
        served.die()

    client = await connect(await start_router(await worker(break_off)))
    client.send("POST", "/generate", b'{"stream": true}')
    reply = await client.reply()
    assert not reply.complete
    assert reply.body == b"data: half of an ev"


def _broken_after(framing: bytes, part: bytes, then: bytes = b""):
    """A worker that sends a head and ``part`` of a body, then dies; with ``then`` it sends that and lives."""
    async def break_off(served):
        served.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + framing + b"\r\n\r\n" + part[:1])
        await asyncio.sleep(0.02)
        served.write(part[1:] + then)
        await asyncio.sleep(0.02)
        if not then:
            served.die()
    return break_off


_BEGINNINGS = {"announced": (b"content-length: 100", b'{"a": 1'),
               "chunked": (b"transfer-encoding: chunked", b'40\r\n{"a": 1')}


@pytest.mark.parametrize("framing", _BEGINNINGS)
async def test_a_response_that_breaks_off_is_requested_of_another_worker(framing, start_router, worker, chat):
    broken, whole = await worker(_broken_after(*_BEGINNINGS[framing])), await worker()
    router = await start_router(broken, whole, policy="round_robin")
    replies = [await chat(router) for _ in range(4)]
    assert [(reply.status, reply.body) for reply in replies] == [(200, b'{"ok": true}')] * 4
    assert broken.posts
    assert router.metrics.retries["lost"] >= 1


@pytest.mark.parametrize("framing", _BEGINNINGS)
async def test_a_response_that_always_breaks_off_is_an_error(framing, start_router, worker, chat):
    router = await start_router(await worker(_broken_after(*_BEGINNINGS[framing])), retry_max_retries=1)
    reply = await chat(router)
    assert (reply.status, reply.complete, reply.error["code"]) == (503, True, "worker_unavailable")


@pytest.mark.parametrize(("framing", "rest"), [("announced", b"x" * 93), ("chunked", b"x" * 57 + b"\r\n0\r\n\r\n")])
async def test_a_response_that_comes_in_parts_is_complete(framing, rest, start_router, worker, connect):
    client = await connect(await start_router(await worker(_broken_after(*_BEGINNINGS[framing], then=rest))))
    for _ in range(3):  # of the third, the head is known
        client.send("POST", "/generate", b"{}")
        reply = await client.reply()
        assert reply.complete
        assert reply.body == b'{"a": 1' + b"x" * (len(reply.body) - 7)


@pytest.mark.parametrize("framing", [b"content-length: 3000000", b"transfer-encoding: chunked"])
async def test_long_answer_that_breaks_is_cut(framing, start_router, worker, connect):
    """Megabytes are not buffered; the part that was sent is not taken for a complete response."""
    start = b"" if framing.startswith(b"content") else b"%x\r\n" % 3_000_000
    router = await start_router(await worker(_broken_after(framing, start + b"1" * 2_000_000)))
    client = await connect(router)
    client.send("POST", "/generate", b"{}")
    reply = await client.reply()
    assert (reply.status, reply.complete) == (200, False)
    assert reply.body.startswith(b"1" * 1_000_000)
    assert router.metrics.broken_streams == 1


async def test_a_stream_that_is_no_event_stream_is_not_delayed(start_router, worker, script, connect):
    async def lines(served):
        served.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n")
        served.write(b"3\r\n{}\n\r\n")
        await served.gone.wait()

    client = await connect(await start_router(await worker(lines)))
    client.send("POST", "/generate", b"{}")
    assert (await asyncio.wait_for(client.reader.readuntil(b"{}\n"), 5)).startswith(b"HTTP/1.1 200")


async def test_answer_without_a_length_that_breaks_is_reset(start_router, worker, connect):
    """Its end is the connection's: only a reset shows that it was not complete."""
    async def break_off(served):
        served.write(b"HTTP/1.0 200 OK\r\n\r\nhalf")
        await asyncio.sleep(0.05)
        raw = served.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        served.die()

    client = await connect(await start_router(await worker(break_off)))
    client.send("POST", "/generate", b"{}")
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(client.reader.read(), 5)
        await asyncio.wait_for(client.reader.read(), 5)


async def test_silence_times_out_but_a_slow_stream_does_not(start_router, worker, script, chat):
    """The limit is on silence within a request, not on its length."""
    stalled = await chat(await start_router(await worker(script.silence), request_timeout_secs=0.2))
    assert (stalled.status, stalled.error["code"]) == (504, "deadline_exceeded")
    slow = await worker(script.stream(*"abcdefghijkl", pause=0.1))  # 1.2 s; one pause lasts 1 s on no loaded machine
    reply = await chat(await start_router(slow, request_timeout_secs=1.0), stream=True)
    assert reply.complete
    assert reply.body.count(b"data:") == 12


async def test_stalled_stream_ends_with_an_error_event(start_router, worker, chat, script):
    async def stall(served):
        served.head()
        served.event("one")
        await served.gone.wait()

    reply = await chat(await start_router(await worker(stall), request_timeout_secs=0.2), stream=True)
    assert b'"code":"deadline_exceeded"' in reply.body


async def test_client_that_leaves_a_silent_worker_is_noticed(start_router, worker, script, connect):
    mock = await worker(script.silence)
    router = await start_router(mock)
    client = await connect(router)
    client.send("POST", "/generate", b"{}")
    await script.until(lambda: mock.posts)
    client.leave()
    await script.until(lambda: mock.left == 1, 1.0)
    assert router.metrics.requests["/generate", 499] == 1


async def test_client_that_does_not_read_stops_the_worker(start_router, worker, connect, script):
    """A stream may fill some buffers in the router, not with all that a worker can produce."""
    produced = 0

    async def pour(served):
        nonlocal produced
        served.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 * 2**20))
        for _ in range(64 * 16):
            await served.writable.wait()
            if served.gone.is_set():
                return
            served.write(b"x" * 2**16)
            produced += 2**16
            await asyncio.sleep(0)

    client = await connect(await start_router(await worker(pour), request_timeout_secs=0.2))
    client.send("POST", "/generate", b"{}")
    await asyncio.sleep(0.5)
    buffered = produced
    assert buffered < 24 * 2**20  # mostly the kernel's socket buffers on both legs
    await asyncio.sleep(0.3)
    assert produced == buffered
    total = 0
    while total < 64 * 2**20:  # ... and nothing is lost, nor does waiting for the client count as silence
        data = await asyncio.wait_for(client.reader.read(2**20), 5)
        assert data, "cut short"
        total += len(data)
    await script.until(lambda: produced == 64 * 2**20)


async def test_slow_head_and_answers_without_length(start_router, worker, chat):
    async def dribble(served):
        for byte in b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n":
            served.write(bytes([byte]))
            await asyncio.sleep(0)
        served.write(b"the end is the end")
        served.transport.close()

    reply = await chat(await start_router(await worker(dribble)))
    assert reply.raw.endswith(b"\r\n\r\nthe end is the end")
    assert reply.status == 200


async def test_malformed_answer_is_a_failed_attempt(start_router, worker, chat):
    async def babble(served):
        served.write(b"SSH-2.0-OpenSSH_9.6\r\n")

    reply = await chat(await start_router(await worker(babble), retry_max_retries=1))
    assert reply.status == 503


async def test_large_body_arrives_whole(start_router, worker, request_to):
    mock = await worker()
    body = b'{"text": "' + os.urandom(2**20).hex().encode() + b'"}'
    assert (await request_to(await start_router(mock), "POST", "/generate", body)).status == 200
    assert mock.bodies == [body]


async def test_idle_upstream_connections_are_closed_before_the_worker_does(
        start_router, worker, chat, monkeypatch, script):
    monkeypatch.setattr("baton.router.net.upstream_pool.IDLE_SECONDS", 0.2)
    mock = await worker()
    router = await start_router(mock, health_check_interval_secs=60, request_timeout_secs=0.4)
    await chat(router)
    assert mock.connections
    await script.until(lambda: not mock.connections, 1.0)


async def test_nagle_is_off_on_both_sides(start_router, worker, script, connect):
    import socket

    mock = await worker(script.silence)
    router = await start_router(mock)
    client = await connect(router)
    client.send("POST", "/generate", b"{}")
    await script.until(lambda: mock.posts)
    upstream = next(iter(router.dispatcher.pool(next(iter(router.registry))).busy)).transport
    for transport in (upstream, next(iter(router._connections)).transport):
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    client.leave()


async def test_a_session_named_by_a_header_stays_with_its_worker(start_router, worker, request_to):
    mocks = [await worker(), await worker(), await worker()]
    router = await start_router(*mocks, policy="consistent_hash")
    for number in range(6):
        body = {"messages": [{"role": "user", "content": f"turn {number}"}]}
        await request_to(router, "POST", "/v1/chat/completions", body, "X-Session-ID: s\r\n")
    assert sorted(len(mock.posts) for mock in mocks) == [0, 0, 6]


async def test_a_head_met_before_is_relayed_like_the_first(start_router, worker, connect, script):
    async def talk(served):
        served.answer(200, b'{"echo": "%s"}' % served.body[-8:], extra=b"Server: w\r\n")

    mock = await worker(talk)
    client = await connect(await start_router(mock))
    seen = []
    for size in range(5):
        body = b'{"text": "%s"}' % (b"x" * size)
        client.send("POST", "/generate", body, "Authorization: Bearer k\r\nX-A: b\r\n")
        reply = await client.reply()
        served = mock.posts[-1]
        own = (b"x-request-id", b"content-length")
        seen.append([(name, value) for name, value in served.headers if name not in own])
        assert (served.body, reply.body) == (body, b'{"echo": "%s"}' % body[-8:])
        assert reply.headers["x-request-id"] == dict(served.headers)[b"x-request-id"].decode()
    assert seen == seen[:1] * 5 and (b"Authorization", b"Bearer k") in seen[0]
    assert len({dict(served.headers)[b"x-request-id"] for served in mock.posts}) == 5


async def test_a_response_that_comes_in_parts_after_a_known_head(start_router, worker, connect):
    async def talk(served):
        served.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n" + (b"abc" if len(mock.posts) % 2 else b""))
        for part in ((b"d", b"ef") if len(mock.posts) % 2 else (b"ab", b"cdef")):
            await asyncio.sleep(0.01)
            served.write(part)

    mock = await worker(talk)
    client = await connect(await start_router(mock))
    for _ in range(6):
        client.send("POST", "/generate", b"{}")
        assert (await client.reply()).body == b"abcdef"
    assert mock.accepted <= 3


@pytest.mark.parametrize("before", [0, 3])
async def test_a_worker_that_sends_more_than_it_announced_is_cut_off(start_router, worker, connect, before):
    async def talk(served):
        served.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nabc")
        await asyncio.sleep(0.02)
        served.write(b"def" if len(mock.posts) <= before else b"defHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")

    mock = await worker(talk)
    client = await connect(await start_router(mock))
    for _ in range(before):
        client.send("POST", "/generate", b"{}")
        assert (await client.reply()).body == b"abcdef"
    client.send("POST", "/generate", b"{}")
    reply = await client.reply()
    assert (reply.status, reply.error["code"]) == (503, "worker_unavailable")
    assert b"200 OK" not in reply.raw
