"""A router of two processes, started by its command line, with scripted workers: they decide as one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from baton.tests.helpers.ports import free_port
from baton.tests.router.relay.test_continuation import hang
from baton.tests.router.relay.test_poison import mortal

CHAT = "/v1/chat/completions"


class Front:
    """A running router: its port, its processes and what it logged."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path):
        self.process = process
        self.port = port
        self.log = log

    @property
    def children(self) -> list[int]:
        try:
            return sorted(map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
                              .split()))
        except OSError:
            return []

    def owners(self, clients: list) -> dict[int, int]:
        """The processes that have accepted clients' connections, by the client's port."""
        ports = {client.writer.get_extra_info("sockname")[1] for client in clients}
        here, inodes = f" 0100007F:{self.port:04X} ", {}
        for line in Path("/proc/net/tcp").read_text().splitlines():
            if here in line[:22]:
                fields = line.split()
                inodes[f"socket:[{fields[9]}]"] = int(fields[2].partition(":")[2], 16)
        by_pid = {}
        for pid in self.children:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    by_pid[inodes.get(os.readlink(descriptor), 0)] = pid
                except OSError:
                    continue
        return {port: pid for port, pid in by_pid.items() if port in ports}

    def owner(self, client) -> int:
        return next(iter(self.owners([client]).values()))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.fixture
async def several(tmp_path, script, connect):
    """``await several(*workers, **flags)`` starts a router of two processes and waits for its workers."""
    started: list[Front] = []

    async def start(*workers, wait=True, **flags) -> Front:
        port = free_port()
        flags = {"health_check_interval_secs": 0.2, "shutdown_grace_secs": 3.0, **flags}
        argv = ["--port", str(port), "--router-workers", "2"]
        if workers:
            argv += ["--worker-urls", *(mock.url for mock in workers)]
        for name, value in flags.items():
            for one in value if isinstance(value, list) else [value]:
                argv += ["--" + name.replace("_", "-"), *([] if one is True else str(one).split())]
        log = tmp_path / f"router-{port}.log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", "baton.router.launch", *argv,
                                                           stderr=stderr)
        router = Front(process, port, log)
        started.append(router)
        await script.until(lambda: process.returncode is not None or "Listening on" in log.read_text(), 20)
        assert process.returncode is None, log.read_text()
        if wait:
            await knowing(router, len(workers))
        return router

    async def knowing(router: Front, count: int) -> None:
        """Wait until both processes know so many healthy workers."""
        ready: set[int] = set()

        async def look() -> dict[str, dict]:
            client = await connect(router)
            seen = await workers_seen(client)
            if sum(shown["healthy"] for shown in seen.values()) == count:
                ready.add(router.owner(client))
            client.leave()
            return seen

        await until_answer(look, lambda seen: len(ready) == 2)

    yield start
    for router in started:
        if router.process.returncode is None:
            children = router.children
            router.process.terminate()
            assert await asyncio.wait_for(router.process.wait(), 15) == 0, router.log.read_text()
            assert not any(map(runs, children))
        assert "Traceback" not in router.log.read_text(), router.log.read_text()


@pytest.fixture
def on_each(connect, script):
    """``await on_each(router, count)``: ``count`` connections to each process, by process."""

    async def open_clients(router: Front, count: int = 1) -> list[list]:
        by_pid: dict[int, list] = {pid: [] for pid in router.children}
        assert len(by_pid) == 2
        deadline = asyncio.get_running_loop().time() + 20  # One that was just started listens a second later.
        while asyncio.get_running_loop().time() < deadline:
            clients = [await connect(router) for _ in range(2 * count + 2)]
            await script.until(lambda clients=clients: len(router.owners(clients)) == len(clients), 10)
            owners = router.owners(clients)
            for client in clients:
                pid = owners[client.writer.get_extra_info("sockname")[1]]
                if len(by_pid[pid]) < count:
                    by_pid[pid].append(client)
                else:
                    client.leave()
            if all(len(clients) == count for clients in by_pid.values()):
                return [by_pid[pid] for pid in sorted(by_pid)]
        raise AssertionError("one process gets no connections")

    return open_clients


