"""A server as a process: its role, its start, its end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton.common.serving.sse import stream_events
from baton.common.serving.web import is_server_fault
from baton.tests.helpers.fake_engine import Seed
from baton.tests.helpers.serving import Server, assert_gone, generate, wait_running

# ---------------------------------------------------------------- roles


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_bootstrap_fields_by_role(checkpoint: Path, tmp_path: Path, mode: str) -> None:
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--disaggregation-mode", mode,
                    "--stream-interval", "4")
    try:
        server.wait_ready()
        async with aiohttp.ClientSession(server.url) as http:
            status, answer = await generate(http, text="hello world")
            if mode == "prefill":
                assert status == 400 and "bootstrap_host" in answer["error"]["message"]
            else:
                assert status == 200 and answer["text"] == "hello world"
            meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": None, "bootstrap_room": 5}
            status, answer = await generate(http, text="hello world", **meeting)
            assert status == 200 and answer["meta_info"]["completion_tokens"] == (1 if mode == "prefill" else 3)
            body = {"input_ids": list(range(50, 60)), "stream": True, **meeting}
            async with http.post("/generate", json=body) as found:
                counts = [json.loads(line[6:])["meta_info"]["completion_tokens"]
                          async for line in found.content if line.startswith(b"data: {")]
            assert counts == [1] if mode == "prefill" else counts[0] == 1 and counts[-1] == 11 and len(counts) <= 4
            status, answer = await generate(http, text="x", bootstrap_host="127.0.0.1")
            assert status == 400 and "bootstrap_room is missing" in answer["error"]["message"]
        assert server.get("/health_generate")[0] == 200
        assert server.end(signal.SIGINT) == 0
    finally:
        server.kill()


# ---------------------------------------------------------------- life


def test_starting_then_stopping_gracefully(checkpoint: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--random-seed", "200")
    try:
        loading = {"status": "starting", "stage": "loading weights", "progress": 0.5}
        server.wait(lambda: server.get("/health")[1] == loading)
        status, answer = server.get("/flush_cache")
        assert status == 503 and "loading weights, 50%" in answer["error"]["message"]
        server.wait_ready()
        children = server.children()
        body = json.dumps({"text": "hello", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as running:
            running.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            server.wait(lambda: server.engine()["num_running"] == 1)
            server.process.send_signal(signal.SIGTERM)
            answer = b""
            while b'"completion_tokens":300' not in answer:
                received = running.recv(65536)
                assert received, answer
                answer += received
        assert server.process.wait(10) == 0
        assert_gone(children)
        lines = server.log.read_text().splitlines()
        assert lines.index("service started") < lines.index("service stopped")
    finally:
        server.kill()


def test_a_dead_rank_ends_the_server(checkpoint: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--tp-size", "2")
    try:
        server.wait_ready()
        children = server.children()
        request = urllib.request.Request(server.url + "/generate", json.dumps(
            {"text": "x", "sampling_params": {"seed": int(Seed.DIE)}}).encode())
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=10)
        assert error.value.code == 503
        message = "Rank 0 of the engine ended with exit code 7."
        assert json.loads(error.value.read())["error"]["message"] == message
        assert server.get("/health") == (503, {"status": "dead", "message": message})
        assert server.process.wait(10) == 1
        assert_gone(children)
    finally:
        server.kill()


@pytest.mark.parametrize(("flags", "sentence"), [
    (("--model-path", "/nowhere/model"), "there is no checkpoint folder /nowhere/model"),
    (("--model-path", "{checkpoint}", "--tokenizer-path", "/nowhere/tokenizer"), "no tokenizer folder"),
    (("--model-path", "{checkpoint}", "--chat-template", "/nowhere/chat"), "Cannot read --chat-template"),
    (("--model-path", "{checkpoint}", "--random-seed", "13"), "The fake engine was told to fail"),
    (("--model-path", "{checkpoint}", "--random-seed", "14"), "The service was told to fail"),
    (("--model-path", "{checkpoint}", "--context-length", "100000"), "--context-length 100000 must be"),
    (("--model-path", "{checkpoint}", "--host", "192.0.2.1"), "Cannot listen on 192.0.2.1"),
])
def test_a_server_that_cannot_start_says_why(checkpoint: Path, tmp_path: Path, flags: tuple[str, ...],
                                             sentence: str) -> None:
    server = Server(tmp_path / "log", *(flag.format(checkpoint=checkpoint) for flag in flags))
    try:
        assert server.process.wait(30) == 1
        last = server.log.read_text().splitlines()[-1]
        assert last.startswith("error: ") and sentence in last
        assert "Traceback" not in server.log.read_text()
    finally:
        server.kill()


def test_an_occupied_port_is_noticed_before_ranks_start(checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Server(tmp_path / "log", "--model-path", str(checkpoint), port=port)
        assert server.process.wait(20) == 1
    assert server.log.read_text().strip() == (
        f"error: Cannot listen on 127.0.0.1 port {port}: {os.strerror(98)}; choose another --port.")


_WORDS = "hello world " * 30
_CHAT = {"messages": [{"role": "user", "content": _WORDS}], "max_tokens": 400}
_LONG = {
    "/v1/chat/completions": (_CHAT, b'data: {"error":{'),
    "/v1/completions": ({"prompt": _WORDS, "max_tokens": 400}, b'data: {"error":{'),
    "/generate": ({"text": _WORDS, "sampling_params": {"max_new_tokens": 400}}, b'data: {"error":{'),
    "/v1/messages": (_CHAT, b'event: error\ndata: {"'),
    "/v1/responses": ({"input": _WORDS, "max_output_tokens": 400}, b"event: response.failed\ndata: {"),
}


async def test_what_outlives_the_grace_period_ends_with_an_error(checkpoint: Path, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream by an event of its API, any other request by 503; a body that has not come is not waited for."""
    monkeypatch.setenv("FAKE_ENGINE_STEP_SECONDS", "0.1")
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--shutdown-grace-secs", "0.1")
    try:
        server.wait_ready()
        async with aiohttp.ClientSession(server.url) as http:
            streams = {path: await http.post(path, json={**body, "stream": True}) for path, (body, _) in _LONG.items()}
            begun = {path: await answer.content.readany() for path, answer in streams.items()}
            assert all(begun.values())
            plain = [asyncio.create_task(http.post(path, json=body)) for path, (body, _) in _LONG.items()]
            half = asyncio.create_task(http.post("/generate", data=_endless(), headers={"Content-Length": "100"}))
            await wait_running(http, 2 * len(_LONG))
            server.process.send_signal(signal.SIGTERM)
            for path, answer in streams.items():
                rest = await answer.content.read()
                assert _LONG[path][1] in rest and b"shut down before" in rest, path
            for answer in await asyncio.gather(*plain, half):
                assert answer.status == 503 and "shut down before" in (await answer.json())["error"]["message"]
        assert server.process.wait(10) == 0
        log = server.log.read_text()
        assert "11 requests were cut at the end of --shutdown-grace-secs" in log and "Traceback" not in log
    finally:
        server.kill()


