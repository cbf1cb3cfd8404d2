"""A file storage behind the host tier of whole engines: another engine finds what one has computed."""

from __future__ import annotations

import json
import threading
import time

import pytest

from baton.tests.common.scheduler.test_tier_loads import checkpoint, expected, some_prompts  # noqa: F401 (fixtures)
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.tiers import in_host


def storing(folder, path, policy="wait_complete", **options):
    extra = {"storage_dir": str(path), "min_free_space": 0, "use_direct_io": False, "prefetch_threshold": 4,
             "stall_seconds": 30}  # cores are shared: a thread may wait for one
    return Engine(folder, **{"max_total_tokens": 1024, "page_size": 4} | options, tiers=in_host(
        0.02, hicache_load_policy="always", hicache_storage_backend="file", hicache_storage_prefetch_policy=policy,
        hicache_storage_backend_extra_config=json.dumps(extra)))


def ask(engine):
    for i, prompt in enumerate(some_prompts()):
        engine.start(str(i), prompt)
    while not engine.scheduler.idle:
        engine.scheduler.step(time.monotonic())
        engine.tracker.flush()
    outputs = engine.run()
    engine.scheduler.batcher.loads.flush()
    engine.cache.poll_tier()
    engine.scheduler.batcher.loads.check_integrity()
    return outputs


def test_another_engine_finds_the_pages(checkpoint, expected, tmp_path):  # noqa: F811
    writer = storing(checkpoint, tmp_path)
    assert tokens_of(ask(writer)) == expected
    writer.scheduler.batcher.loads.close()
    reader = storing(checkpoint, tmp_path)
    outputs = ask(reader)
    assert tokens_of(outputs) == expected
    assert {item.rid: item.num_cached_tokens for item in outputs} == {
        str(i): (len(prompt) - 1) // 4 * 4 for i, prompt in enumerate(some_prompts())}
    loads = reader.scheduler.batcher.loads
    assert loads.num_loaded_stored == loads.num_loaded > 100
    assert loads.counters["prefetched_pages"] >= loads.num_loaded
    loads.close()


def test_other_weights_find_nothing(checkpoint, expected, tmp_path):  # noqa: F811
    writer = storing(checkpoint, tmp_path)
    ask(writer)
    writer.scheduler.batcher.loads.close()
    other = storing(checkpoint, tmp_path, kv_cache_dtype="fp8_e4m3")
    ask(other)
    assert other.scheduler.batcher.loads.num_loaded_stored == 0
    other.scheduler.batcher.loads.close()


def test_damaged_objects_are_not_used(checkpoint, expected, tmp_path):  # noqa: F811
    writer = storing(checkpoint, tmp_path)
    ask(writer)
    writer.scheduler.batcher.loads.close()
    paths = sorted(tmp_path.glob("??/*.bin"))
    objects = [path.read_bytes() for path in paths]
    for i, path in enumerate(paths):
        damaged = bytearray(objects[i])
        damaged[600] ^= 1
        path.write_bytes([objects[i], bytes(damaged), objects[i][:-4096], objects[i - 1]][i % 4])
    reader = storing(checkpoint, tmp_path)
    assert tokens_of(ask(reader)) == expected
    loads = reader.scheduler.batcher.loads
    errors = loads.prefetches.storage.counters.errors
    assert errors["corrupt"] + errors["foreign"] > 0 and loads.num_loaded_stored < len(paths)
    loads.close()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_storage_that_stops_is_not_waited_for(checkpoint, expected, tmp_path, monkeypatch, how):  # noqa: F811
    writer = storing(checkpoint, tmp_path)
    ask(writer)
    writer.scheduler.batcher.loads.close()
    reader = storing(checkpoint, tmp_path)
    storage = reader.scheduler.batcher.loads.prefetches.storage
    stopped = threading.Event()
    get, calls = storage._backend.get, []

    def stops(names, into):
        calls.append(time.monotonic())
        if len(calls) < 3:
            return get(names, into)
        if how == "fails":
            raise OSError("it was killed")
        stopped.wait(30)
        return [False] * len(names)

    monkeypatch.setattr(storage._backend, "get", stops)
    if how == "hangs":
        monkeypatch.setattr(storage._reads, "_stall_seconds", 0.05)
    assert tokens_of(ask(reader)) == expected
    assert len(calls) >= 3 and storage.counters.times_aside >= 1
    stopped.set()
    reader.scheduler.batcher.loads.close()
