"""Every backend through the same cases, with what it stores in really, and what is its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server.tiers import KV_STORAGES
from baton.common.kvcache.storage import base
from baton.common.kvcache.storage.base import RetiredBuffers, StorageContext, StorageError
from baton.common.kvcache.storage.open import open_storage
from baton.tests.helpers.ports import free_port
from baton.tests.helpers.stored_pages import DIGEST, FakeHost, key_of, query, rank_shape, read_back, wait_until, write

KIB = 1024
KEYS = [key_of(i) for i in range(12)]
NAMES = [f"{key.hex()}_{DIGEST}_L0-3_H0-8" for key in KEYS]


def mooncake_master() -> Path | None:
    """The program of the wheel, where it and the libraries that it is linked with are there."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        import mooncake.store
    except ImportError:
        return None
    return Path(mooncake.store.__file__).parent / "mooncake_master"


needs_mooncake = pytest.mark.skipif(mooncake_master() is None, reason="needs Mooncake")


class Master:
    """mooncake_master, until it is stopped."""

    def __init__(self) -> None:
        port, metrics = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [str(mooncake_master()), f"-rpc_port={port}", "-rpc_address=127.0.0.1", f"-metrics_port={metrics}",
             "-metrics_host=127.0.0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def options(self) -> dict[str, object]:
        return {"master_server_address": self.address, "global_segment_size": "64Mi", "local_hostname": "127.0.0.1"}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["file", "nixl", pytest.param("mooncake", marks=needs_mooncake)])
def kind(request) -> str:
    return request.param


@pytest.fixture
def options(kind, tmp_path) -> Iterator[dict[str, object]]:
    if kind != "mooncake":
        yield {"storage_dir": str(tmp_path), "min_free_space": 0}
        return
    master = Master()
    yield master.options()
    master.stop()


@pytest.fixture
def backend(kind, options):
    backend = opened(kind, options)
    yield backend
    backend.close()


def opened(kind, options):
    """Opens a backend; a master may still be starting."""
    end = time.monotonic() + 10
    while True:
        try:
            return KV_STORAGES.get(kind)(StorageContext(options))
        except ConfigError:
            if kind != "mooncake" or time.monotonic() > end:
                raise
            time.sleep(0.05)


def parts(backend, count, size=16 * KIB, fill=0):
    buffer = backend.buffer(count * size)
    buffer[:] = fill
    return [buffer[i * size:(i + 1) * size] for i in range(count)]


def test_objects_come_back_as_they_were(backend):
    data = parts(backend, 4)
    for i, each in enumerate(data):
        each[:] = np.arange(i, i + each.nbytes) % 251
    expected = [each.copy() for each in data]
    assert backend.put(NAMES[:4], data) == [True] * 4
    assert backend.put(NAMES[1:3], data[1:3]) == [True] * 2  # again
    assert backend.exists(NAMES[:6]) == [True] * 4 + [False] * 2
    into = parts(backend, 6)
    assert backend.get(NAMES[:6], into) == [True] * 4 + [False] * 2
    assert all((each == right).all() for each, right in zip(into, expected))
    assert backend.get(NAMES[4:5], into[:1]) == [False]


def test_an_object_of_another_length_is_not_read(backend):
    assert backend.put(NAMES[:2], parts(backend, 2)) == [True] * 2
    assert backend.get(NAMES[:1], parts(backend, 1, 8 * KIB)) == [False]
    assert backend.get(NAMES[:1], parts(backend, 1, 32 * KIB)) == [False]
    assert backend.get(NAMES[1:2], parts(backend, 1)) == [True]


def test_delete_and_clear(backend):
    assert backend.put(NAMES[:6], parts(backend, 6)) == [True] * 6
    backend.delete([NAMES[0], NAMES[9]])
    assert backend.exists(NAMES[:6]) == [False] + [True] * 5
    backend.clear()
    assert backend.exists(NAMES[:6]) == [False] * 6
    assert backend.put(NAMES[:1], parts(backend, 1)) == [True]
    assert backend.exists(NAMES[:1]) == [True]


def test_threads_read_and_write_at_once(backend):
    def work(number):
        data, into = parts(backend, 4), parts(backend, 4)  # the second takes the first's place
        del data
        for i in range(20):
            names = [f"{key_of(100 * number + 4 * i + j).hex()}_{DIGEST}_L0-1_H0-1" for j in range(4)]
            for each in into:
                each[:] = number + 1
            assert backend.put(names, into) == [True] * 4
            for each in into:
                each[:] = 0
            assert backend.get(names, into) == [True] * 4 and all((each == number + 1).all() for each in into)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, number) for number in range(4)]:
            done.result()


