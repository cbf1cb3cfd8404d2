"""A router in this process, scripted workers and a raw client, all over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from random import Random

import httptools
import pytest
import uvloop

from baton.common.config.cli import build
from baton.router.app import Router
from baton.router.config import RouterConfig


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


# ---------------------------------------------------------------------- workers


class Served(asyncio.Protocol):
    """One connection at a worker and the request that it serves; what a behaviour acts through."""

    def __init__(self, worker: MockWorker):
        self.worker = worker
        self.parser = httptools.HttpRequestParser(self)
        self.gone = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport):
        self.transport = transport
        self.worker.connections.add(self)
        self.worker.accepted += 1
        if self.worker.stopped:  # accepted just before
            transport.abort()

    def connection_lost(self, exc):
        self.worker.connections.discard(self)
        self.gone.set()
        self.writable.set()

    def pause_writing(self):
        self.writable.clear()

    def resume_writing(self):
        self.writable.set()

    def on_message_begin(self):
        self.target, self.headers, self.body = b"", [], b""

    def on_url(self, url):
        self.target += url

    def on_header(self, name, value):
        self.headers.append((name, value))

    def on_body(self, data):
        self.body += data

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_message_complete(self):
        self.method = self.parser.get_method()
        task = asyncio.ensure_future(self.worker.handle(self))
        self.worker.tasks.add(task)
        task.add_done_callback(self.worker.tasks.discard)

    @property
    def json(self):
        return json.loads(self.body)

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def answer(self, status=200, body=b'{"ok": true}', content_type="application/json", extra=b"") -> None:
        self.write(b"HTTP/1.1 %d X\r\ncontent-type: %s\r\ncontent-length: %d\r\n%s\r\n%s"
                   % (status, content_type.encode(), len(body), extra, body))

    def head(self) -> None:
        self.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                   b"transfer-encoding: chunked\r\n\r\n")

    def event(self, text: str) -> None:
        event = b"data: " + text.encode() + b"\n\n"
        self.write(b"%x\r\n%s\r\n" % (len(event), event))

    def end(self) -> None:
        self.write(b"0\r\n\r\n")

    def die(self) -> None:
        self.transport.abort()


Behaviour = Callable[[Served], Awaitable[None]]


async def answer(served: Served) -> None:
    served.answer()


async def silence(served: Served) -> None:
    await served.gone.wait()
    served.worker.left += 1


async def die(served: Served) -> None:
    served.die()


def status(code: int) -> Behaviour:
    async def refuse(served: Served) -> None:
        served.answer(code, b'{"error": {"message": "scripted %d"}}' % code)
    return refuse


def stream(*events: str, pause: float = 0.0) -> Behaviour:
    async def behave(served: Served) -> None:
        served.head()
        for event in events:
            served.event(event)
            await asyncio.sleep(pause)
        served.end()
    return behave


class MockWorker:
    """A worker whose behaviour on POST is a coroutine; ``posts`` keeps what it was sent, ``left`` who went away."""

    def __init__(self, behaviour: Behaviour, info: dict):
        self.behaviour = behaviour
        self.info = info
        self.models = info.pop("models", ("tiny",))
        self.health = 200
        self.engine_asked = 0
        self.engine_answers = True
        """False while an engine is dead whose API server does not know it yet."""
        self.metrics: bytes | None = None
        """Its page of metrics; None: the behaviour answers."""
        self.health_body: bytes | None = None
        self.posts: list[Served] = []
        self.left = 0
        self.accepted = 0
        self.stopped = False
        self.connections: set[Served] = set()
        self.tasks: set[asyncio.Future] = set()
        self.server = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[bytes]:
        return [served.body for served in self.posts]

    async def start(self) -> None:
        self.stopped = False
        self.server = await asyncio.get_running_loop().create_server(lambda: Served(self), "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self.server.close()
        self.stopped = True
        for task in list(self.tasks):
            task.cancel()
        closed = asyncio.ensure_future(self.server.wait_closed())
        while not closed.done():  # A connection that was accepted just before may be made only now.
            for connection in list(self.connections):
                connection.transport.abort()
            await asyncio.wait([closed], timeout=0.02)

    async def handle(self, served: Served) -> None:
        path = served.target.partition(b"?")[0]
        if path == b"/health":
            status_body = {"status": "ready", **({"epoch": self.info["epoch"]} if "epoch" in self.info else {})}
            served.answer(self.health, self.health_body or json.dumps(status_body).encode())
        elif path == b"/get_load" and self.info.get("stream_continuation"):  # one of ours
            self.engine_asked += 1
            if not self.engine_answers:
                await silence(served)
            else:
                served.answer(self.health, b"[]")
        elif path == b"/get_server_info":
            served.answer(body=json.dumps(self.info).encode())
        elif path == b"/v1/models" and served.method == b"GET":
            cards = [{"id": name, "object": "model", "owned_by": self.url} for name in self.models]
            served.answer(body=json.dumps({"object": "list", "data": cards}).encode() if cards else b"{}")
        elif path == b"/metrics" and self.metrics is not None:
            served.answer(body=self.metrics, content_type="text/plain")
        else:
            snapshot = Served.__new__(Served)
            snapshot.__dict__.update(served.__dict__)
            self.posts.append(snapshot)
            await self.behaviour(served)


@pytest.fixture
async def worker():
    """``await worker(behaviour, **server_info)`` starts a mock worker; ``models``: the names that it reports."""
    started: list[MockWorker] = []

    async def start(behaviour: Behaviour = answer, **info) -> MockWorker:
        mock = MockWorker(behaviour, info)
        await mock.start()
        started.append(mock)
        return mock

    yield start
    for mock in started:
        await mock.stop()


# ---------------------------------------------------------------------- the router


FAST = {"port": 0, "health_check_interval_secs": 0.1, "retry_initial_backoff_ms": 5.0, "shutdown_grace_secs": 0.5}


@pytest.fixture
async def start_router():
    """``await start_router(*workers, **config)`` starts a router and waits until all its workers are healthy.

    ``prefill=[...]`` and ``decode=[...]`` make it one of pairs. Afterwards no load may be left.
    """
    started: list[Router] = []

    async def start(*workers: MockWorker, prefill=(), decode=(), wait=True, **options) -> Router:
        if prefill or decode or options.get("pd_disaggregation"):
            options |= {"pd_disaggregation": True, "prefill": tuple((mock.url,) for mock in prefill),
                        "decode": tuple((mock.url,) for mock in decode)}
        config = build(RouterConfig, {"worker_urls": tuple(mock.url for mock in workers), **FAST, **options})
        made = Router(config, rng=Random(1))
        await made.start()
        started.append(made)
        if wait:
            await until(lambda: all(w.state == "healthy" for w in made.registry))
        return made

    yield start
    for made in started:
        await until(lambda made=made: not any(w.load for w in made.registry))
        await made.stop()
        assert not made._connections


async def until(condition: Callable[[], object], seconds: float = 3.0) -> None:
    """Wait for ``condition``; fails after ``seconds``."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


