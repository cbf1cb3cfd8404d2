"""Streams that another worker continues when theirs dies, and prompts that decode computes itself: scripted workers."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton.router.relay.continuation import StreamLog, is_continuable

OURS = {"stream_continuation": True}
GREEDY = {"messages": [], "stream": True, "temperature": 0}
COUNT = 8


def chunk(event: str) -> bytes:
    data = b"data: " + event.encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(token: int) -> str:
    return json.dumps({"id": "chatcmpl-1", "created": 5, "choices": [{"delta": {"content": f" {token}"},
                                                                      "finish_reason": None, "token_ids": [token]}]},
                      separators=(",", ":"))


def counting(*, until=None, then="die", asked=None):
    """Streams tokens 0 to 7 after those of a continuation; after ``until`` more of them, misbehaves."""

    async def behave(served):
        body = served.json
        begun = body.get("continuation", {}).get("token_ids", [])
        assert begun == list(range(len(begun)))
        assert not begun or (body["continuation"]["id"], body["continuation"]["created"]) == ("chatcmpl-1", 5)
        if asked is not None:
            asked.append((dict(served.headers).get(b"x-baton-token-ids"), body))
        served.head()
        for i, token in enumerate(range(len(begun), COUNT)):
            if i == until:
                if then == "torn":
                    served.write(chunk(event(token))[:-9])
                elif then == "error":
                    served.event('{"error":{"message":"rank died","code":"worker_unavailable"}}')
                    served.end()
                    return
                await asyncio.sleep(0.02)
                if then == "hang":
                    await hang(served)
                else:
                    served.die()
                return
            served.write(chunk(event(token)))
            await asyncio.sleep(0.002)
        served.event("[DONE]")
        served.end()

    return behave


@pytest.mark.parametrize("pairs", [False, True])
async def test_no_stream_is_continued_with_other_weights(start_router, worker, chat, pairs):
    """Its end would be of another answer than its beginning."""
    def info_of(name):
        return {**OURS, "model_fingerprint": name, "epoch": name}

    breaks = await worker(counting(until=3), **info_of("old"))
    other, same = [await worker(counting(), **info_of(name)) for name in ("new", "old")]
    streams = [breaks, other, same]
    if pairs:
        made = await start_router(prefill=[await worker(**info_of("old"))], decode=streams, policy="round_robin")
    else:
        made = await start_router(*streams, policy="round_robin")
    for _ in range(6):
        assert tokens_of(await chat(made, **GREEDY)) == list(range(COUNT))
    continued = [mock for mock in streams for served in mock.posts if "continuation" in served.json]
    assert continued and other not in continued


async def hang(served):
    """As after SIGSTOP: nothing is answered any more, health checks included."""

    async def silence(other):
        await other.gone.wait()

    served.worker.handle = silence
    await silence(served)
    served.worker.left += 1


def tokens_of(reply) -> list[int]:
    events = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]", reply.body
    return [token for data in events for token in json.loads(data)["choices"][0]["token_ids"]]


@pytest.mark.parametrize("then", ["die", "torn", "error"])
@pytest.mark.parametrize("until", [1, 3, 7])
async def test_a_stream_is_continued_by_another_worker(start_router, worker, chat, then, until):
    bad, good = await worker(counting(until=until, then=then), **OURS), await worker(counting(), **OURS)
    router = await start_router(bad, good, policy="round_robin")
    for _ in range(2):
        reply = await chat(router, **GREEDY)
        assert reply.complete and tokens_of(reply) == list(range(COUNT))
    assert (router.metrics.continued_streams, router.metrics.broken_streams) == (1, 0)


@pytest.mark.parametrize("then", ["die", "torn", "error"])
async def test_a_stream_is_continued_by_another_pair(start_router, worker, script, chat, then):
    asked = []
    p = await worker(script.answer)
    bad = await worker(counting(until=4, then=then), **OURS)
    good = await worker(counting(asked=asked), **OURS)
    router = await start_router(prefill=[p], decode=[bad, good], policy="round_robin")
    p_is_ours = next(w for w in router.registry if w.role == "prefill")
    p_is_ours.is_baton = True
    for _ in range(2):
        assert tokens_of(await chat(router, **GREEDY)) == list(range(COUNT))
    assert router.metrics.continued_streams == 1
    rooms = [served.json["bootstrap_room"] for served in p.posts]
    assert len(set(rooms)) == len(rooms) == 3
    assert [body.get("continuation", {}).get("token_ids") for _, body in asked] in ([[0, 1, 2, 3], None],
                                                                                    [None, [0, 1, 2, 3]])
    assert {header for header, _ in asked} == {b"1"}


async def test_only_the_end_got_lost(start_router, worker, chat):
    async def almost(served):
        served.head()
        served.write(chunk(event(0)))
        served.event("[DONE]")
        await asyncio.sleep(0.02)
        served.die()

    router = await start_router(await worker(almost, **OURS))
    reply = await chat(router, **GREEDY)
    assert reply.complete and tokens_of(reply) == [0]


@pytest.mark.parametrize(("info", "fields", "options"), [
    ({}, GREEDY, {}),
    (OURS, {**GREEDY, "temperature": 1}, {}),
    (OURS, {**GREEDY, "n": 2}, {}),
    (OURS, {**GREEDY, "logprobs": True}, {}),
    (OURS, GREEDY, {"stream_continuation": False}),
])
async def test_a_stream_that_cannot_be_continued_ends_with_an_error_event(
        start_router, worker, chat, info, fields, options):
    workers = [await worker(counting(until=2), **info) for _ in range(2)]
    router = await start_router(*workers, **options)
    reply = await chat(router, **fields)
    assert b'"error"' in reply.body and b"[DONE]" not in reply.body
    assert router.metrics.broken_streams == 1


async def test_the_end_of_retries_is_reported(start_router, worker, chat):
    router = await start_router(await worker(counting(until=1), **OURS), retry_max_retries=2)
    reply = await chat(router, **GREEDY)
    assert b'"error"' in reply.body
    assert reply.body.count(b'"token_ids"') == 3


async def test_a_client_that_leaves_while_its_stream_moves(start_router, worker, script, connect):
    bad = await worker(counting(until=2), **OURS)
    router = await start_router(bad, retry_initial_backoff_ms=300.0)
    client = await connect(router)
    client.send("POST", "/v1/chat/completions", json.dumps(GREEDY).encode())
    await script.until(lambda: router.metrics.continued_streams)
    client.leave()
    await script.until(lambda: router.metrics.client_disconnects == 1)
    await asyncio.sleep(0.4)
    assert len(bad.posts) == 1


@pytest.mark.parametrize("cumulative", [False, True])
def test_the_log_stays_small_and_knows_every_token(cumulative):
    log = StreamLog(b'{"a":1}', cumulative=cumulative)
    relayed, sent = b"", b""
    for i in range(3000):
        ids = list(range(i + 1)) if cumulative and i < 200 else [i]
        if cumulative and i >= 200:
            break
        data = chunk(json.dumps({"id": "x", "created": 1, ("output_ids" if cumulative else "token_ids"): ids},
                                separators=(",", ":")))
        sent += data
        for part in (data[:7], data[7:]):
            relayed += log.feed(part)
    assert relayed == sent
    body = json.loads(log.continuation_body())
    tokens = list(range(200 if cumulative else 3000))
    assert body == {"a": 1, "continuation": {"id": "x", "created": 1, "token_ids": tokens}}
    assert len(log._relayed) < 70_000


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("size", [2, 4000])
def test_the_log_knows_every_token_of_disjoint_segments(disjoint, size):
    """A server with --stream-output sends in each event of /generate the tokens since the event before."""
    log, tokens = StreamLog(b'{"a":1}', cumulative=True), list(range(3 * size))
    for end in range(size, 3 * size + 1, size):
        log.feed(chunk(json.dumps({
            "text": "", "output_ids": tokens[end - size if disjoint else 0:end],
            "meta_info": {"id": "x", "completion_tokens": end}}, separators=(",", ":"))))
        if size > 2:
            log._compact()
    assert json.loads(log.continuation_body())["continuation"]["token_ids"] == tokens


@pytest.mark.parametrize(("body", "yes"), [
    ('{"stream": true, "temperature": 0}', True), ('{"stream": true, "seed": 4}', True),
    ('{"stream": true, "top_k": 1}', True), ('{"stream": true, "sampling_params": {"temperature": 0.0}}', True),
    ('{"stream": true}', False), ('{"stream": false, "temperature": 0}', False), ('{"temperature": 0}', False),
    ('{"stream": true, "temperature": 0, "continuation": {"token_ids": []}}', False), ('{"stream": 3}', False),
    ('{"stream": true, "sampling_params": [{"temperature": 0}]}', False),
    ('{"stream": true, "temperature": 0, "return_hidden_states": true}', False),
])
def test_what_can_be_continued(body, yes):
    assert is_continuable(body.encode()) is yes


# ---------------------------------------------------------------------- decode alone


async def test_without_prefill_workers_our_decode_server_does_all(start_router, worker, script, chat):
    async def wait_for_cache(served):
        await (script.silence if "bootstrap_room" in served.json else script.answer)(served)

    p, d = await worker(), await worker(wait_for_cache, **OURS)
    router = await start_router(prefill=[p], decode=[d], health_check_interval_secs=60)
    await p.stop()
    reply = await chat(router)
    assert reply.status == 200
    assert "bootstrap_room" not in d.posts[-1].json


@pytest.mark.parametrize(("info", "words", "alone"), [(OURS, 5, True), (OURS, 5000, False), ({}, 5, False)])
async def test_short_prompts_are_prefilled_by_our_decode_server(start_router, worker, chat, info, words, alone):
    p, d = await worker(), await worker(**info)
    router = await start_router(prefill=[p], decode=[d], local_prefill_tokens=100)
    assert (await chat(router, messages=[{"role": "user", "content": "word " * words}])).status == 200
    assert (not p.posts, "bootstrap_room" in d.posts[0].json) == (alone, not alone)


def test_every_byte_of_a_complete_stream_is_relayed():
    """However the network cuts it: the end of the message may come alone, or in two parts."""
    events = [b'data: {"id":"x","choices":[{"delta":{"content":"a"},"token_ids":[5]}]}\n\n', b"data: [DONE]\n\n"]
    whole = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
    for first in range(len(whole) + 1):
        for second in (first, min(first + 2, len(whole)), len(whole) - 1):
            log = StreamLog(b'{"a":1}', cumulative=False)
            parts = [whole[:first], whole[first:max(first, second)], whole[max(first, second):]]
            assert b"".join(log.feed(part) for part in parts) + log.flush() == whole


def spoken(token: int, last: bool = False) -> bytes:
    """An event of /v1/messages, and the token's id in a comment after it."""
    event = b'{"type":"%b","delta":{"text":"%d"}}' % (b"message_stop" if last else b"content_block_delta", token)
    if token == 0:
        event = b'{"type":"message_start","message":{"id":"msg_1"}}'
    return b"event: x\ndata: %b\n\n: {\"token_ids\":[%d]}\n\n" % (event, token)


