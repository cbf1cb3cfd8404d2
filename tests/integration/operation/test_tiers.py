"""KV tiers of real servers: a prefill server of two ranks and two decode servers. At first they read each other's host
memory; then a storage of files is attached, which they have in common, and each write policy writes to it."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.common.kvcache.storage.base import STALL_SECONDS
from baton.tests.helpers.harness import Cluster, Server, get_json, post_json

PAGE, TURNS, ANSWER = 16, 4, 40
POOL = ("--max-total-tokens", "1024")  # two prompts: everything is evicted soon


HOST = ["--enable-hierarchical-cache", "--hicache-size", "0.1", "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-load-policy", "always",  # so small a model computes about as fast as a busy disk reads
        "--cluster-secret", "secret"]
PEERS = [*HOST, "--hicache-storage-backend", "peers", "--hicache-storage-backend-extra-config",
         json.dumps({"stall_seconds": 10})]  # a busy machine, no dead peer
STORAGE = "/hicache/storage-backend"


def file_options(folder: Path, **options: object) -> str:
    return json.dumps({"storage_dir": str(folder), "min_free_space": 0, "use_direct_io": False,
                       "prefetch_threshold": PAGE, "stall_seconds": 10} | options)


def in_files(folder: Path, policy: str, **options: object) -> list[str]:
    return [*HOST, "--hicache-write-policy", policy, "--hicache-storage-backend", "file",
            "--hicache-storage-backend-extra-config", file_options(folder, **options)]


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 4000) for _ in range(count)]


def ask(url: str, prompt: list[int]) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were found in a cache."""
    status, body = post_json(url + "/generate", {"input_ids": prompt, "sampling_params": {
        "temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}})
    assert status == 200, body
    return body["output_ids"], body["meta_info"]["cached_tokens"]


def conversation(url: str, seed: int, after_turn=lambda: None) -> tuple[list[list[int]], list[float]]:
    """The answers of all turns, and of each turn but the first the share of earlier pages that it found."""
    prompt, answers, shares, known = ids(seed, 330), [], [], 0
    for turn in range(TURNS):
        answer, cached = ask(url, prompt)
        if turn:
            shares.append(cached / (known // PAGE * PAGE))
        known = len(prompt) + len(answer) - 1  # the last token is not computed
        prompt = prompt + answer + ids(1000 * seed + turn, 37)
        answers.append(answer)
        after_turn()
    return answers, shares


def storage_of(server: Server) -> dict:
    return get_json(server.url + STORAGE)


def command(cluster: Cluster, method: str, path: str, body: dict | None = None) -> dict:
    """Sends a command to all workers by the router."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(cluster.url + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def backends(cluster: Cluster) -> set[str | None]:
    return {each["hicache_storage_backend"] for each in command(cluster, "GET", STORAGE)["workers"].values()}


def attach_files(cluster: Cluster, folder: Path, **options: object) -> None:
    command(cluster, "PUT", STORAGE, {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy":
                                      "wait_complete", "hicache_storage_backend_extra_config_json":
                                      file_options(folder, **options)})


def stored(cluster: Cluster) -> None:
    """Wait until host memory has what was computed, and the storage what waits to be written."""
    deadline, last, quiet = time.monotonic() + 20, None, 0
    while quiet < 3:  # each question is a step of every rank: pages may still be on their way to host memory
        states = [server.state() for server in cluster.workers]
        now = [state["counters"]["tier_pages_stored"] for state in states]
        queued = any(state["gauges"].get("storage_pages_queued") for state in states)
        quiet = quiet + 1 if now == last and not queued else 0
        last = now
        assert time.monotonic() < deadline, states
        time.sleep(0.02)


def flush(servers: list[Server]) -> None:
    for server in servers:
        status, body = post_json(server.url + "/flush_cache")
        assert status == 200, body


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiers")
    with Cluster(folder, decode=2, flags=[*POOL, *PEERS], prefill_flags=["--tp-size", "2"]) as cluster:
        cluster.storage = folder / "kv"
        for seed in (91, 92):  # both decode servers have met prefill
            ask(cluster.url, ids(seed, 40))
        yield cluster


@pytest.fixture(scope="module")
def answers(unified):
    """Those of a server without tiers, by seed."""
    return {seed: conversation(unified.url, seed)[0] for seed in range(1, 11)}


# ----------------------------------------------------------------------------------- host memory of other servers


def test_a_turn_finds_the_pages_of_prompts_and_answers_in_decode_servers(cluster, answers):
    """Prefill forgets everything after each turn."""
    def forget() -> None:
        stored(cluster)
        flush(cluster.prefill)

    before = storage_of(cluster.prefill[0])["pages_read"]
    given, shares = conversation(cluster.url, 8, forget)
    assert given == answers[8] and min(shares) >= 0.99, shares
    assert storage_of(cluster.prefill[0])["pages_read"] - before > 60
    assert not any(storage_of(server)["pages_written"] for server in cluster.workers)


def test_answers_are_found_whichever_decode_server_wrote_them(cluster, answers):
    given, shares = conversation(cluster.url, 9, lambda: stored(cluster))
    assert given == answers[9] and min(shares) >= 0.99, shares


def test_a_decode_server_that_dies_costs_no_token(cluster, answers):
    """It is killed while prefill reads from it; what it had is computed."""
    victim = cluster.decode[1]
    found, _ = conversation(cluster.url, 10, lambda: stored(cluster))
    assert found == answers[10]
    flush(cluster.prefill)
    prompts = [ids(seed, 330) + answers[seed][0] + ids(1000 * seed, 37) for seed in (8, 9)]
    threading.Timer(0.02, victim.kill).start()
    for prompt, seed in zip(prompts, (8, 9)):
        deadline = time.monotonic() + 30
        while True:
            status, body = post_json(cluster.url + "/generate", {"input_ids": prompt, "sampling_params": {
                "temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}})
            if status == 200:
                assert body["output_ids"] == answers[seed][1]
                break
            assert time.monotonic() < deadline, body  # the router still sends requests to the dead server
            time.sleep(0.1)
    victim.start().wait_ready()
    cluster._wait_routed()
    given, _ = conversation(cluster.url, 10, lambda: stored(cluster))
    assert given == answers[10]
    for server in cluster.workers:
        server.assert_clean()


# ---------------------------------------------------------------------------------------------- a storage of files


def test_a_storage_is_attached_in_place_of_another(cluster):
    assert backends(cluster) == {"peers"}
    command(cluster, "DELETE", STORAGE)
    assert backends(cluster) == {None}
    attach_files(cluster, cluster.storage)
    assert backends(cluster) == {"file"}


def test_a_turn_finds_all_pages_of_the_turns_before(cluster, answers):
    """Prompts and answers, whichever decode server wrote them; the GPUs forget them between the turns."""
    def forget() -> None:
        stored(cluster)
        ask(cluster.url, ids(77, 900))
        ask(cluster.url, ids(78, 900))
        stored(cluster)

    given, shares = conversation(cluster.url, 1, forget)
    assert given == answers[1] and min(shares) >= 0.99, shares
    assert all(storage_of(server)["pages_written"] for server in cluster.workers)


def test_storage_alone_keeps_a_conversation(cluster, answers):
    """All servers lose their host memory after each turn."""
    def forget() -> None:
        stored(cluster)
        flush(cluster.workers)

    before = cluster.prefill[0].state()["counters"]["cached_tokens"]
    given, shares = conversation(cluster.url, 2, forget)
    assert given == answers[2] and min(shares) >= 0.99, shares
    assert cluster.prefill[0].state()["counters"]["cached_tokens"] - before > 330 * (TURNS - 1)
    assert sum(storage_of(server)["pages_read"] for server in cluster.workers) > 60
    load, = get_json(cluster.prefill[0].url + "/get_load")
    assert load["storage_page_cost"] > load["host_page_cost"] > 0


def test_lost_and_damaged_objects_cost_no_token(cluster, answers):
    """While requests run, files are overwritten, cut off and removed with their folder."""
    stored(cluster)
    files = [path for path in cluster.storage.rglob("*") if path.is_file()]
    assert len(files) > 30
    flush(cluster.workers)
    for path in files:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(size // 2)
            file.write(b"damage")
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(conversation, cluster.url, seed) for seed in (1, 2, 3)]
        time.sleep(0.3)
        for path in cluster.storage.rglob("*"):
            if path.is_file() and path.stat().st_size % 2 == 0:
                path.write_bytes(b"short")
        shutil.rmtree(cluster.storage, ignore_errors=True)
        assert [each.result()[0] for each in running] == [answers[seed] for seed in (1, 2, 3)]
    assert sum(storage_of(server)["errors"]["corrupt"] for server in cluster.workers) > 0
    given, _ = conversation(cluster.url, 4)
    assert given == answers[4]
    for server in cluster.workers:
        server.assert_clean()


def test_restarted_servers_find_their_objects_and_answer_alike_with_every_write_policy(cluster, answers):
    """They come back with other policies, and decode with a limit of the storage that a few answers fill."""
    flush(cluster.workers)  # what was removed while it was written is found absent, and is written again
    given, _ = conversation(cluster.url, 3)
    stored(cluster)
    for server in cluster.workers:
        assert server.stop() == 0, repr(server)
    for server in cluster.workers:
        decodes = server in cluster.decode
        at = server.argv.index(PEERS[0])
        server.argv[at:at + len(PEERS)] = in_files(
            cluster.storage, "write_back" if decodes else "write_through_selective",
            **({"max_size": "8M"} if decodes else {}))
        server.start()
    for server in cluster.workers:
        server.wait_ready()
    cluster._wait_routed()
    assert given == answers[3]
    again, cached = ask(cluster.url, ids(3, 330))
    assert again == answers[3][0] and cached == 320
    assert [conversation(cluster.url, seed)[0] for seed in (6, 7, 6)] == [answers[6], answers[7], answers[6]]
    assert {storage_of(server)["hicache_write_policy"] for server in cluster.workers} == {
        "write_back", "write_through_selective"}


def test_the_storage_is_detached_attached_and_cleared_through_the_router(cluster, answers, tmp_path):
    assert backends(cluster) == {"file"}
    command(cluster, "DELETE", STORAGE)
    assert backends(cluster) == {None}
    given, _ = conversation(cluster.url, 5)
    assert given == answers[5] and not list(tmp_path.rglob("*_H*"))
    attach_files(cluster, tmp_path / "other")
    assert backends(cluster) == {"file"}
    given, _ = conversation(cluster.url, 6)
    stored(cluster)
    objects = [file for file in (tmp_path / "other").rglob("*") if file.is_file() and file.stat().st_size > 4096]
    assert given == answers[6] and len(objects) > 5
    command(cluster, "POST", "/clear_hicache_storage_backend")
    assert not any(file.exists() for file in objects)


def test_nobody_waits_for_a_storage_that_hangs(cluster, answers, tmp_path):
    """With the default limit of 0.1 s; a prefetch that is only slow may take 30 s."""
    command(cluster, "DELETE", STORAGE)
    attach_files(cluster, tmp_path, stall_seconds=STALL_SECONDS)
    flush(cluster.workers)
    for _ in range(2):  # write_through_selective writes what is used again
        ask(cluster.url, ids(4, 330))
    stored(cluster)
    flush(cluster.workers)
    objects = list(tmp_path.glob("??/*.bin"))
    assert len(objects) >= 20
    for path in objects:
        path.unlink()
        os.mkfifo(path)  # to open it waits for somebody who writes
    prefill = cluster.prefill[0]
    before = prefill.state()["counters"]
    assert ask(cluster.url, ids(4, 330))[0] == answers[4][0]
    after = prefill.state()["counters"]
    waited, aside = (after[name] - before[name] for name in ("prefetch_wait_seconds", "storage_times_aside"))
    assert waited < 3 and aside > 0  # this machine's cores are shared