# ---------------------------------------------------------------------- the client


@dataclasses.dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes
    complete: bool

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        return self.json["error"]


class _Reading:
    def __init__(self):
        self.headers, self.body, self.complete = {}, b"", False

    def on_header(self, name, value):
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, data):
        self.body += data

    def on_message_complete(self):
        self.complete = True


class Client:
    """One raw connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, router: Router) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", router.port, limit=2**16))

    def send(self, method: str, path: str, body: bytes = b"", headers: str = "") -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: r\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)

    async def reply(self, *, head_only: bool = False) -> Reply:
        reading, raw = _Reading(), b""
        parser = httptools.HttpResponseParser(reading)
        while not reading.complete:
            data = await asyncio.wait_for(self.reader.read(1) if head_only else self.reader.read(65536), 5)
            if not data or (head_only and (raw + data).endswith(b"\r\n\r\n")):
                raw += data
                parser.feed_data(data) if data else None
                break
            raw += data
            parser.feed_data(data)
        return Reply(parser.get_status_code(), reading.headers, reading.body, raw, reading.complete)

    def leave(self) -> None:
        self.writer.transport.abort()


@pytest.fixture
async def connect():
    """``await connect(router)`` opens a client connection."""
    opened: list[Client] = []

    async def open_client(router: Router) -> Client:
        opened.append(await Client.connect(router))
        return opened[-1]

    yield open_client
    for client in opened:
        client.leave()


@pytest.fixture
def request_to(connect):
    """``await request_to(router, method, path, body)`` on a connection of its own."""

    async def one(router: Router, method: str, path: str, body=b"", headers: str = "") -> Reply:
        client = await connect(router)
        client.send(method, path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
        return await client.reply(head_only=method == "HEAD")

    return one


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def chat(request_to):
    """``await chat(router, **fields)`` posts a chat request."""

    async def one(router: Router, **fields) -> Reply:
        return await request_to(router, "POST", "/v1/chat/completions", {**CHAT, **fields})

    return one


@pytest.fixture
def script():
    """The behaviours of mock workers, by name (tests cannot import from a conftest)."""
    import types

    return types.SimpleNamespace(answer=answer, silence=silence, die=die, status=status, stream=stream, until=until)
