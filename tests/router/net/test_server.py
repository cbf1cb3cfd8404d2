"""The router's own surface: bad HTTP, limits, membership, health, metrics, start and stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from baton.router.net.http_server import ClientConnection


@pytest.mark.parametrize(("raw", "status"), [
    (b"nonsense\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nbroken header\r\n\r\n", 400),
    (b"POST /generate HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nX: " + b"x" * 200_000, 431),
    (b"POST /generate HTTP/1.1\r\nContent-Length: 2000\r\n\r\n", 413),
    (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000 + b"\r\n", 413),
    (b"POST /generate HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2000\r\n\r\n", 413),
    (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: " + b"x" * 200_000, 431),
])
async def test_bad_http_is_answered_and_the_connection_closed(start_router, connect, raw, status):
    client = await connect(await start_router(max_payload_size=1000))
    client.writer.write(raw)
    reply = await client.reply()
    assert (reply.status, reply.headers["connection"]) == (status, "close")
    assert reply.error["message"]
    assert await asyncio.wait_for(client.reader.read(), 5) == b""


async def test_trailers_join_neither_the_body_nor_the_head(start_router, worker, connect):
    mock = await worker()
    client = await connect(await start_router(mock))
    client.writer.write(b"POST /generate HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
                        b"X-Sum: 1\r\nAuthorization: Bearer k\r\n\r\n")
    assert (await client.reply()).status == 200
    (served,) = mock.posts
    assert served.body == b"{}"
    assert {name.lower() for name, _ in served.headers}.isdisjoint({b"x-sum", b"authorization"})
    client.send("POST", "/generate", b"{}")
    assert (await client.reply()).status == 200


async def test_answer_to_an_endless_upload_is_not_lost(start_router, connect):
    """The refusal must reach a client that is still sending."""
    client = await connect(await start_router(max_payload_size=1000))
    client.writer.write(b"POST /generate HTTP/1.1\r\nContent-Length: 50000000\r\n\r\n")
    for _ in range(50):
        client.writer.write(b"x" * 10_000)
        await asyncio.sleep(0.001)
    assert (await client.reply()).status == 413


async def test_requests_before_a_bad_one_are_answered_first(start_router, worker, connect):
    client = await connect(await start_router(await worker()))
    client.send("POST", "/generate", b"{}")
    client.writer.write(b"nonsense\r\n\r\n")
    data = await asyncio.wait_for(client.reader.read(-1), 5)
    assert [part[:3] for part in data.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]


_PARTIAL_HEAD = b"POST /generate HTTP/1.1\r\nX-A: "
_PARTIAL_BODY = b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 50\r\n\r\nab"


@pytest.mark.parametrize("data", [_PARTIAL_HEAD, _PARTIAL_BODY], ids=["head", "body"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("drips", [False, True])
async def test_an_incomplete_request_times_out(start_router, worker, connect, data, before, drips):
    """Also one that arrives a byte at a time, and one after complete ones."""
    client = await connect(
        await start_router(await worker(), client_header_timeout_secs=0.2, client_body_timeout_secs=0.2))
    for _ in range(before):
        client.send("POST", "/generate", b"{}")
        assert (await client.reply()).status == 200
    client.writer.write(data)
    reply = asyncio.ensure_future(client.reply())
    for _ in range(40 if drips else 0):
        await asyncio.sleep(0.03)
        if reply.done():
            break
        client.writer.write(b"x")
    assert (await reply).status == 408
    assert await asyncio.wait_for(client.reader.read(), 5) == b""


async def test_a_body_that_comes_fast_enough_may_take_long(start_router, worker, connect):
    mock = await worker()
    client = await connect(await start_router(mock, client_header_timeout_secs=0.1, client_body_timeout_secs=0.1))
    parts = [b"x" * 16384] * 10
    client.writer.write(b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % (16384 * 10))
    for part in parts:
        client.writer.write(part)
        await asyncio.sleep(0.05)
    assert (await client.reply()).status == 200
    assert mock.posts[0].body == b"".join(parts)


async def test_idle_clients_are_checked_when_they_are_due(start_router, connect, request_to, script):
    """Not at each tick: of 50 clients that idle for 0.8 s, at ticks of 0.05, each is checked two or three times."""
    router = await start_router(keep_alive_secs=0.8, client_header_timeout_secs=0.2)
    checks = 0
    check = ClientConnection.check_deadline

    def counted(self, now):
        nonlocal checks
        checks += 1
        return check(self, now)

    ClientConnection.check_deadline = counted
    try:
        clients = [await connect(router) for _ in range(50)]
        for client in clients:
            client.send("GET", "/liveness")
            assert (await client.reply()).status == 200
        assert len(router._connections) == 50
        for client in clients:
            assert await asyncio.wait_for(client.reader.read(), 5) == b""
        await script.until(lambda: not router._connections)
    finally:
        ClientConnection.check_deadline = check
    assert 50 <= checks <= 150
    assert not any(router._deadlines._slots.values())


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/nowhere", 404), ("GET", "/v1/chat/completions", 405), ("DELETE", "/health", 405),
    ("GET", "/add_worker", 405),
])
async def test_unknown_paths_and_methods(start_router, worker, request_to, method, path, status):
    reply = await request_to(await start_router(await worker()), method, path)
    assert reply.status == status
    assert path in reply.error["message"]


async def test_api_key(start_router, worker, request_to, chat):
    router = await start_router(await worker(), api_key="secret")
    assert (await chat(router)).status == 401
    assert (await request_to(router, "GET", "/list_workers")).status == 401
    assert (await request_to(router, "POST", "/generate", b"{}", "Authorization: Bearer secret\r\n")).status == 200
    assert (await request_to(router, "GET", "/readiness")).status == 200


async def test_workers_join_and_leave(start_router, worker, request_to, chat, script):
    router = await start_router()
    refused = await chat(router)
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    mock = await worker()
    assert (await request_to(router, "POST", f"/add_worker?url={mock.url}/")).status == 200
    assert (await request_to(router, "POST", "/add_worker", {"url": mock.url})).status == 409
    await script.until(lambda: router.registry.available("regular"))
    listed = (await request_to(router, "GET", "/list_workers")).json
    assert listed["urls"] == [mock.url]
    assert listed["workers"][0] | {"id": "", "url": ""} == {
        "id": "", "url": "", "role": "regular", "state": "healthy", "healthy": True, "load": 0, "circuit": "closed",
        "draining": False, "models": ["tiny"], "cached_tokens": None, "dp_rank": None,
        "model_fingerprint": None, "weight_version": None, "misfits": []}
    assert (await chat(router)).status == 200
    assert (await request_to(router, "POST", f"/remove_worker?url={mock.url}")).status == 200
    assert (await request_to(router, "POST", f"/remove_worker?url={mock.url}")).status == 404
    assert (await chat(router)).status == 503


@pytest.mark.parametrize("query", ["", "?url=nonsense", "?url=http://h:1&role=prefill", "?url=http://h:1&bootstrap_port=x",
                                   "?url=http://h:99999", "?url=http://a..b:1"])
async def test_bad_membership_requests(start_router, request_to, query):
    router = await start_router()
    reply = await request_to(router, "POST", f"/add_worker{query}")
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert not len(router.registry)


async def test_role_and_port_of_a_new_worker_are_learnt(start_router, worker, request_to, chat, script):
    router = await start_router(pd_disaggregation=True)
    p = await worker(disaggregation_mode="prefill", disaggregation_bootstrap_port=9001)
    d = await worker(disaggregation_mode="decode")
    for mock in (p, d):
        await request_to(router, "POST", f"/add_worker?url={mock.url}")
    await script.until(lambda: router.registry.ready(pairs=True))
    assert (await chat(router)).status == 200
    assert p.posts[0].json["bootstrap_port"] == 9001


@pytest.mark.parametrize(("given", "mode"), [("prefill", "decode"), ("decode", "prefill"), ("prefill", "null"),
                                             ("decode", "null"), ("regular", "prefill")])
async def test_a_worker_of_another_role_gets_no_requests(start_router, worker, request_to, script, caplog, given, mode):
    """Swapped addresses would be answered: by prefill, with one token."""
    mock = await worker(disaggregation_mode=mode)
    named = {given: [mock]} if given != "regular" else {}
    router = await start_router(*([] if named else [mock]), wait=False, **named)
    await script.until(lambda: "it gets no requests" in caplog.text)
    assert f"named as {given} worker" in caplog.text and f"a {mode.replace('null', 'unified')} server" in caplog.text
    assert not router.registry.available(given)
    mock.info = {"disaggregation_mode": "null" if given == "regular" else given}  # started again, as it should be
    await script.until(lambda: router.registry.available(given))
    assert caplog.text.count("it gets no requests") == 1


async def test_removal_does_not_cut_a_stream(start_router, worker, request_to, connect, script):
    mock = await worker(script.stream(*map(str, range(20)), pause=0.01))
    router = await start_router(mock)
    client = await connect(router)
    client.send("POST", "/generate", b"{}")
    await script.until(lambda: mock.posts)
    assert (await request_to(router, "POST", f"/remove_worker?url={mock.url}")).json["running"] == 1
    reply = await client.reply()
    assert reply.complete
    assert reply.body.count(b"data:") == 20
    await script.until(lambda: not mock.connections)


async def test_force_cuts_what_is_still_being_connected(start_router, worker, request_to, connect, script, monkeypatch):
    """A host that has gone answers no connection for as long as the kernel tries."""
    router = await start_router(await worker(), connect_timeout_secs=60.0, retry_max_retries=0)
    (listed,) = router.registry
    loop, called = asyncio.get_running_loop(), asyncio.Event()

    async def hang(self, call):
        called.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(type(router.dispatcher.pool(listed)), "_open", hang)
    for connection in list(router.dispatcher.pool(listed).connections):
        connection.abandon()
    await script.until(lambda: not router.dispatcher.pool(listed).connections)
    client = await connect(router)
    client.send("POST", "/generate", b"{}")
    await asyncio.wait_for(called.wait(), 5)
    began = loop.time()
    assert (await request_to(router, "POST", f"/remove_worker?url={listed.url}&force=true")).status == 200
    assert (await client.reply()).status == 503
    assert loop.time() - began < 5


async def test_new_worker_takes_no_traffic_before_it_is_healthy(start_router, worker, chat, script):
    loading, ready = await worker(), await worker()
    loading.health = 503
    router = await start_router(loading, ready, wait=False, policy="round_robin")
    await script.until(lambda: router.registry.available("regular"))
    for _ in range(4):
        assert (await chat(router)).status == 200
    assert not loading.posts
    loading.health = 200
    await script.until(lambda: len(router.registry.available("regular")) == 2)


async def test_readiness_follows_the_workers_within_two_seconds(start_router, worker, request_to, script):
    mock = await worker()
    router = await start_router(mock, health_check_interval_secs=1.0)

    async def ready() -> int:
        return (await request_to(router, "GET", "/readiness")).status

    async def becomes(status: int) -> None:
        begun = asyncio.get_running_loop().time()
        while await ready() != status:
            assert asyncio.get_running_loop().time() - begun < 2.0
            await asyncio.sleep(0.02)

    assert await ready() == 200
    await mock.stop()
    await becomes(503)
    assert (await request_to(router, "GET", "/liveness")).status == 200
    await mock.start()
    await becomes(200)


async def test_refused_connection_takes_a_worker_out_at_once(start_router, worker, chat):
    dead, good = await worker(), await worker()
    router = await start_router(dead, good, policy="round_robin", health_check_interval_secs=60)
    await dead.stop()
    assert [(await chat(router)).status for _ in range(6)] == [200] * 6
    assert sum(router.metrics.retries.values()) == 1


async def test_hung_worker_is_taken_out_by_health_checks(start_router, worker, script):
    mock = await worker()
    router = await start_router(mock, health_check_timeout_secs=0.05, health_failure_threshold=2)
    mock.handle = script.silence
    await script.until(lambda: not router.registry.available("regular"))


async def test_broadcasts_reach_all(start_router, worker, request_to, script):
    workers = [await worker() for _ in range(3)]
    router = await start_router(*workers)
    reply = await request_to(router, "POST", "/abort_request", {"rid": "r-1"})
    assert (reply.status, reply.json["success"]) == (200, True)
    assert [mock.bodies for mock in workers] == [[b'{"rid": "r-1"}']] * 3
    workers[1].behaviour = script.status(500)
    reply = await request_to(router, "POST", "/flush_cache")
    assert (reply.status, sorted(reply.json["workers"].values())) == (502, [200, 200, 500])
    assert reply.json["errors"] == {workers[1].url: "scripted 500"}


async def test_questions_are_relayed(start_router, worker, request_to):
    router = await start_router(await worker(model="tiny"))
    assert (await request_to(router, "GET", "/get_server_info")).json == {"model": "tiny"}
    assert (await request_to(router, "GET", "/v1/models")).json["data"][0]["id"] == "tiny"
    assert (await request_to(router, "GET", "/health_generate")).status == 200


async def test_metrics(start_router, worker, request_to, chat, script):
    router = await start_router(await worker(), policy="cache_aware")
    for _ in range(3):
        await chat(router)
    await request_to(router, "GET", "/nowhere")
    text = (await request_to(router, "GET", "/metrics")).body.decode()
    url = next(iter(router.registry)).url
    for line in ('baton_router_requests_total{route="/v1/chat/completions",status="200"} 3.0',
                 'baton_router_requests_total{route="other",status="404"} 1.0',
                 'baton_router_time_to_first_token_seconds_count{route="/v1/chat/completions"} 3.0',
                 'baton_router_request_duration_seconds_bucket{le="+Inf",route="/v1/chat/completions"} 3.0',
                 f'baton_router_worker_healthy{{role="regular",worker="{url}"}} 1.0',
                 f'baton_router_worker_inflight_requests{{role="regular",worker="{url}"}} 0.0'):
        assert line in text.splitlines()


async def test_stop_lets_running_requests_end(start_router, worker, connect, script):
    mock = await worker(script.stream(*map(str, range(10)), pause=0.02))
    router = await start_router(mock)
    running, idle = await connect(router), await connect(router)
    running.send("POST", "/generate", b"{}")
    await script.until(lambda: mock.posts)
    stopping = asyncio.ensure_future(router.stop())
    assert await asyncio.wait_for(idle.reader.read(), 1) == b""
    with pytest.raises(OSError):
        await connect(router)
    assert (await running.reply()).complete
    await stopping
    router.stop = _nothing


async def _nothing():
    pass


_ERRORS = {
    "/v1/chat/completions": b'data: {"error":{', "/v1/completions": b'data: {"error":{',
    "/generate": b'data: {"error":{',
    "/v1/messages": b'event: error\ndata: {"error":{"type":"overloaded_error"',
    "/v1/responses": b'event: error\ndata: {"type":"error","code":"worker_unavailable"',
}


@pytest.mark.parametrize("pairs", [False, True])
async def test_what_outlives_the_grace_period_ends_with_an_error(pairs, start_router, worker, script, connect, caplog):
    """A stream by an event of its API, any other request by 503: whether it runs, queues, or is the router's own."""
    async def never_end(served):
        if b'"stream"' in served.body:
            served.head()
            served.event("one")
        await served.gone.wait()

    mock = await worker(never_end)
    workers = {"prefill": [await worker(script.silence)], "decode": [mock]} if pairs else {}
    router = await start_router(*(() if pairs else (mock,)), **workers, shutdown_grace_secs=0.1,
                                max_concurrent_requests=7)
    streams = {path: await connect(router) for path in _ERRORS}
    for path, client in streams.items():
        client.send("POST", path, b'{"stream": true}')
        assert b"data: one" in await client.reader.readuntil(b"one\n\n\r\n")
    plain = [await connect(router) for _ in range(4)]
    for client, path in zip(plain, ("/generate", "/v1/completions", "/generate", "/flush_cache")):
        client.send("POST", path, b"{}")  # the third waits in the queue
    await script.until(lambda: len(mock.posts) == 8 and router._gate.admission.queued == 1)
    await router.stop()
    router.stop = _nothing
    for path, client in streams.items():
        rest = await asyncio.wait_for(client.reader.read(), 5)
        assert _ERRORS[path] in rest, path
        assert rest.endswith(b"\r\n0\r\n\r\n")
    for client in plain:
        reply = await client.reply()
        assert (reply.status, reply.complete, reply.error["code"]) == (503, True, "worker_unavailable")
        assert "shut down" in reply.error["message"]
    assert "9 requests were cut at the end of --shutdown-grace-secs." in caplog.messages


