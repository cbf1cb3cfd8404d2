"""KV tiers of real servers: one prefill and two decode servers with a storage in common, and each policy."""

from __future__ import annotations

import json
import random
import shutil
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.tests.helpers.harness import Cluster, Server, get_json, post_json

PAGE, TURNS, ANSWER = 16, 4, 40
POOL = ("--max-total-tokens", "1024")  # two prompts: everything is evicted soon


def tiers(folder: Path, policy: str = "write_through", **options: object) -> list[str]:
    extra = {"storage_dir": str(folder), "min_free_space": 0, "use_direct_io": False, "prefetch_threshold": PAGE,
             "stall_seconds": 10}  # a busy machine is no broken storage
    return ["--enable-hierarchical-cache", "--hicache-size", "0.1", "--hicache-write-policy", policy,
            "--hicache-load-policy", "always",  # so small a model computes about as fast as a busy disk reads
            "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete",
            "--hicache-storage-backend-extra-config", json.dumps(extra | options)]


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
    return get_json(server.url + "/hicache/storage-backend")


def written(servers: list[Server]) -> None:
    """Wait until all pages that wait are in storage."""
    deadline, last, quiet = time.monotonic() + 20, None, 0
    while quiet < 3:  # pages may still be on their way to host memory
        state = [storage_of(server) for server in servers]
        now = [each["pages_written"] for each in state]
        quiet = quiet + 1 if now == last and not any(each["queued_writes"] for each in state) else 0
        last = now
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiers")
    with Cluster(folder, decode=2, flags=[*POOL, *tiers(folder / "kv")]) as cluster:
        cluster.storage = folder / "kv"
        yield cluster


@pytest.fixture(scope="module")
def answers(unified):
    """Those of a server without tiers, by seed."""
    return {seed: conversation(unified.url, seed)[0] for seed in range(1, 8)}


def test_a_turn_finds_all_pages_of_the_turns_before(cluster, answers):
    """Prompts and answers, whichever decode server wrote them; the GPUs forget them between the turns."""
    def forget() -> None:
        written(cluster.workers)
        ask(cluster.url, ids(77, 900))
        ask(cluster.url, ids(78, 900))
        written(cluster.workers)

    given, shares = conversation(cluster.url, 1, forget)
    assert given == answers[1] and min(shares) >= 0.99, shares
    assert all(storage_of(server)["pages_written"] for server in cluster.workers)


def test_storage_alone_keeps_a_conversation(cluster, answers):
    """All servers lose their host memory after each turn."""
    def flush() -> None:
        written(cluster.workers)
        status, body = post_json(cluster.url + "/flush_cache")
        assert status == 200, body

    before = cluster.prefill[0].state()["counters"]["cached_tokens"]
    given, shares = conversation(cluster.url, 2, flush)
    assert given == answers[2] and min(shares) >= 0.99, shares
    assert cluster.prefill[0].state()["counters"]["cached_tokens"] - before > 330 * (TURNS - 1)
    assert sum(storage_of(server)["pages_read"] for server in cluster.workers) > 60
    load, = get_json(cluster.prefill[0].url + "/get_load")
    assert load["storage_page_cost"] > load["host_page_cost"] > 0


def test_lost_and_damaged_objects_cost_no_token(cluster, answers):
    """While requests run, files are overwritten, cut off and removed with their folder."""
    files = [path for path in cluster.storage.rglob("*") if path.is_file()]
    assert len(files) > 30
    written(cluster.workers)
    post_json(cluster.url + "/flush_cache")
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
    status, body = post_json(cluster.url + "/flush_cache")  # what was removed while it was written is written again
    assert status == 200, body
    given, _ = conversation(cluster.url, 3)
    written(cluster.workers)
    for server in cluster.workers:
        assert server.stop() == 0, repr(server)
    for server in cluster.workers:
        decodes = server in cluster.decode
        flags = tiers(cluster.storage, "write_back" if decodes else "write_through_selective",
                      **({"max_size": "8M"} if decodes else {}))
        at = server.argv.index(flags[0])
        server.argv[at:at + len(flags)] = flags
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
    def call(method: str, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(cluster.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def names() -> set:
        return {each["hicache_storage_backend"] for each in call("GET", "/hicache/storage-backend")["workers"].values()}

    path = "/hicache/storage-backend"
    assert names() == {"file"}
    call("DELETE", path)
    assert names() == {None}
    given, _ = conversation(cluster.url, 5)
    assert given == answers[5] and not list(tmp_path.rglob("*_H*"))
    extra = json.dumps({"storage_dir": str(tmp_path / "other"), "min_free_space": 0, "use_direct_io": False,
                        "prefetch_threshold": PAGE, "stall_seconds": 10})
    call("PUT", path, {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": extra,
                       "hicache_storage_prefetch_policy": "wait_complete"})
    assert names() == {"file"}
    given, _ = conversation(cluster.url, 6)
    written(cluster.workers)
    objects = [file for file in (tmp_path / "other").rglob("*") if file.is_file() and file.stat().st_size > 4096]
    assert given == answers[6] and len(objects) > 5
    call("POST", "/clear_hicache_storage_backend")
    assert not any(file.exists() for file in objects)
