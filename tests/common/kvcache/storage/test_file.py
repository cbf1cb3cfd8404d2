"""Files as a KV storage: many processes in one folder, limits, restarts, and devices that are full."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server.tiers import KV_STORAGES
from baton.common.kvcache.storage import folder as folders
from baton.common.kvcache.storage.base import StorageContext, parse_size
from baton.common.kvcache.storage.open import open_storage
from baton.tests.helpers.stored_pages import DIGEST, FakeHost, key_of, query, rank_shape, read_back, wait_until, write

KEYS = [key_of(i) for i in range(12)]
KIB = 1024


def backend_at(path, **options):
    backend = KV_STORAGES.get("file")(StorageContext({"storage_dir": str(path), "min_free_space": 0, **options}))
    wait_until(lambda: not any(thread.name == "kv-storage-measure" for thread in threading.enumerate()))
    return backend


def objects(backend, count, size=16 * KIB, fill=7):
    data = [backend.buffer(size) for _ in range(count)]
    for each in data:
        each[:] = fill
    return data


def names(count, prefix="ab"):
    return [f"{prefix}{i:04}" for i in range(count)]


def put(backend, name, size=16 * KIB, fill=7, used=None):
    assert backend.put([name], objects(backend, 1, size, fill)) == [True]
    if used is not None:
        os.utime(backend.folder.file(name), (used, used))


@pytest.mark.parametrize("direct", [True, False])
def test_objects_are_files_of_their_name(tmp_path, direct):
    backend = backend_at(tmp_path, use_direct_io=direct)
    data = objects(backend, 3)
    assert backend.put(names(3), data) == [True] * 3
    assert sorted(path.name for path in (tmp_path / "ab").iterdir()) == [f"{name}.bin" for name in names(3)]
    assert backend.exists([*names(3), "ab9999"]) == [True] * 3 + [False]
    into = objects(backend, 4, fill=0)
    assert backend.get([*names(3), "ab9999"], into) == [True] * 3 + [False]
    assert all((each == 7).all() for each in into[:3]) and not into[3].any()
    assert backend.get(names(1), objects(backend, 1, 8 * KIB)) == [False]  # another length: it is of no use
    assert backend.exists(names(3)) == [False, True, True]
    backend.delete([names(3)[0], "ab9999"])
    assert backend.exists(names(3)) == [False, True, True]
    backend.clear()
    assert backend.exists(names(3)) == [False] * 3
    backend.close()


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(tmp_path, monkeypatch):
    backend, real = backend_at(tmp_path), os.open
    refused = []

    def no_direct_io(path, flags, *mode, **options):
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", no_direct_io)
    assert backend.put(names(2), objects(backend, 2)) == [True] * 2 and len(refused) == 1
    into = objects(backend, 2, fill=0)
    assert backend.get(names(2), into) == [True] * 2 and into[0].all()
    backend.close()


def test_the_objects_used_longest_ago_are_evicted_also_after_a_restart(tmp_path):
    backend = backend_at(tmp_path, max_size="160Ki")
    old = time.time() - 1000
    for i, name in enumerate(names(10)):
        put(backend, name, used=old + i)
    assert backend.stats.used_bytes == 160 * KIB and backend.stats.evicted == 0
    backend.close()
    backend = backend_at(tmp_path, max_size="160Ki")
    assert backend.stats.used_bytes == 160 * KIB
    assert backend.get(names(1), objects(backend, 1)) == [True]  # the oldest is used
    put(backend, "ab9999")
    assert backend.exists(names(10)) == [True, False, False] + [True] * 7
    assert backend.stats.evicted == 2 and backend.stats.used_bytes == 144 * KIB
    backend.close()


def test_servers_that_share_a_folder_keep_to_one_limit(tmp_path):
    backends = [backend_at(tmp_path, max_size="320Ki") for _ in range(3)]
    for i in range(60):
        backend = backends[i % 3]
        backend.put([f"{i:02x}same"], objects(backend, 1))
        total = sum(path.stat().st_size for path in tmp_path.glob("??/*.bin"))
        assert total <= 320 * KIB
    assert sum(backend.stats.evicted for backend in backends) >= 40
    for backend in backends:
        backend.close()


def test_processes_write_and_read_the_same_objects_at_once(tmp_path):
    code = f"""