def _launch(*args: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "baton.router.launch", "--log-json", *args]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


async def _log_line(process: subprocess.Popen, word: str) -> dict:
    """The next line of the log whose message has ``word``."""
    while True:
        line = json.loads(await asyncio.wait_for(asyncio.to_thread(process.stderr.readline), 5))
        if word in line["message"]:
            return line


async def test_command_line_serves_logs_and_stops(worker, script):
    mock = await worker(script.stream("one", pause=0.2))
    process = _launch("--port", "0", "--worker-urls", mock.url)
    address = (await _log_line(process, "Listening on"))["message"].split("//")[1].split()[0]
    await _log_line(process, "takes requests")
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"POST /generate HTTP/1.1\r\nHost: r\r\nX-Request-Id: r-1\r\nContent-Length: 2\r\n\r\n{}")
    await asyncio.wait_for(reader.readuntil(b"data: one"), 5)
    process.send_signal(signal.SIGTERM)  # while the stream runs: it still ends
    assert (await asyncio.wait_for(reader.read(), 5)).endswith(b"0\r\n\r\n")
    writer.close()
    line = await _log_line(process, "request")
    assert {key: line[key] for key in ("method", "path", "status", "request_id", "worker", "retries")} == {
        "method": "POST", "path": "/generate", "status": 200, "request_id": "r-1", "worker": mock.url, "retries": 0}
    assert await asyncio.to_thread(process.wait, 5) == 0