async def ask(client, method: str, path: str, body=None, headers: str = ""):
    client.send(method, path, b"" if body is None else json.dumps(body).encode(), headers)
    return await client.reply()


async def workers_seen(client) -> dict[str, dict]:
    return {shown["url"]: shown for shown in (await ask(client, "GET", "/list_workers")).json["workers"]}


async def until_answer(ask_for: Callable[[], Awaitable[Any]], expected: Callable[[Any], object],
                       seconds: float = 10.0) -> None:
    """Asks until the answer is as expected; fails after ``seconds`` with the last one."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not expected(answer := await ask_for()):
        assert asyncio.get_running_loop().time() < deadline, answer
        await asyncio.sleep(0.02)


async def until_seen(client, expected: Callable[[dict[str, dict]], object]) -> None:
    """Waits until the workers that a router shows are as expected."""
    await until_answer(lambda: workers_seen(client), expected)


async def until_queued(client, count: int) -> None:
    await until_answer(lambda: ask(client, "GET", "/metrics"),
                     lambda reply: f"queued_requests {count}.0" in reply.body.decode())


def chat(text: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": text}], **more}


def gated():
    """A behaviour that streams "one", waits for the gate, and streams "two"; and the gate."""
    gate = asyncio.Event()

    async def behave(served):
        served.head()
        served.event("one")
        await gate.wait()
        served.event("two")
        served.end()

    return behave, gate


async def test_loads_are_of_all_processes_and_a_drain_waits_for_all(several, worker, on_each, script):
    behave, gate = gated()
    first, second = await worker(behave), await worker(behave)
    router = await several(first, second, policy="least_loaded")
    streams = [client for pair in zip(*await on_each(router, 4)) for client in pair]
    for number, client in enumerate(streams, 1):
        client.send("POST", CHAT, json.dumps(chat("x", stream=True)).encode())
        await script.until(lambda number=number: len(first.posts) + len(second.posts) == number)
        assert abs(len(first.posts) - len(second.posts)) <= 1
    (one,), (other,) = await on_each(router)
    for client in (one, other):
        assert {shown["load"] for shown in (await workers_seen(client)).values()} == {4}
        text = (await ask(client, "GET", "/metrics")).body.decode()
        assert f'inflight_requests{{role="regular",worker="{first.url}"}} 4.0' in text
        assert "baton_router_running_requests 8.0" in text
    drained = await ask(one, "POST", f"/drain_worker?url={first.url}")
    assert drained.json["running"] == 4
    for client in (one, other):
        assert (await workers_seen(client))[first.url]["draining"]
    more = [client for clients in await on_each(router, 2) for client in clients]
    for client in more:
        client.send("POST", CHAT, json.dumps(chat("y", stream=True)).encode())
    await script.until(lambda: len(second.posts) == 8)
    assert len(first.posts) == 4
    gate.set()
    for client in streams + more:
        assert (await client.reply()).body.endswith(b"data: two\n\n")
    for client in (one, other):
        await until_seen(client, lambda seen: first.url not in seen)
    assert (await workers_seen(one))[second.url]["load"] == 0
    text = (await ask(other, "GET", "/metrics")).body.decode()
    assert f'requests_total{{route="{CHAT}",status="200"}} 12.0' in text
    assert f'request_duration_seconds_count{{route="{CHAT}"}} 12.0' in text
    data = (await ask(one, "GET", "/dashboard/data")).json
    assert [shown["url"] for shown in data["workers"]] == [second.url]


async def test_what_one_process_sent_where_the_other_knows(several, worker, on_each):
    mocks = [await worker() for _ in range(3)]
    router = await several(*mocks, policy="cache_aware")
    (one,), (other,) = await on_each(router)
    for number in range(6):
        prompt = chat(f"{number} " * 2000)
        before = [len(mock.posts) for mock in mocks]
        for client in (one, other, other):
            assert (await ask(client, "POST", CHAT, prompt)).status == 200
        assert sorted(len(mock.posts) - was for mock, was in zip(mocks, before)) == [0, 0, 3]
    text = (await ask(one, "GET", "/metrics")).body.decode()
    assert 'policy_decisions_total{reason="cache_hit",role="regular"} 12.0' in text


async def test_turns_go_round_over_all_processes(several, worker, on_each):
    mocks = [await worker() for _ in range(3)]
    router = await several(*mocks, policy="round_robin")
    (one,), (other,) = await on_each(router)
    for _ in range(3):
        before = [len(mock.posts) for mock in mocks]
        for client in (one, other, other):
            await ask(client, "POST", CHAT, chat("x"))
        assert [len(mock.posts) - was for mock, was in zip(mocks, before)] == [1, 1, 1]


async def test_a_change_at_one_process_holds_at_all(several, worker, on_each):
    mock = await worker()
    router = await several(health_check_interval_secs=60)
    checks = []
    handle = mock.handle

    async def counted(served):
        if served.target == b"/health":
            checks.append(served)
        await handle(served)

    mock.handle = counted
    (one,), (other,) = await on_each(router)
    assert (await ask(other, "POST", CHAT, chat("x"))).status == 503
    made = await ask(one, "POST", "/workers", {"url": mock.url})
    assert made.status == 202
    assert list(await workers_seen(other)) == [mock.url]
    assert (await ask(other, "POST", f"/add_worker?url={mock.url}")).status == 409
    for client in (one, other):
        await until_seen(client, lambda seen: seen[mock.url]["healthy"])
        assert (await ask(client, "POST", CHAT, chat("x"))).status == 200
        assert (await ask(client, "GET", "/readiness")).status == 200
        assert (await ask(client, "GET", made.headers["location"])).json["models"] == ["tiny"]
    assert len(checks) == 1
    location = made.headers["location"]
    assert (await ask(other, "PUT", location, {"priority": 7, "api_key": "secret"})).status == 202
    assert (await ask(one, "GET", location)).json["priority"] == 7
    for client in (one, other):
        await ask(client, "POST", CHAT, chat("x"))
        assert (b"authorization", b"Bearer secret") in mock.posts[-1].headers
    assert (await ask(other, "POST", f"/remove_worker?url={mock.url}")).status == 200
    for client in (one, other):
        assert (await ask(client, "POST", CHAT, chat("x"))).status == 503
    assert (await ask(one, "POST", f"/remove_worker?url={mock.url}")).status == 404
    assert (await ask(one, "GET", "/add_worker")).status == 405


async def test_a_worker_that_fails_one_process_is_kept_from_all(several, worker, on_each, script):
    failing, good, dying = await worker(script.status(500)), await worker(), await worker()
    router = await several(failing, good, dying, policy="consistent_hash", disable_retries=True, cb_failure_threshold=4,
                           health_check_interval_secs=60, cb_timeout_duration_secs=1.5)
    (one,), (other,) = await on_each(router)
    session = {}
    for number in range(100):
        if len(session) == 3:
            break
        header = f"x-session-id: {number}\r\n"
        await ask(one, "POST", "/generate", {}, header)
        session[next(m for m in (failing, good, dying) if m.posts)] = header
        for mock in (failing, good, dying):
            mock.posts.clear()
        if session.keys() & {failing}:  # CollectCounters its failures from nothing.
            await ask(one, "POST", f"/remove_worker?url={failing.url}")
            await ask(one, "POST", f"/add_worker?url={failing.url}")
            await until_seen(one, lambda seen: seen[failing.url]["healthy"])
    for client in (one, other):
        for _ in range(2):
            assert (await workers_seen(other))[failing.url]["circuit"] == "closed"
            assert (await ask(client, "POST", "/generate", {}, session[failing])).status == 500
    for client in (one, other):
        await until_seen(client, lambda seen: seen[failing.url]["circuit"] == "open")
    text = (await ask(one, "GET", "/metrics")).body.decode()
    assert re.search(rf'circuits_opened_total{{worker="{failing.url}"}} [1-9]', text)
    failing.behaviour = script.answer
    await until_seen(other, lambda seen: seen[failing.url]["circuit"] != "open")
    for client in (one, other, one, other):
        assert (await ask(client, "POST", "/generate", {}, session[failing])).status == 200
        await asyncio.sleep(0.05)
    assert (await workers_seen(one))[failing.url]["circuit"] == "closed"

    await dying.stop()
    assert (await ask(one, "POST", "/generate", {}, session[dying])).status == 503
    await until_seen(other, lambda seen: not seen[dying.url]["healthy"])
    assert (await ask(other, "POST", "/generate", {}, session[dying])).status == 200


async def test_a_killed_process_takes_its_load_along_and_comes_back(several, worker, on_each, script):
    behave, gate = gated()
    mock = await worker(behave)
    router = await several(mock, max_concurrent_requests=2, queue_size=1)
    (one, running), (other, waiting) = await on_each(router, 2)
    killed, survivor = router.owner(one), router.children
    for client in (one, running):
        client.send("POST", CHAT, json.dumps(chat("x", stream=True)).encode())
    await script.until(lambda: len(mock.posts) == 2)
    waiting.send("POST", CHAT, json.dumps(chat("x", stream=True)).encode())
    await until_queued(other, 1)
    assert (await workers_seen(other))[mock.url]["load"] == 2
    os.kill(killed, signal.SIGKILL)
    await script.until(lambda: len(mock.posts) == 3)  # The requests of the dead process count no more.
    await until_seen(other, lambda seen: seen[mock.url]["load"] == 1)
    gate.set()
    assert (await waiting.reply()).complete
    await script.until(lambda: len(router.children) == 2 and killed not in router.children, 15)
    assert set(survivor) & set(router.children)
    await script.until(lambda: router.log.read_text().count("another one starts") == 1)
    for (client,) in await on_each(router):
        assert (await ask(client, "POST", CHAT, chat("x"))).status == 200
        assert (await workers_seen(client))[mock.url]["load"] == 0


async def test_limits_are_exact_over_all_processes(several, worker, on_each, script):
    running, most = 0, 0

    async def slow(served):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        served.answer()

    mock = await worker(slow)
    router = await several(mock, max_concurrent_requests=4, queue_size=40)
    clients = [client for pair in zip(*await on_each(router, 12)) for client in pair]
    for _ in range(3):
        assert {reply.status for reply in await asyncio.gather(
            *(ask(client, "POST", CHAT, chat("x")) for client in clients))} == {200}
    assert most == 4
    text = (await ask(clients[0], "GET", "/metrics")).body.decode()
    assert "running_requests 0.0" in text and "queued_requests 0.0" in text


async def test_the_queue_and_the_shares_of_keys_are_common(several, worker, on_each, script):
    behave, gate = gated()
    mock = await worker(behave)
    router = await several(mock, max_concurrent_requests=3, queue_size=2, max_concurrent_requests_per_key=2)
    ones, others = await on_each(router, 5)

    def begin(client, key: str) -> None:
        client.send("POST", CHAT, json.dumps(chat("x", stream=True)).encode(), f"authorization: Bearer {key}\r\n")

    begin(ones[0], "a")
    begin(others[0], "a")
    await script.until(lambda: len(mock.posts) == 2)
    begin(ones[1], "a")
    assert (await ones[1].reply()).status == 429
    begin(others[1], "b")
    await script.until(lambda: len(mock.posts) == 3)
    begin(ones[2], "c")  # These two wait, one in each process.
    begin(others[2], "d")
    await until_queued(ones[4], 2)
    begin(others[3], "e")
    refused = await others[3].reply()
    assert (refused.status, "queue is full" in refused.error["message"]) == (429, True)
    assert len(mock.posts) == 3
    gate.set()
    for client in (ones[0], others[0], others[1], ones[2], others[2]):
        assert (await client.reply()).body.endswith(b"data: two\n\n")
    text = (await ask(others[4], "GET", "/metrics")).body.decode()
    for line in ('refused_requests_total{reason="key"} 1.0', 'refused_requests_total{reason="queue_full"} 1.0'):
        assert line in text
    assert (await ask(ones[1], "POST", CHAT, chat("x"), "authorization: Bearer a\r\n")).status == 200


async def test_a_rate_is_one_for_all_processes(several, worker, on_each):
    router = await several(await worker(), rate_limit_tokens_per_second=0.05)
    (one,), (other,) = await on_each(router)
    assert [(await ask(client, "POST", CHAT, chat("x"))).status for client in (one, other, one)] == [200, 429, 429]


async def test_pairs(several, worker, on_each, script):
    p, d = await worker(), await worker(script.stream("one", "two"))
    router = await several(wait=False, pd_disaggregation=True, prefill=[p.url], decode=[d.url])
    for (client,) in await on_each(router):
        await until_seen(client, lambda seen: all(shown["healthy"] for shown in seen.values()))
        reply = await ask(client, "POST", CHAT, chat("x", stream=True))
        assert reply.body == b"data: one\n\ndata: two\n\n"
    rooms = [[served.json["bootstrap_room"] for served in mock.posts] for mock in (p, d)]
    assert rooms[0] == rooms[1]
    assert len(set(rooms[0])) == 2


async def test_all_processes_know_what_does_not_fit(several, worker, on_each, script):
    async def tried(served):
        if served.target == b"/connect_prefill":
            fits = served.worker.info["pair_key"] == p.info["pair_key"]
            served.answer(body=json.dumps({"fits": fits, "message": "page_size differs"}).encode())
        else:
            served.answer()

    p, d, odd = [await worker(tried, pair_key=kind, epoch="1") for kind in ("a", "a", "b")]
    router = await several(wait=False, pd_disaggregation=True, prefill=[p.url], decode=[d.url, odd.url],
                           policy="round_robin")
    for (client,) in await on_each(router):
        await until_seen(client, lambda seen: seen[odd.url]["misfits"])
        await until_answer(lambda client=client: ask(client, "GET", "/readiness"), lambda reply: reply.status == 200)
        for _ in range(3):
            assert (await ask(client, "POST", CHAT, chat("x"))).status == 200
    assert len(p.posts) == 6
    assert {served.target for served in odd.posts} == {b"/connect_prefill"}
    odd.info |= {"pair_key": "a", "epoch": "2"}
    for (client,) in await on_each(router):
        await until_seen(client, lambda seen: not seen[odd.url]["misfits"])
        for _ in range(2):
            assert (await ask(client, "POST", CHAT, chat("x"))).status == 200
    assert len([served for served in odd.posts if served.target != b"/connect_prefill"]) == 2


async def test_a_stream_of_either_process_goes_on_elsewhere(several, worker, on_each):
    def telling(*, until: int):
        async def behave(served):
            served.head()
            begun = len(served.json.get("continuation", {}).get("token_ids", []))
            for token in range(begun, 4):
                if token == until:
                    await asyncio.sleep(0.02)
                    served.die()
                    return
                served.event(json.dumps({"id": "c", "created": 5, "choices": [
                    {"delta": {"content": f" {token}"}, "finish_reason": None, "token_ids": [token]}]},
                    separators=(",", ":")))
            served.event("[DONE]")
            served.end()
        return behave

    mocks = [await worker(telling(until=until), stream_continuation=True) for until in (2, 9)]
    router = await several(*mocks, policy="round_robin")
    for (client,) in await on_each(router):
        for _ in range(2):
            body = (await ask(client, "POST", CHAT, chat("x", stream=True, temperature=0))).body
            assert [json.loads(line[6:])["choices"][0]["token_ids"] for line in body.splitlines()
                    if line.startswith(b"data: {")] == [[0], [1], [2], [3]]
    assert re.search(r"continued_streams_total [1-4]\.0", (await ask(client, "GET", "/metrics")).body.decode())


async def test_running_requests_end_before_the_processes_do(several, worker, on_each, script):
    behave, gate = gated()
    mock = await worker(behave)
    router = await several(mock)
    (one,), (other,) = await on_each(router)
    for client in (one, other):
        client.send("POST", CHAT, json.dumps(chat("x", stream=True)).encode())
    await script.until(lambda: len(mock.posts) == 2)
    router.process.send_signal(signal.SIGINT)
    await script.until(lambda: _refuses(router.port), 5)
    assert len(router.children) == 2
    gate.set()
    for client in (one, other):
        assert (await client.reply()).body.endswith(b"data: two\n\n")
    assert await asyncio.wait_for(router.process.wait(), 10) == 0


def _refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def test_the_parent_s_death_is_the_children_s(several, script):
    router = await several()
    children = router.children
    router.process.kill()
    await router.process.wait()
    await script.until(lambda: not any(map(runs, children)), 5)


async def test_an_occupied_port_and_a_broken_setting_end_with_a_sentence(worker):
    mock = await worker()
    broken = ["--ssl-certfile", "/none", "--ssl-keyfile", "/none"]
    for port, flags, sentence in ((mock.port, [], "Cannot listen on"), (free_port(), broken, "/none")):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.router.launch", "--router-workers", "2", "--port", str(port), *flags,
            stderr=asyncio.subprocess.PIPE)
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 2
        lines = stderr.decode().splitlines()
        assert lines[-1].startswith("launch_router: error:") and sentence in lines[-1], lines


async def test_processes_know_which_models_workers_serve(several, worker, on_each):
    a, b = await worker(models=["a"]), await worker(models=["b"])
    router = await several(a, b, model_alias="gpt-4=b", policy="round_robin")
    for (client,) in await on_each(router):
        shown = await ask(client, "GET", "/v1/models")
        assert [card["id"] for card in shown.json["data"]] == ["a", "b", "gpt-4"]
        assert (await ask(client, "POST", "/generate", {"model": "gpt-4", "text": "x"})).status == 200
        assert (await ask(client, "POST", "/generate", {"model": "c", "text": "x"})).status == 404
    assert not a.posts
    assert [served.json["model"] for served in b.posts] == ["b", "b"]


async def test_a_hung_worker_is_left_by_the_requests_of_all_processes(several, worker, on_each):
    bad, good = await worker(hang), await worker()
    router = await several(bad, good, policy="round_robin", health_check_timeout_secs=0.2)
    clients = [client for each in await on_each(router, 3) for client in each]
    replies = await asyncio.gather(*(ask(client, "POST", CHAT, chat("x")) for client in clients))
    assert [reply.status for reply in replies] == [200] * 6
    assert bad.posts


async def test_poison_of_one_process_is_refused_by_all_and_requests_next_to_it_are_answered_in_each(
        several, worker, on_each, script):
    workers = [await worker(mortal()) for _ in range(4)]
    for mock in workers:
        mock.dead, mock.dying, mock.answered = False, asyncio.Event(), set()
    router = await several(*workers, policy="round_robin")
    (first, *some), (second, *others) = await on_each(router, 7)
    innocents = [asyncio.ensure_future(ask(client, "POST", CHAT, chat(f"hello {number}")))
                 for number, client in enumerate((*some, *others))]
    reply = await ask(first, "POST", CHAT, chat("poison"))
    assert (reply.status, reply.error["code"]) == (400, "poison_request")
    assert {(await innocent).status for innocent in innocents} == {200}
    await asyncio.sleep(1.0)  # until then the other process may not have heard of it
    again = await ask(second, "POST", CHAT, {**chat("poison"), "user": "again"})
    assert (again.status, again.error["code"]) == (400, "poison_request")
    victim = router.owner(second)
    os.kill(victim, signal.SIGKILL)  # the process that replaces it knows it too
    await script.until(lambda: len(router.children) == 2 and victim not in router.children, 10)
    for each in await on_each(router):
        reply = await ask(each[0], "POST", CHAT, chat("poison"))
        assert (reply.status, reply.error["code"]) == (400, "poison_request")
    assert sum(mock.dead for mock in workers) == 2
    assert "baton_router_poison_requests_total" in (await ask(first, "GET", "/metrics")).body.decode()