from baton.tests.common.kvcache.storage.test_file import *
backend = backend_at({str(tmp_path)!r}, max_size="2Mi")
for i in range(150):
    name = f"{{i % 40:02x}}same"
    backend.put([name], objects(backend, 1, fill=i % 40 + 1))
    into = objects(backend, 1, fill=0)
    found = backend.get([name], into)
    assert not found[0] or (into[0] == i % 40 + 1).all()
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("??/*.bin"))) == 40 and not list(tmp_path.glob("??/.*.tmp"))
    backend = backend_at(tmp_path, max_size="2Mi")
    assert backend.stats.used_bytes == 40 * 16 * KIB
    backend.close()


def test_what_a_dead_process_left_is_removed_and_counted(tmp_path):
    backend = backend_at(tmp_path, max_size="1Mi")
    put(backend, names(1)[0])
    young, left = (Path(backend.folder.temporary(name)) for name in names(2))
    left.write_bytes(bytes(100))
    young.write_bytes(bytes(100))
    os.utime(left, (0, 0))
    (tmp_path / ".usage").unlink()
    backend.close()
    backend = backend_at(tmp_path, max_size="1Mi")
    assert backend.stats.used_bytes == 16 * KIB and not left.exists() and young.exists()
    backend.close()


def test_a_full_device_takes_nothing_more_and_keeps_nothing_half(tmp_path, monkeypatch):
    backend = backend_at(tmp_path)
    for i, name in enumerate(names(20)):
        put(backend, name, used=1000 + i)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert backend.put(["ab9999"], objects(backend, 1)) == [False]
    monkeypatch.undo()
    assert not list(tmp_path.glob("??/.*.tmp")) and backend.exists(["ab9999"]) == [False]
    assert backend.exists(names(3)) == [False, False, True]  # a tenth makes room
    put(backend, "ab9999")
    backend.close()


def test_some_of_the_file_system_stays_free(tmp_path, monkeypatch):
    backend = backend_at(tmp_path, min_free_space="1Mi")
    status = os.statvfs(tmp_path)
    free = [1 << 20]

    class Status:
        f_frsize = 1

        @property
        def f_bavail(self):
            return free[0]

    assert status.f_bavail > 0
    for i, name in enumerate(names(10)):
        put(backend, name, used=1000 + i)
    unlink = os.unlink

    def freeing(path):
        free[0] += os.stat(path).st_size
        unlink(path)

    monkeypatch.setattr(os, "statvfs", lambda path: Status())
    monkeypatch.setattr(os, "unlink", freeing)
    put(backend, "ab9999")
    assert backend.exists(names(3)) == [False, False, True] and backend.stats.evicted == 2
    free[0] = 0
    measured = []
    monkeypatch.setattr(backend.folder, "_evict", lambda num_bytes, is_full: measured.append(num_bytes))
    assert backend.put(["ab9998", "ab9997"], objects(backend, 2)) == [False, False]
    assert len(measured) == 1  # others fill the device: the folder is not walked for every object
    backend.close()


