"""Rates of a KV storage: whole objects written and read by threads, in GB/s, and what checksums cost beside that.

    python -m baton.tests.bench.kv_storage [--storage file] [--options '{"storage_dir": "/mnt/nvme/kv"}']
        [--object-kib 256,2048] [--threads 1,4] [--total-mib 1024]

Objects are written, then read in another order, in batches of 8 MiB as the server does, and removed in the end; the
page cache is passed by where the file system allows it. ``exists`` is thousands of names a second. ``check`` is the
rate of one thread that seals and checks objects, without the storage.
"""

from __future__ import annotations

import argparse
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...common.config.server.tiers import KV_STORAGES
from ...common.kvcache.storage.base import StorageBackend, StorageContext, aligned_buffer
from ...common.kvcache.storage.objects import HEADER_BYTES, ObjectFormat
from ...common.kvcache.storage.page_shape import PageShape, PoolShape

_BATCH_BYTES = 8 << 20


def _names(count: int) -> list[str]:
    return [f"{secrets.token_hex(32)}_{'0' * 32}_L0-1_H0-1" for _ in range(count)]


def _seconds(threads: int, names: Sequence[str], batch: int, work: Callable[[Sequence[str]], None]) -> float:
    """Times ``work`` on batches of names, by so many threads."""
    batches = [names[first:first + batch] for first in range(0, len(names), batch)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, batches[:threads]))  # buffers are allocated and connections made
        began = time.perf_counter()
        list(pool.map(work, batches[threads:] or batches))
        return time.perf_counter() - began


def measure(backend: StorageBackend, object_bytes: int, threads: int, total: int) -> dict[str, float]:
    """Returns GB/s of ``put`` and ``get``, and thousands of names a second of ``exists``."""
    batch = max(1, _BATCH_BYTES // object_bytes)
    names = _names(max(total // object_bytes // batch, 2 * threads) * batch)
    timed = len(names) - threads * batch
    buffers: dict[int, np.ndarray] = {}

    def parts(count: int) -> list[np.ndarray]:
        memory = buffers.get(threading.get_ident())
        if memory is None:
            memory = buffers[threading.get_ident()] = backend.buffer(batch * object_bytes)
            memory[:] = np.random.default_rng().integers(0, 256, len(memory), np.uint8)
        return [memory[i * object_bytes:(i + 1) * object_bytes] for i in range(count)]

    def put(some: Sequence[str]) -> None:
        assert all(backend.put(some, parts(len(some)))), "the storage is full: lower --total-mib"

    def get(some: Sequence[str]) -> None:
        assert all(backend.get(some, parts(len(some)))), "the storage has lost objects"

    def exists(some: Sequence[str]) -> None:
        assert all(backend.exists(some))

    order = list(np.random.default_rng(0).permutation(names))
    try:
        written = timed * object_bytes / _seconds(threads, names, batch, put) / 1e9
        buffers.clear()
        read = timed * object_bytes / _seconds(threads, order, batch, get) / 1e9
        found = timed / _seconds(threads, names, batch, exists) / 1e3
    finally:
        backend.delete(names)
    return {"put_gb_s": round(written, 2), "get_gb_s": round(read, 2), "exists_k_s": round(found, 1)}


def check_rate(object_bytes: int) -> float:
    """Returns GB/s of ``seal`` and ``check``, each of which reads an object once."""
    shape = PageShape((PoolShape(1, 1, 1, object_bytes - HEADER_BYTES),), range(1))
    objects, key = ObjectFormat("0" * 32, shape), bytes(32)
    data, count = aligned_buffer(object_bytes), max(4, (256 << 20) // object_bytes)
    began = time.perf_counter()
    for _ in range(count):
        objects.seal(key, data)
        assert objects.check(key, shape.own, data) == "ok"
    return 2 * count * object_bytes / (time.perf_counter() - began) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="file", choices=[
        name for name in KV_STORAGES.names if not KV_STORAGES.has(name, "reads_only")])
    parser.add_argument("--options", default="{}", type=json.loads)
    parser.add_argument("--object-kib", default="256,2048")
    parser.add_argument("--threads", default="1,4")
    parser.add_argument("--total-mib", default=1024, type=int)
    args = parser.parse_args()
    backend = KV_STORAGES.get(args.storage)(StorageContext(args.options))
    try:
        for kib in map(int, args.object_kib.split(",")):
            print(f"{kib} KiB: check {check_rate(kib << 10):.1f} GB/s")
            for threads in map(int, args.threads.split(",")):
                rates = measure(backend, kib << 10, threads, args.total_mib << 20)
                print(f"{kib} KiB, {threads} threads: " + ", ".join(f"{name} {rate}" for name, rate in rates.items()))
    finally:
        backend.close()


if __name__ == "__main__":
    main()