@pytest.mark.parametrize("then", ["die", "error", "aborted"])
async def test_messages_are_continued_by_another_worker(start_router, worker, connect, then):
    begun = []

    async def behave(served):
        done = served.json.get("continuation", {}).get("token_ids", [])
        begun.append(served.json.get("continuation"))
        served.head()
        for token in range(len(done), COUNT):
            if token == 4 and not done:
                if then == "die":
                    await asyncio.sleep(0.02)
                    served.die()
                    return
                error = "request_aborted" if then == "aborted" else "worker_unavailable"
                data = b'event: error\ndata: {"type":"error"}\n\n: {"error":{"code":"%b"}}\n\n' % error.encode()
                served.write(b"%x\r\n%b\r\n" % (len(data), data))
                served.end()
                return
            data = spoken(token, token == COUNT - 1)
            served.write(b"%x\r\n%b\r\n" % (len(data), data))
            await asyncio.sleep(0.002)
        served.end()

    router = await start_router(await worker(behave, **OURS), await worker(behave, **OURS))
    client = await connect(router)
    client.send("POST", "/v1/messages", json.dumps({"messages": [], "stream": True, "temperature": 0}).encode())
    reply = await client.reply()
    assert reply.complete
    if then == "aborted":  # by the client: no other worker may continue it
        assert len(begun) == 1 and b'"type":"error"' in reply.body
        return
    assert reply.body == b"".join(spoken(token, token == COUNT - 1) for token in range(COUNT))
    assert begun == [None, {"token_ids": [0, 1, 2, 3], "id": "msg_1"}]


@pytest.mark.parametrize("end", ['{"type":"message_stop"}', '{"type":"response.completed","response":{"output":[]}}'])
async def test_of_other_apis_too_the_end_alone_needs_no_worker(start_router, worker, connect, end):
    async def almost(served):
        served.head()
        served.write(chunk(end))
        await asyncio.sleep(0.02)
        served.die()

    client = await connect(await start_router(await worker(almost, **OURS)))
    client.send("POST", "/v1/messages", json.dumps(GREEDY).encode())
    reply = await client.reply()
    assert reply.complete and reply.body == b"data: " + end.encode() + b"\n\n"