async def _endless() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.Event().wait()


async def test_a_client_that_leaves_at_the_end_of_a_stream_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def events(request: web.Request) -> AsyncIterator[bytes]:
        yield b"data: [DONE]\n\n"
        request.transport.abort()

    async def stream(request: web.Request) -> web.StreamResponse:
        return await stream_events(request, events(request))

    app = web.Application()
    app.router.add_get("/", stream)
    logging.getLogger("aiohttp.server").addFilter(is_server_fault)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientError):
            await (await http.get(server.make_url("/"))).read()
    assert not caplog.records


async def test_requests_that_do_not_arrive_are_given_up(checkpoint: Path, tmp_path: Path) -> None:
    """Half a head, half a body, and those that go on a byte at a time; a body that comes fast enough may take long."""
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--client-header-timeout-secs", "1",
                    "--client-body-timeout-secs", "1")
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    whole = b'{"text": "a", "x": "%b"}' % (b"x" * 96 * 1024)

    async def ask(start: bytes, *drops: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(start)
        answer = asyncio.ensure_future(reader.read(2**16))
        for drop in drops:
            await asyncio.sleep(0.2)
            if answer.done():
                break
            writer.write(drop)
        found = await asyncio.wait_for(answer, 10)
        writer.close()
        return found.partition(b"\r\n")[0]

    try:
        server.wait_ready()
        pieces = [whole[start:start + 12 * 1024] for start in range(0, len(whole), 12 * 1024)]
        found = await asyncio.gather(
            ask(b""), ask(head[:30]), ask(head[:30], *[b"x"] * 50), ask(head % 100 + b"{"),
            ask(head % 1000 + b"{", *[b" "] * 50), ask(head % len(whole), *pieces))
        assert found == [b"HTTP/1.1 408 Request Timeout"] * 5 + [b"HTTP/1.1 200 OK"]
        assert server.end() == 0
        assert "Traceback" not in server.log.read_text()
    finally:
        server.kill()
