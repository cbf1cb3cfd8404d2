"""Prefill and decode servers of other weights, layouts or secrets never serve together, and weights are replaced one
server after the other while requests go on: each answer is of the old weights or of the new ones, and right."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Cluster, Server, get_json, post_json
from baton.tests.helpers.ports import free_port
from baton.tests.kvtransfer.conftest import wait_until

PROMPTS = [f"Please spell the word number {i} for me, and then count from {i} to {i + 9}." for i in range(8)]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A checkpoint of the same form, whose weights are others."""
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("other") / "checkpoint"))
    tensors = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("o_proj.weight"):
            tensor += 3.0 * tensor.std() * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two prefill and two decode servers; they may have any weights, all the same, before and after a test."""
    flags = ["--policy", "round_robin", "--health-check-interval-secs", "30"]
    with Cluster(tmp_path_factory.mktemp("pairs"), prefill=2, decode=2, router_flags=flags) as cluster:
        yield cluster


def body(prompt):
    return {"text": prompt, "sampling_params": {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}}


def tokens(url):
    """What one server says to all prompts, alone."""
    return [post_json(url + "/generate", body(prompt))[1]["output_ids"] for prompt in PROMPTS]


def load_weights(server, path, **fields):
    status, told = post_json(server.url + "/update_weights_from_disk", {"model_path": path, **fields})
    while status == 409:  # requests run
        time.sleep(0.02)
        status, told = post_json(server.url + "/update_weights_from_disk", {"model_path": path, **fields})
    assert status == 200, told


def fingerprint(server):
    return get_json(server.url + "/get_server_info")["model_fingerprint"]


def pair(prefill, decode, room, prompt=PROMPTS[0]):
    """Status and answer of the decode half of a request to both, without a router."""
    port = int(prefill.argv[prefill.argv.index("--disaggregation-bootstrap-port") + 1])
    sent = body(prompt) | {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}

    async def both():
        async with aiohttp.ClientSession() as session:
            half = asyncio.create_task(session.post(prefill.url + "/generate", json=sent))
            async with session.post(decode.url + "/generate", json=sent) as answer:
                half.cancel()
                return answer.status, await answer.json()

    return asyncio.run(both())


def test_all_pairs_are_connected_before_the_first_request(cluster):
    """The router has asked for it: a request's first transfer is as quick as any."""
    wait_until(lambda: "baton_router_pairs 4.0" in metrics(cluster), 10.0)
    for p in cluster.prefill:
        port = int(p.argv[p.argv.index("--disaggregation-bootstrap-port") + 1])
        for d in cluster.decode:
            told = post_json(d.url + "/connect_prefill", {"bootstrap_host": "127.0.0.1", "bootstrap_port": port})
            assert told[0] == 200 and told[1]["fits"] is True


def metrics(cluster):
    with urllib.request.urlopen(cluster.url + "/metrics") as page:
        return page.read().decode()


def test_servers_of_other_weights_refuse_each_other_and_say_why_once(cluster, other):
    p, d = cluster.prefill[0], cluster.decode[0]
    right = tokens(d.url)[0]
    assert pair(p, d, 1)[1]["output_ids"] == right
    before = fingerprint(p)
    load_weights(p, other)
    assert fingerprint(p) != before == fingerprint(d)
    for room in (2, 3, 4):
        status, told = pair(p, d, room)
        assert status == 502 and told["error"]["code"] == "pair_mismatch"
        assert before in told["error"]["message"] and fingerprint(p) in told["error"]["message"]
        assert other in told["error"]["message"]
    for server in (p, d):
        wait_until(lambda server=server: "do not fit together" in server.log.read_text(), 3.0)
        told = [line for line in server.log.read_text().splitlines() if "do not fit together" in line and
                fingerprint(p) in line]
        assert len([line for line in told if d.url in line or "Prefill server" in line]) == 1, told
    load_weights(p, "tinychat")
    assert fingerprint(p) == before
    assert pair(p, d, 5)[1]["output_ids"] == right
    p.assert_clean()
    d.assert_clean()


