"""NIXL's plugins for files as a KV storage: POSIX (asynchronous I/O of a whole batch), GDS where it loads.

The folder, its limit and its names are those of file.py; so one may be replaced by the other. Each thread has an agent
of its own: an agent is not made for several.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...api.errors import ConfigError
from ...config.server.tiers import KV_STORAGES
from .base import (
    RetiredBuffers,
    StorageBackend,
    StorageContext,
    StorageError,
    aligned_buffer,
    backend_options,
)
from .file import FolderBackend, FolderOptions
from .folder import ObjectFolder

_VARIABLE, _DEFAULT_FOLDER = "SGLANG_HICACHE_NIXL_BACKEND", "/tmp/hicache_storage"
_POLL_SECONDS = 50e-6


class NixlOptions(FolderOptions, kw_only=True):
    """As ``FolderOptions``. ``plugin``: POSIX unless it names another; ``plugin_params`` are its own, such as
    {"use_uring": "true"}."""

    plugin: Literal["auto", "POSIX", "GDS", "GDS_MT"] = "auto"
    plugin_params: dict[str, str] = {}


@dataclass
class _Agent:
    """A thread's agent. ``memory`` is its registered buffer."""

    nixl: Any
    name: str
    retired: RetiredBuffers
    memory: tuple[np.ndarray, Any] | None = None


class NixlBackend(FolderBackend):
    """Objects as files that NIXL reads and writes. Raises ConfigError where the plugin does not start. Agents end with
    their threads."""

    def __init__(self, folder: ObjectFolder, plugin: str, params: dict[str, str]):
        super().__init__(folder)
        self._plugin, self._params = plugin, params
        self._agents = threading.local()
        try:
            self._new_agent()
        except ImportError as error:
            raise ConfigError(f"--hicache-storage-backend nixl needs the nixl package: {error}.") from None
        except Exception as error:  # the bindings' exceptions have no common base
            raise ConfigError(f"NIXL's plugin {plugin} does not start ({error}); set the storage's option plugin to "
                              "POSIX.") from None

    def __repr__(self) -> str:
        return f"NixlBackend({self._plugin}, {self.folder.path})"

    def _new_agent(self) -> _Agent:
        from nixl._api import nixl_agent, nixl_agent_config
        if "NIXL_LOG_LEVEL" not in os.environ:  # importing it sends INFO to stdout
            logging.getLogger("nixl").setLevel(logging.WARNING)
        name = uuid.uuid4().hex
        nixl = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        nixl.create_backend(self._plugin, self._params)

        def release(memory: tuple[np.ndarray, Any]) -> None:
            nixl.deregister_memory(memory[1])

        return _Agent(nixl, name, RetiredBuffers(release))

    def _agent(self) -> _Agent:
        if not hasattr(self._agents, "own"):
            self._agents.own = self._new_agent()
        agent: _Agent = self._agents.own
        return agent

    def buffer(self, num_bytes: int) -> np.ndarray:
        agent, memory = self._agent(), aligned_buffer(num_bytes)
        try:
            registration = agent.nixl.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        except Exception as error:  # as above
            raise StorageError(f"NIXL cannot register memory: {error}") from error
        if agent.memory is not None:
            agent.retired.add(agent.memory)
        agent.memory = memory, registration
        return memory

    def get(self, names: Sequence[str], into: Sequence[np.ndarray]) -> list[bool]:
        fds = [self._open(name, target.nbytes) for name, target in zip(names, into)]
        try:
            self._transfer("READ", [(fd, target) for fd, target in zip(fds, into) if fd is not None])
            for fd in fds:
                if fd is not None:
                    self.folder.touch(fd)
        finally:
            for fd in fds:
                if fd is not None:
                    os.close(fd)
        return [fd is not None for fd in fds]

    def _open(self, name: str, num_bytes: int) -> int | None:
        try:
            path = self.folder.file(name)
            fd = self.folder.with_direct(lambda flags: os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags))
        except FileNotFoundError:
            return None
        if os.fstat(fd).st_size == num_bytes:
            return fd
        os.close(fd)
        self.folder.delete(name)
        return None

    def put(self, names: Sequence[str], data: Sequence[np.ndarray]) -> list[bool]:
        results = self.exists(names)
        missing = [i for i, is_there in enumerate(results) if not is_there]
        if not self.folder.has_room(sum(data[i].nbytes for i in missing)):
            return results
        files: list[tuple[str, str, int, np.ndarray]] = []
        try:
            for i in missing:
                files.append((names[i], *self._create(names[i]), data[i]))
            self._transfer("WRITE", [(fd, source) for *_, fd, source in files])
            for name, path, *_ in files:
                os.rename(path, self.folder.file(name))
            self.folder.written(sum(source.nbytes for *_, source in files))
        finally:
            for _, path, fd, _ in files:
                os.close(fd)
                with contextlib.suppress(FileNotFoundError):  # the name that it has not after all went well
                    os.unlink(path)
        return [True] * len(names)

    def _create(self, name: str) -> tuple[str, int]:
        """Returns the temporary path of an object, and its open file."""
        path = self.folder.temporary(name)
        return path, self.folder.with_direct(lambda flags: self.folder.open_temporary(path, flags))

    def _transfer(self, operation: str, files: Sequence[tuple[int, np.ndarray]]) -> None:
        """Reads or writes whole files; raises StorageError."""
        if not files:
            return
        agent = self._agent()
        try:
            remote = agent.nixl.register_memory([(0, memory.nbytes, fd, "") for fd, memory in files], "FILE")
            try:
                local = agent.nixl.get_xfer_descs([(memory.ctypes.data, memory.nbytes, 0) for _, memory in files],
                                                  "DRAM")
                transfer = agent.nixl.initialize_xfer(operation, local, remote.trim(), agent.name)
                try:
                    state = agent.nixl.transfer(transfer)
                    while state == "PROC":
                        time.sleep(_POLL_SECONDS)
                        state = agent.nixl.check_xfer_state(transfer)
                finally:
                    agent.nixl.release_xfer_handle(transfer)
            finally:
                agent.nixl.deregister_memory(remote)
        except Exception as error:  # as above
            raise StorageError(f"NIXL's {self._plugin} cannot {operation.lower()}: {error}") from error
        if state != "DONE":
            raise StorageError(f"NIXL's {self._plugin} cannot {operation.lower()} ({state})")


@KV_STORAGES.register("nixl", needs={"nixl": "nixl"})
def make(context: StorageContext) -> StorageBackend:
    options = backend_options(context, NixlOptions, "nixl")
    plugin = options.plugin if options.plugin != "auto" else os.environ.get(f"{_VARIABLE}_PLUGIN", "POSIX").upper()
    return NixlBackend(options.open(_VARIABLE, _DEFAULT_FOLDER), "POSIX" if plugin == "AUTO" else plugin,
                       options.plugin_params)