async def test_the_log_reports_work_and_failures(worker, script):
    mock = await worker(script.status(500))
    process = _launch("--port", "0", "--worker-urls", mock.url, "--log-interval", "1")
    address = (await _log_line(process, "Listening on"))["message"].split("//")[1].split()[0]
    await _log_line(process, "takes requests")
    reader, writer = await asyncio.open_connection(*address.split(":"))
    for path in (b"/readiness", b"/metrics", b"/nowhere"):  # no work, and no failure of a worker
        writer.write(b"GET %b HTTP/1.1\r\nHost: r\r\n\r\n" % path)
    await _log_line(process, "A request failed: There is no /nowhere")
    writer.write(b"POST /generate HTTP/1.1\r\nHost: r\r\nX-Request-Id: r-1\r\nContent-Length: 2\r\n\r\n{}")
    line = await _log_line(process, "A request failed: scripted 500")
    assert (line["level"], line["status"], line["request_id"], line["worker"]) == ("warning", 500, "r-1", mock.url)
    line = await _log_line(process, "serving")
    assert (line["component"], line["failed"], line["requests_s"], line["regular_healthy"]) == ("router", 1, 1.0, 1)
    writer.close()
    process.send_signal(signal.SIGTERM)
    assert "serving" not in await asyncio.to_thread(process.stderr.read)
    assert await asyncio.to_thread(process.wait, 5) == 0