def test_a_rolling_update_mixes_nothing(cluster, other):
    for server in cluster.workers:
        load_weights(server, "tinychat")
    old = tokens(cluster.decode[0].url)
    answers: list[tuple[int, int, list[int]]] = []
    going = True

    async def client(session, first):
        turn = first
        while going:
            number = turn % len(PROMPTS)
            async with session.post(cluster.url + "/generate", json=body(PROMPTS[number])) as answer:
                found = await answer.json()
                answers.append((answer.status, number, found.get("output_ids", found)))
            turn += 1

    async def update():
        async with aiohttp.ClientSession() as session:
            clients = [asyncio.create_task(client(session, first)) for first in range(4)]
            try:
                for server in (*cluster.prefill, *cluster.decode):
                    await asyncio.to_thread(load_weights, server, other)
                    seen = len(answers)
                    await asyncio.to_thread(wait_until, lambda seen=seen: len(answers) > seen + 8, 20.0)
            finally:
                nonlocal going
                going = False
                await asyncio.gather(*clients)

    asyncio.run(update())
    new = tokens(cluster.decode[0].url)
    assert all(a != b for a, b in zip(old, new)), "the test needs weights that answer otherwise"
    wrong = [answer for answer in answers if answer[0] != 200 or answer[2] not in (old[answer[1]], new[answer[1]])]
    assert not wrong
    assert any(ids in old for _, _, ids in answers) and any(ids in new for _, _, ids in answers)
    wait_until(lambda: "baton_router_pairs 4.0" in metrics(cluster), 10.0)
    served = {server.url: server.state()["counters"]["finished_requests"] for server in cluster.workers}
    for _ in range(4):
        assert post_json(cluster.url + "/generate", body(PROMPTS[0]))[1]["output_ids"] == new[0]
    after = {server.url: server.state()["counters"]["finished_requests"] for server in cluster.workers}
    assert all(after[url] == count + 2 for url, count in served.items()), "all pairs serve again"
    for server in cluster.workers:
        server.assert_clean()


@pytest.mark.parametrize("mode", ["wait", "retract", "in_place", "abort"])
def test_an_update_through_the_router_mixes_nothing(cluster, other, mode):
    """Each answer that began before or ended after is of one of the weights, whatever ran in between."""
    answers: list[tuple[float, float, int, int, list[int], str]] = []
    new = None

    async def client(session, first):
        turn = first
        while new is None or turn < first + 4:
            number, began = turn % len(PROMPTS), time.monotonic()
            async with session.post(cluster.url + "/generate", json=body(PROMPTS[number])) as answer:
                found = await answer.json()
                answers.append((began, time.monotonic(), answer.status, number, found["output_ids"],
                                found["meta_info"]["weight_version"]))
            turn = turn + 1 if new is None else max(turn, first) + 1

    async def update():
        nonlocal new
        async with aiohttp.ClientSession() as session:
            clients = [asyncio.create_task(client(session, first)) for first in range(6)]
            await asyncio.to_thread(wait_until, lambda: len(answers) > 8, 20.0)
            began = time.monotonic()
            async with session.post(cluster.url + "/update_weights_from_disk", json={
                    "model_path": other, "weight_version": mode, "pause_mode": mode}) as answer:
                told = await answer.json()
            ended = time.monotonic()
            assert answer.status == 200 and told["weight_version"] == mode, told
            count = len(answers)
            await asyncio.to_thread(wait_until, lambda: len(answers) > count + 12, 20.0)
            new = True
            await asyncio.gather(*clients)
            return began, ended

    for server in cluster.workers:
        load_weights(server, "tinychat")
    wait_until(lambda: "baton_router_pairs 4.0" in metrics(cluster), 10.0)
    old = tokens(cluster.decode[0].url)
    began, ended = asyncio.run(update())
    fresh = tokens(cluster.decode[0].url)
    assert [answer for answer in answers if answer[2] != 200] == []
    before = [answer for answer in answers if answer[1] < began]
    after = [answer for answer in answers if answer[0] > ended]
    assert before and after
    assert all(ids == old[number] for _, _, _, number, ids, _ in before)
    assert all(ids == fresh[number] and version == mode for _, _, _, number, ids, version in after)
    if mode == "wait":
        assert all(ids in (old[number], fresh[number]) for _, _, _, number, ids, _ in answers)
    assert len({fingerprint(server) for server in cluster.workers}) == 1
    for server in cluster.workers:  # With none of the weights that the router has settled, it lets all serve again.
        load_weights(server, other, weight_version="default")
        server.assert_clean()
    wait_until(lambda: "baton_router_pairs 4.0" in metrics(cluster), 10.0)


