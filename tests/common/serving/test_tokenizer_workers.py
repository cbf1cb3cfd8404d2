"""One server of several API server processes: clients notice nothing but its speed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.tests.helpers.fake_engine import CONTEXT, Seed
from baton.tests.helpers.serving import Server, assert_gone, generate, user, wait_running

WORKERS = 2
LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("workers")
    server = Server(folder / "log", "--model-path", str(checkpoint), "--tokenizer-worker-num", str(WORKERS),
                    "--admin-api-key", "boss", "--file-storage-path", str(folder / "files"), "--allow-auto-truncate",
                    "--tokenizer-metrics-allowed-custom-labels", "team", "--enable-request-time-stats-logging",
                    "--enable-metrics-for-all-schedulers", "--gc-warning-threshold-secs", "1e-9")
    try:
        yield server.wait_ready()
    finally:
        server.kill()


@pytest.fixture
async def workers(server: Server) -> AsyncIterator[list[aiohttp.ClientSession]]:
    """A session with one connection to each worker, in the order of their pids."""
    sessions = await connect_to_each(server)
    yield sessions
    for session in sessions:
        await session.close()


@pytest.fixture
async def side(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """A session of any worker, beside those that have one connection."""
    async with aiohttp.ClientSession(server.url) as http:
        yield http


async def connect_to_each(server: Server, count: int = 1) -> list[aiohttp.ClientSession]:
    """``count`` sessions of one connection with each worker: the kernel chooses the worker by a hash of addresses."""
    found: dict[int, list[aiohttp.ClientSession]] = {}
    others = []
    while len(found) < WORKERS or any(len(each) < count for each in found.values()):
        http = aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=1))
        async with http.get("/health") as answer:
            assert answer.status == 200 and await answer.read()
        sessions = found.setdefault(owner_of(server, http), [])
        (sessions if len(sessions) < count else others).append(http)
    for http in others:
        await http.close()
    return [http for pid in sorted(found) for http in found[pid]]


def owner_of(server: Server, http: aiohttp.ClientSession) -> int:
    """The pid of the worker that has accepted the connection of a session."""
    [[(held, *_)]] = [list(each) for each in http.connector._conns.values()]  # type: ignore[union-attr]
    port = held.transport.get_extra_info("sockname")[1]
    local, remote = f"0100007F:{server.port:04X}", f"0100007F:{port:04X}"
    inode = next(fields[9] for line in Path("/proc/net/tcp").read_text().splitlines()
                 if (fields := line.split())[1:3] == [local, remote])
    for pid in server.children():
        for each in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(each) == f"socket:[{inode}]":
                    return pid
            except OSError:  # a descriptor that was closed meanwhile
                continue
    raise AssertionError(f"nobody has the connection from port {port}")


async def post(http: aiohttp.ClientSession, path: str, body: Any, key: str = "boss") -> tuple[int, Any]:
    async with http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
        return answer.status, json.loads(await answer.read())


async def counter(http: aiohttp.ClientSession, name: str) -> float:
    async with http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def test_requests_are_served_by_each_worker_and_counted_together(
        workers: list[aiohttp.ClientSession]) -> None:
    before = [await counter(http, "baton:num_requests_total") for http in workers]
    assert before[0] == before[1]
    for http in workers:
        body = {"messages": user("hello world"), "stream": True}
        async with http.post("/v1/chat/completions", json=body) as answer:
            events = (await answer.read()).decode().split("\n\n")
        texts = [json.loads(event[6:])["choices"][0]["delta"].get("content") for event in events
                 if event.startswith("data: {")]
        assert "".join(text or "" for text in texts) == "hello world"
        status, answer = await generate(http, text=["hello", "the quick fox"], sampling_params={"n": 2})
        assert status == 200 and [each["text"] for each in answer] == ["hello"] * 2 + ["the quick fox"] * 2
        assert (await generate(http, text=""))[0] == 400
    for http in workers:
        assert await counter(http, "baton:num_requests_total") == before[0] + 12, "refusals too"


async def test_requests_are_counted_by_the_labels_that_they_give(workers: list[aiohttp.ClientSession]) -> None:
    for http in workers:
        for header in ('{"team": "red", "other": "x"}', "no JSON", '["red"]', '{"team": 5}'):
            async with http.post("/generate", json={"text": "hello"}, headers={"x-custom-labels": header}) as answer:
                assert answer.status == 200
        async with http.post("/generate", json={"text": ""}, headers={"x-custom-labels": '{"team": "red"}'}) as answer:
            assert answer.status == 400
    start = 'baton:num_requests_total{mode="null",model_name="' + await model_name(workers[0]) + '",outcome='
    assert await counter(workers[0], start + '"stop",team="red"}') == 2
    assert await counter(workers[1], start + '"invalid_request",team="red"}') == 2
    assert await counter(workers[0], start + '"stop",team=""}') >= 6
    async with workers[0].get("/metrics") as answer:
        assert 'baton:num_requests_running{dp_rank="0",' in await answer.text()


async def model_name(http: aiohttp.ClientSession) -> str:
    async with http.get("/v1/models") as answer:
        return (await answer.json())["data"][0]["id"]


async def test_long_prompts_are_truncated(workers: list[aiohttp.ClientSession]) -> None:
    for http in workers:
        ids = [50 + i % 40 for i in range(600)]
        status, answer = await generate(http, input_ids=ids, sampling_params={"max_new_tokens": 100})
        assert status == 200, answer
        assert answer["meta_info"]["prompt_tokens"] == CONTEXT - 6 and answer["meta_info"]["completion_tokens"] == 6
        assert answer["output_ids"] == ids[:6], "the beginning stays"
        status, answer = await generate(http, text="hello " * 100_000)
        assert status == 200 and answer["meta_info"]["prompt_tokens"] == CONTEXT - 6
        body = {"messages": user("hello " * 1000), "max_tokens": 400}
        status, answer = await post(http, "/v1/chat/completions", body)
        assert status == 200 and answer["usage"]["prompt_tokens"] == CONTEXT - 6
        status, answer = await generate(http, input_ids=ids[:500], sampling_params={"max_new_tokens": 100})
        assert status == 200 and answer["meta_info"]["completion_tokens"] == CONTEXT - 500


async def test_times_of_requests_and_slow_collections_are_logged(server: Server) -> None:
    async with aiohttp.ClientSession(server.url) as http:
        assert (await generate(http, text="hello", rid="timed"))[0] == 200
        assert (await post(http, "/freeze_gc", {}))[0] == 200
    server.wait(lambda: "rid=timed" in server.log.read_text() and "a garbage collection of" in server.log.read_text())
    line = next(line for line in server.log.read_text().splitlines() if "rid=timed" in line)
    assert "request times" in line and "outcome=stop" in line and "total_ms=" in line


async def test_errors_of_the_engine_keep_their_status(workers: list[aiohttp.ClientSession]) -> None:
    for http in workers:
        status, answer = await generate(http, text="x", sampling_params={"seed": int(Seed.FAIL_FIRST)})
        assert status == 502 and answer["error"]["code"] == "kv_transfer_failed", answer


async def test_a_request_id_is_taken_in_all_workers(workers: list[aiohttp.ClientSession]) -> None:
    first, second = workers
    running = asyncio.create_task(generate(first, text="x", rid="same", sampling_params=LONG))
    await wait_running(second, 1)
    status, answer = await generate(second, text="x", rid="same")
    assert status == 409 and "'same'" in answer["error"]["message"]
    assert (await running)[0] == 200
    assert (await generate(second, text="x", rid="same"))[0] == 200


async def test_a_client_that_leaves_one_worker_may_come_to_another_with_its_request_id(
        workers: list[aiohttp.ClientSession]) -> None:
    first, second = workers
    leaving = asyncio.create_task(generate(first, text="x", rid="again", sampling_params=LONG))
    await wait_running(second, 1)
    leaving.cancel()
    status, answer = await generate(second, text="hello", rid="again")
    assert status == 200 and answer["text"] == "hello"
    await wait_running(second, 0)


async def test_abort_reaches_the_worker_that_has_the_request(workers: list[aiohttp.ClientSession],
                                                             side: aiohttp.ClientSession) -> None:
    first, second = workers
    silent = {"seed": int(Seed.SILENT)}
    running = asyncio.create_task(generate(first, text=["a", "b"], rid="long", sampling_params=silent))
    await wait_running(second, 2)
    assert (await post(second, "/abort_request", {"rid": "long"}))[0] == 200
    status, answer = await running
    assert status == 200 and [each["meta_info"]["finish_reason"]["type"] for each in answer] == ["abort"] * 2
    running = asyncio.gather(*(generate(http, text="a", sampling_params=silent) for http in workers))
    await wait_running(side, 2)
    assert (await post(side, "/abort_request", {"abort_all": True}, key="none"))[0] == 401
    assert (await post(side, "/abort_request", {"abort_all": True}))[0] == 200
    assert [answer["meta_info"]["finish_reason"]["type"] for _, answer in await running] == ["abort"] * 2


async def test_state_changes_are_known_to_all_workers_when_they_are_answered(
        workers: list[aiohttp.ClientSession]) -> None:
    for version in map(str, range(20)):
        assert (await post(workers[0], "/update_weight_version", {"new_version": version}))[0] == 200
        for http in workers:
            _, answer = await generate(http, text="x")
            assert answer["meta_info"]["weight_version"] == version
            async with http.get("/get_weight_version") as found:
                assert (await found.json())["weight_version"] == version


async def test_a_pause_holds_the_requests_of_all_workers(workers: list[aiohttp.ClientSession],
                                                         side: aiohttp.ClientSession) -> None:
    assert (await post(side, "/pause_generation", {}))[0] == 200
    waiting = [asyncio.create_task(generate(http, text="x")) for http in workers]
    assert not (await asyncio.wait(waiting, timeout=0.1))[0]
    assert (await post(side, "/continue_generation", {}))[0] == 200
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_sessions_and_files_are_those_of_the_server(workers: list[aiohttp.ClientSession]) -> None:
    first, second = workers
    _, name = await post(first, "/open_session", {"capacity_of_str_len": 1000})
    _, answer = await generate(first, text="hello ", rid="one", session_params={"id": name})
    _, answer = await generate(second, text="world", session_params={"id": name, "rid": "one"})
    assert answer["text"] == "hello hello ", "the engine echoes the prompt up to an end-of-sequence token"
    assert (await post(second, "/close_session", {"session_id": name}))[0] == 200
    assert (await generate(first, text="x", session_params={"id": name}))[0] == 404
    form = aiohttp.FormData({"purpose": "batch"})
    content = b"x" * 1_000_000
    form.add_field("file", content, filename="a.jsonl")
    async with first.post("/v1/files", data=form) as answer:
        file = (await answer.json())["id"]
    async with second.get(f"/v1/files/{file}/content") as answer:
        assert await answer.read() == content


async def test_a_worker_that_dies_loses_its_requests_alone(server: Server) -> None:
    first, _, second, side = sessions = await connect_to_each(server, 2)
    pid = owner_of(server, first)
    assert (await generate(first, text="hello"))[0] == 200
    before = await counter(side, "baton:num_requests_total")
    silent = {"seed": int(Seed.SILENT)}
    lost = asyncio.create_task(generate(first, text="x", sampling_params=silent))
    kept = asyncio.create_task(generate(second, text="x", rid="kept", sampling_params=silent))
    await wait_running(side, 2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(aiohttp.ClientConnectionError):
        await lost
    await wait_running(side, 1)
    assert (await post(side, "/abort_request", {"rid": "kept"}))[0] == 200
    assert (await kept)[0] == 200
    assert await counter(side, "baton:num_requests_total") == before + 1, "counts never fall"
    for http in sessions:
        await http.close()
    found = await connect_to_each(server)
    for http in found:
        assert (await generate(http, text="hello"))[0] == 200
    assert await counter(found[0], "baton:num_requests_total") == before + 3
    for http in found:
        await http.close()
    assert "was ended by SIGKILL with 1 requests; another one starts" in server.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_end_before_the_server(checkpoint: Path, tmp_path: Path, number: int) -> None:
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--tokenizer-worker-num", "2")

    async def run() -> None:
        first, side, second, _ = sessions = await connect_to_each(server, 2)
        running = [asyncio.create_task(generate(http, text="x", sampling_params=LONG)) for http in (first, second)]
        await wait_running(side, 2)
        server.process.send_signal(number)
        for status, answer in await asyncio.gather(*running):
            assert status == 200 and answer["meta_info"]["completion_tokens"] == 400
        for http in sessions:
            await http.close()

    try:
        server.wait_ready()
        children = server.children()
        asyncio.run(run())
        assert server.process.wait(10) == 0, server.log.read_text()
        assert_gone(children)
        assert "Traceback" not in server.log.read_text()
    finally:
        server.kill()


def test_a_dead_engine_is_said_by_all_workers(checkpoint: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--tokenizer-worker-num", "2")

    async def run() -> None:
        workers = await connect_to_each(server)
        silent = asyncio.create_task(generate(workers[1], text="x", sampling_params={"seed": int(Seed.SILENT)}))
        await wait_running(workers[0], 1)
        died = await generate(workers[0], text="x", sampling_params={"seed": int(Seed.DIE)})
        for status, answer in (died, await silent):
            assert status == 503 and answer["error"]["code"] == "engine_dead"
        for http in workers:
            await http.close()

    try:
        server.wait_ready()
        children = server.children()
        asyncio.run(run())
        assert server.process.wait(10) == 1
        assert_gone(children)
    finally:
        server.kill()


@pytest.mark.parametrize(("flags", "sentence"), [
    (("--chat-template", "/nowhere/chat"), "Cannot read --chat-template"),
    (("--host", "192.0.2.1"), "Cannot listen on 192.0.2.1"),
    (("--tokenizer-worker-num", "0"), "--tokenizer-worker-num must be 1 or more"),
])
def test_a_server_that_cannot_start_says_why(checkpoint: Path, tmp_path: Path, flags: tuple[str, ...],
                                             sentence: str) -> None:
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--tokenizer-worker-num", "2", *flags)
    try:
        assert server.process.wait(30)
        assert sentence in server.log.read_text().splitlines()[-1]
        assert "Traceback" not in server.log.read_text()
    finally:
        server.kill()