async def test_second_signal_does_not_wait(worker, script):
    mock = await worker(script.silence)
    process = _launch("--port", "0", "--worker-urls", mock.url)
    address = (await _log_line(process, "Listening on"))["message"].split("//")[1].split()[0]
    await _log_line(process, "takes requests")
    _, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}")
    await script.until(lambda: mock.posts)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, 0.3)
    process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(process.wait, 3) != 0
    writer.close()


@pytest.mark.parametrize(("args", "sentence"), [
    (["--worker-urls", "ftp://h:1"], "malformed"),
    (["--prefill", "http://h:1"], "--pd-disaggregation"),
    (["--pd-disaggregation", "--prefill", "http://h:1", "x"], "bootstrap port"),
    (["--worker-urls", "http://h:1", "http://h:1/"], "more than once"),
    (["--policy", "nonsense"], "--policy"),
    (["--host", "256.1.1.1"], "Name or service not known"),
])
def test_bad_command_lines_end_with_a_sentence(args, sentence):
    process = _launch(*args)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 2
    assert sentence in stderr.splitlines()[-1]


async def test_occupied_port_ends_with_a_sentence(worker):
    mock = await worker()
    process = _launch("--port", str(mock.port))
    stderr = (await asyncio.to_thread(process.communicate, timeout=10))[1]
    assert process.returncode == 2
    assert stderr.startswith("launch_router: error: Cannot listen on")
    assert len(stderr.splitlines()) == 1


def test_import_needs_no_engine():
    code = "import sys, baton.router.launch; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert result.stdout.strip() == "[]", result.stderr