def test_other_errors_of_the_device_are_raised(tmp_path, monkeypatch):
    backend = backend_at(tmp_path)
    put(backend, names(1)[0])

    def broken(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    monkeypatch.setattr(os, "preadv", broken)
    for call in (backend.put, backend.get):
        with pytest.raises(OSError, match="Input/output"):
            call(["ab9999"] if call == backend.put else names(1), objects(backend, 1))
    backend.close()


def test_two_evictions_do_not_run_at_once(tmp_path):
    backend = backend_at(tmp_path, max_size="160Ki")
    with backend.folder._eviction_lock() as ours:
        assert ours and not backend.folder.evict(1)
    assert backend.folder.evict(1)
    backend.close()


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    backend = backend_at(tmp_path)
    put(backend, names(1)[0])
    os.unlink(backend.folder.file(names(1)[0]))
    os.rmdir(tmp_path / "ab")
    put(backend, names(1)[0])
    shutil.rmtree(tmp_path)
    put(backend, names(1)[0])
    assert backend.exists(names(1)) == [True]
    backend.close()


def test_a_restarted_server_finds_its_pages(tmp_path):
    options = {"storage_dir": str(tmp_path), "min_free_space": 0, "stall_seconds": 5}
    for rank in range(2):
        host = FakeHost(rank_shape(rank, 2))
        storage = open_storage("file", options, host, DIGEST, host.shape)
        write(storage, host, KEYS)
        storage.close()
    host = FakeHost(rank_shape())
    storage = open_storage("file", options, host, DIGEST, host.shape)
    assert query(storage, [*KEYS, key_of(99)]) == 12
    (path,) = tmp_path.glob(f"*/{KEYS[7].hex()}_*_H0-4.bin")
    path.write_bytes(path.read_bytes()[:-1])
    assert read_back(storage, host, KEYS) == 7
    storage.close()


def test_a_storage_that_is_deleted_under_a_server_costs_nothing_but_hits(tmp_path):
    host, options = FakeHost(rank_shape()), {"storage_dir": str(tmp_path), "min_free_space": 0, "stall_seconds": 5}
    storage = open_storage("file", options, host, DIGEST, host.shape)
    write(storage, host, KEYS[:6])
    for path in tmp_path.glob("??/*"):
        path.unlink()
    for path in tmp_path.glob("??"):
        path.rmdir()
    assert query(storage, KEYS) == 0 == read_back(storage, host, KEYS[:6])
    assert storage.healthy and not any(storage.counters.errors.values())
    write(storage, host, KEYS[6:])
    assert query(storage, KEYS[6:]) == 6
    storage.close()


def test_names_and_limits_come_from_sglangs_variables_too(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE", "3G")
    backend = KV_STORAGES.get("file")(StorageContext())
    assert backend.folder.path == str(tmp_path) and backend.stats.capacity_bytes == 3 << 30
    assert backend.folder._min_free_bytes > 0
    backend.close()


@pytest.mark.parametrize("options, message", [
    ({"max_sise": 3}, "has no option 'max_sise'; it has storage_dir, max_size, min_free_space, use_direct_io"),
    ({"max_size": "3X"}, "max_size must be a size in bytes or like 200G, not '3X'"),
    ({"use_direct_io": "yes"}, "Expected `bool`"),
    ({"storage_dir": "/proc/nowhere"}, "cannot use the folder /proc/nowhere"),
    ({"stall_seconds": 0}, "stall_seconds must be above 0, not 0"),
])
def test_wrong_options_are_refused_in_a_sentence(options, message):
    host = FakeHost(rank_shape())
    with pytest.raises(ConfigError, match=message):
        open_storage("file", options, host, DIGEST, host.shape)
    assert not host.listeners


@pytest.mark.parametrize("text, expected", [("200", 200), (7, 7), ("2G", 2 << 30), ("1.5Ki", 1536), ("4gb", 4 << 30),
                                            ("3 MiB", 3 << 20), ("1T", 1 << 40)])
def test_sizes(text, expected):
    assert parse_size(text, "max_size") == expected


def test_measuring_a_folder_that_cannot_be_read_is_a_log_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folders.ObjectFolder, "_entries", lambda self: (_ for _ in ()).throw(OSError("gone")))
    backend = backend_at(tmp_path, max_size="1Mi")
    wait_until(lambda: "cannot measure" in caplog.text)
    backend.close()


def test_importing_brings_neither_torch_nor_a_library_of_a_backend():
    code = ("import sys, baton.common.kvcache.storage.open, baton.common.kvcache.storage.file; "
            "sys.exit(bool({'torch', 'nixl', 'mooncake', 'xxhash'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_numpy_memory_is_aligned_for_direct_io(tmp_path):
    backend = backend_at(tmp_path)
    assert backend.buffer(8 * KIB).ctypes.data % 4096 == 0 and isinstance(backend.buffer(4096), np.ndarray)
    backend.close()