def test_pages_go_through_a_storage_to_a_server_of_another_size(kind, options, backend):
    storages, hosts = [], [FakeHost(rank_shape(rank, 2)) for rank in range(2)]
    for host in hosts:
        storages.append(open_storage(kind, {**options, "stall_seconds": 5}, host, DIGEST, host.shape))
        write(storages[-1], host, KEYS)
    host = FakeHost(rank_shape())
    storage = open_storage(kind, {**options, "stall_seconds": 5}, host, DIGEST, host.shape)
    assert query(storage, [*KEYS, key_of(99)]) == 12 == read_back(storage, host, KEYS)
    assert not any(storage.counters.errors.values()) and storage.counters.read_pages == 12
    storage.clear().result(5)
    assert query(storage, KEYS) == 0
    for each in (storage, *storages):
        each.close()


def test_nixl_reads_what_the_file_storage_wrote(tmp_path):
    options = {"storage_dir": str(tmp_path), "min_free_space": 0}
    files, nixl = opened("file", options), opened("nixl", {**options, "plugin_params": {"use_uring": "false"}})
    assert files.put(NAMES[:2], parts(files, 2, fill=5)) == [True] * 2
    into = parts(nixl, 2)
    assert nixl.get(NAMES[:2], into) == [True] * 2 and (into[1] == 5).all()
    assert nixl.put(NAMES[2:4], into) == [True] * 2 and not list(tmp_path.glob("??/.*.tmp"))
    assert files.get(NAMES[2:4], parts(files, 2)) == [True] * 2
    nixl.close()
    files.close()


def test_nixl_s_failed_transfer_is_an_error_and_leaves_nothing_half(tmp_path, monkeypatch):
    backend = opened("nixl", {"storage_dir": str(tmp_path), "min_free_space": 0})
    data = parts(backend, 1)
    outside = np.zeros(16 * KIB, np.uint8)  # not registered
    with pytest.raises(StorageError, match="cannot write"):
        backend.put(NAMES[:1], [outside])
    assert backend.exists(NAMES[:1]) == [False] and not list(tmp_path.glob("??/.*"))
    assert backend.put(NAMES[:1], data) == [True]
    with pytest.raises(StorageError, match="cannot read"):
        backend.get(NAMES[:1], [outside])
    assert backend.get(NAMES[:1], data) == [True]
    backend.close()


def test_a_nixl_plugin_that_does_not_load_is_refused_in_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="NIXL's plugin GDS does not start .*; set .* plugin to POSIX"):
        opened("nixl", {"storage_dir": str(tmp_path), "plugin": "GDS"})
    with pytest.raises(ConfigError, match="Invalid enum value 'UCX'"):
        opened("nixl", {"storage_dir": str(tmp_path), "plugin": "UCX"})
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match="needs the nixl package"):
        opened("nixl", {"storage_dir": str(tmp_path)})


def test_mooncake_that_is_not_installed_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="needs the mooncake-transfer-engine package"):
        KV_STORAGES.get("mooncake")(StorageContext({"master_server_address": "127.0.0.1:1"}))


@needs_mooncake
def test_mooncake_needs_a_master(monkeypatch):
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(ConfigError, match="needs master_server_address"):
        KV_STORAGES.get("mooncake")(StorageContext({}))
    with pytest.raises(ConfigError, match="needs local_hostname .* 0.0.0.0 is none"):
        KV_STORAGES.get("mooncake")(StorageContext({"master_server_address": "x:1"}, "0.0.0.0"))
    with pytest.raises(ConfigError, match="like 200G, not 'big'"):
        KV_STORAGES.get("mooncake")(StorageContext({"master_server_address": "x:1", "global_segment_size": "big"}))


@needs_mooncake
def test_a_mooncake_master_that_is_killed_is_not_waited_for():
    master = Master()
    opened("mooncake", master.options()).close()
    host = FakeHost(rank_shape())
    storage = open_storage("mooncake", master.options(), host, DIGEST, host.shape)
    write(storage, host, KEYS)
    assert query(storage, KEYS) == 12
    slots = host.reserve(12)
    master.stop()
    began = time.monotonic()
    read = storage.read(KEYS, slots)
    wait_until(lambda: read.done, 1)
    assert time.monotonic() - began < 0.5  # 0.1 s on a machine of its own
    assert read.num_pages < 12 and not storage.healthy and storage.query(KEYS).done
    storage.close()


@needs_mooncake
def test_a_full_mooncake_store_refuses_what_it_has_no_room_for(backend_of_mooncake):
    backend = backend_of_mooncake
    data = parts(backend, 1, 4096 * KIB)
    results = [backend.put([f"{key_of(i).hex()}_{DIGEST}_L0-1_H0-1"], data)[0] for i in range(40)]
    assert results[:8] == [True] * 8 and not all(results)


@pytest.fixture
def backend_of_mooncake():
    master = Master()
    backend = opened("mooncake", master.options())
    yield backend
    backend.close()
    master.stop()


def test_buffers_of_failed_calls_are_released_after_a_while(monkeypatch):
    released: list[str] = []
    retired = RetiredBuffers(released.append)
    retired.add("first")
    now = time.monotonic()
    monkeypatch.setattr(base.time, "monotonic", lambda: now + 61)
    retired.add("second")
    assert released == ["first"]


def test_no_thread_is_left(kind, options):
    before = threading.active_count()
    opened(kind, options).close()
    wait_until(lambda: threading.active_count() <= before)
