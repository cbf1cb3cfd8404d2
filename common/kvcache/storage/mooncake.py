"""Mooncake Store as a KV storage: the host memory of many servers as one, over RDMA or TCP, behind ``mooncake_master``.

Options and environment variables are SGLang's. A rank offers ``global_segment_size`` of its host's memory to all. The
master evicts what was not used for long; a server that ends takes the objects in its memory with it.

A call that failed may have left a transfer in flight, which the library cannot withdraw: see ``RetiredBuffers``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from ...api.errors import ConfigError
from ...config.server.tiers import KV_STORAGES
from .base import (
    BackendStats,
    RetiredBuffers,
    StorageBackend,
    StorageContext,
    StorageError,
    aligned_buffer,
    backend_options,
    parse_size,
)
from .objects import NAME_PATTERN

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 3.0
_WILDCARDS = ("0.0.0.0", "::", "")
_NO_SPACE, _EXISTS = -200, -705
_ABSENT = range(-799, -599)
"""Its errors about an object: absent, longer than the buffer, being written, removed."""


class MooncakeOptions(msgspec.Struct, kw_only=True):
    """``master_server_address``: HOST:PORT of mooncake_master. ``global_segment_size``: memory that each rank offers,
    such as "4gb". ``local_hostname``: the address at which other hosts reach this one. ``protocol``: tcp or rdma, the
    latter with ``device_name``."""

    master_server_address: str = ""
    metadata_server: str = ""
    global_segment_size: str | int = ""
    local_hostname: str = ""
    protocol: str = ""
    device_name: str = ""

    def __post_init__(self) -> None:
        for name, variable, default in (
                ("master_server_address", "MOONCAKE_MASTER", ""),
                ("metadata_server", "MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
                ("global_segment_size", "MOONCAKE_GLOBAL_SEGMENT_SIZE", "4gb"),
                ("local_hostname", "MOONCAKE_LOCAL_HOSTNAME", ""), ("protocol", "MOONCAKE_PROTOCOL", "tcp"),
                ("device_name", "MOONCAKE_DEVICE", "")):
            if getattr(self, name) == "":
                setattr(self, name, os.environ.get(variable, default))


class MooncakeBackend:
    """A client of the store, and a part of its memory. Raises ConfigError where it does not start."""

    def __init__(self, options: MooncakeOptions, host: str):
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # its other lines go to stderr
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"--hicache-storage-backend mooncake needs the mooncake-transfer-engine package (without CUDA: "
                f"mooncake-transfer-engine-non-cuda) and the libraries it is linked with: {error}.") from None
        if not options.master_server_address:
            raise ConfigError("--hicache-storage-backend mooncake needs master_server_address in "
                              "--hicache-storage-backend-extra-config, or MOONCAKE_MASTER.")
        address = options.local_hostname or host
        if address in _WILDCARDS:
            raise ConfigError("--hicache-storage-backend mooncake needs local_hostname in "
                              "--hicache-storage-backend-extra-config, the address that other hosts reach this one at: "
                              f"{address} is none.")
        segment_bytes = parse_size(options.global_segment_size, "global_segment_size")
        self.stats = BackendStats()
        self._store = MooncakeDistributedStore()
        code = self._store.setup(address, options.metadata_server, segment_bytes, 16 << 20,
                                 options.protocol, options.device_name, options.master_server_address)
        if code != 0:
            raise ConfigError(f"Mooncake Store does not start with the master {options.master_server_address} over "
                              f"{options.protocol} (error {code}); its log says why.")
        self._buffers: dict[int, np.ndarray] = {}  # by thread
        self._retired = RetiredBuffers(lambda memory: self._store.unregister_buffer(memory.ctypes.data))

    def buffer(self, num_bytes: int) -> np.ndarray:
        memory = aligned_buffer(num_bytes)
        if self._store.register_buffer(memory.ctypes.data, memory.nbytes) != 0:
            raise StorageError("it cannot register memory")
        if (last := self._buffers.get(threading.get_ident())) is not None:
            self._retired.add(last)
        self._buffers[threading.get_ident()] = memory
        return memory

    def exists(self, names: Sequence[str]) -> list[bool]:
        codes = self._store.batch_is_exist(list(names))
        _raise_unless(all(code >= 0 for code in codes), codes)
        return [code == 1 for code in codes]

    def get(self, names: Sequence[str], into: Sequence[np.ndarray]) -> list[bool]:
        codes = self._store.batch_get_into(list(names), *_addresses(into))
        _raise_unless(all(code >= 0 or code in _ABSENT for code in codes), codes)
        if damaged := [name for name, code, target in zip(names, codes, into) if 0 <= code != target.nbytes]:
            self.delete(damaged)
        return [code == target.nbytes for code, target in zip(codes, into)]

    def put(self, names: Sequence[str], data: Sequence[np.ndarray]) -> list[bool]:
        codes = self._store.batch_put_from(list(names), *_addresses(data))
        _raise_unless(all(code in (0, _EXISTS, _NO_SPACE) for code in codes), codes)
        return [code != _NO_SPACE for code in codes]

    def delete(self, names: Sequence[str]) -> None:
        self._store.batch_remove(list(names), True)

    def clear(self) -> None:
        code = self._store.remove_by_regex(f"^{NAME_PATTERN}$", True)
        _raise_unless(code >= 0, [code])

    def close(self) -> None:
        """A master that does not answer keeps the library busy for 11 s: it may end after us."""
        closing = threading.Thread(target=self._store.close, name="kv-storage-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("Mooncake Store does not answer; its client is left as it is.")


def _addresses(arrays: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    return [each.ctypes.data for each in arrays], [each.nbytes for each in arrays]


def _raise_unless(ok: bool, codes: Sequence[int]) -> None:
    if not ok:
        raise StorageError(f"its error {min(codes)}")


@KV_STORAGES.register("mooncake", needs={"mooncake": "mooncake-transfer-engine"})
def make(context: StorageContext) -> StorageBackend:
    return MooncakeBackend(backend_options(context, MooncakeOptions, "mooncake"), context.host)