def test_readiness_says_when_no_pair_fits(cluster, other):
    """Decode goes on alone, with the weights that it has."""
    for server in cluster.decode:
        load_weights(server, "tinychat")
    right = tokens(cluster.decode[0].url)[0]
    assert post_json(cluster.url + "/generate", body(PROMPTS[0]))[1]["output_ids"] == right
    wait_until(lambda: status_of(cluster.url + "/readiness")[0] == 503, 10.0)
    wait_until(lambda: len(status_of(cluster.url + "/readiness")[1]["misfits"]) == 2, 10.0)
    told = status_of(cluster.url + "/readiness")[1]["misfits"]
    assert {misfit["prefill"] for misfit in told} == {server.url for server in cluster.prefill}
    assert all("fingerprint" in misfit["why"] for misfit in told)
    assert post_json(cluster.url + "/generate", body(PROMPTS[0]))[1]["output_ids"] == right
    for server in cluster.prefill:
        load_weights(server, "tinychat")
    wait_until(lambda: status_of(cluster.url + "/readiness")[0] == 200, 10.0)


def test_a_server_that_does_not_fit_is_told_on_all_sides_and_used_once_it_does(cluster, tmp_path):
    """Another type of KV cache; then it is restarted with the right flags, behind the same address."""
    argv = ["--model-path", "tinychat", "--device", "cpu", "--log-level", "warning"]
    odd = Server("baton.decode.launch", [*argv, "--dtype", "bfloat16"], free_port(), tmp_path / "odd.log").start()
    try:
        odd.wait_ready()
        assert post_json(f"{cluster.url}/add_worker?url={odd.url}&role=decode")[0] == 200
        wait_until(lambda: misfits(cluster, odd), 10.0)
        assert "dtype of the KV layout is 'bfloat16' here and 'float32' there" in misfits(cluster, odd)[0]["why"]
        for _ in range(6):
            assert post_json(cluster.url + "/generate", body(PROMPTS[0]))[0] == 200
        assert odd.state()["counters"].get("finished_requests", 0) == 0
        for server in (*cluster.prefill, odd, cluster.router):
            wait_until(lambda server=server: len(told_of(server, "bfloat16")) > 0, 5.0)
        assert [len(told_of(server, odd.url)) for server in cluster.prefill] == [1, 1]
        assert len(told_of(odd, "bfloat16")) == 2 and len(told_of(cluster.router, "bfloat16")) <= 2
        odd.stop()
        odd.argv.remove("--dtype")
        odd.argv.remove("bfloat16")
        odd.start().wait_ready()
        wait_until(lambda: "baton_router_pairs 6.0" in metrics(cluster), 10.0)
        assert not misfits(cluster, odd)
        for _ in range(6):
            assert post_json(cluster.url + "/generate", body(PROMPTS[0]))[0] == 200
        assert odd.state()["counters"]["finished_requests"] == 2
        post_json(f"{cluster.url}/remove_worker?url={odd.url}")
    finally:
        odd.kill()


def misfits(cluster, server):
    """Of a worker, as the router lists them."""
    listed = get_json(cluster.url + "/list_workers")["workers"]
    return next(worker["misfits"] for worker in listed if worker["url"] == server.url)


def told_of(server, words):
    """The warnings of a server's log that hold these words."""
    return [line for line in server.log.read_text().splitlines() if "WARNING" in line and words in line]


def status_of(url):
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
