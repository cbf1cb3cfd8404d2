"""Interface of a KV storage's backend: objects by name, in files or in a service.

A backend is called by the worker threads of ``Storage`` alone, several at once. Its calls block, and release the
interpreter's lock meanwhile. It may lose objects and may return wrong ones: ``Storage`` checks what it reads.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from ...api.errors import ConfigError
from .objects import ALIGNMENT, ObjectFormat
from .page_servers import PageServers

if TYPE_CHECKING:
    from ..tiers.base import HostSlots

QUARANTINE_SECONDS = 60.0
STALL_SECONDS = 0.1

Options = TypeVar("Options", bound=msgspec.Struct)


class StorageError(Exception):
    """A backend cannot do what it was asked for: its service is gone, its device is full, or the like."""


@dataclass(frozen=True)
class Cluster:
    """What servers of a cluster share: the page servers that this rank knows, the secret that they have in common, and
    how they write into each other's memory (``--disaggregation-transfer-backend`` and ``-ib-device``)."""

    servers: PageServers
    secret: str | None = None
    transfer_backend: str = "auto"
    ib_device: str | None = None


@dataclass(frozen=True)
class StorageContext:
    """Facts that a backend is made from. ``options``: ``TierArgs.storage_config``. ``host`` is
    the address at which other hosts reach this one. ``slots``: this rank's host memory, whose pages ``objects``
    names."""

    options: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    slots: HostSlots | None = None
    objects: ObjectFormat | None = None
    cluster: Cluster = field(default_factory=lambda: Cluster(PageServers()))

    @property
    def stall_seconds(self) -> float:
        """How long a call may take before nobody waits for it."""
        return float(self.options.get("stall_seconds", STALL_SECONDS))


@dataclass
class BackendStats:
    """``used_bytes`` and ``capacity_bytes`` of the whole store, None where it does not tell; objects that this process
    has ``evicted`` to make room."""

    used_bytes: int | None = None
    capacity_bytes: int | None = None
    evicted: int = 0


class StorageBackend(Protocol):
    """Objects by name. A name has letters, digits, ``_`` and ``-`` only. All methods but ``close`` may raise
    StorageError, or OSError."""

    @property
    def stats(self) -> BackendStats: ...

    def buffer(self, num_bytes: int) -> np.ndarray:
        """Memory [num_bytes] uint8, aligned to 4 KiB, that ``get`` and ``put`` of the calling thread take as it is.
        ``num_bytes`` is a multiple of 4 KiB."""
        ...

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Tells which objects are there."""
        ...

    def get(self, names: Sequence[str], into: Sequence[np.ndarray]) -> list[bool]:
        """Reads whole objects into parts of ``buffer``, each as long as its object; False where it is absent. One
        of another length is damaged: False, and it is removed where the store tells its length."""
        ...

    def put(self, names: Sequence[str], data: Sequence[np.ndarray]) -> list[bool]:
        """Writes objects that lie in parts of ``buffer``, each as a whole or not at all; those that are there already
        may be kept. False where the store takes no more."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Removes objects; those that are absent are ignored."""

    def clear(self) -> None:
        """Removes all objects of Baton, those of other servers that use the same store, too."""

    def close(self) -> None:
        """Gives connections and buffers back; no call is in progress."""


class RetiredBuffers:
    """Registered memory of calls that failed: the library may still be writing into it, so that it is given back after
    a minute at the earliest. Safe for threads."""

    def __init__(self, release: Callable[[Any], None]):
        self._release = release
        self._lock = threading.Lock()
        self._retired: deque[tuple[float, Any]] = deque()

    def add(self, registration: Any) -> None:
        """Retires a registration, which keeps its memory; releases those that are old enough."""
        now = time.monotonic()
        with self._lock:
            self._retired.append((now + QUARANTINE_SECONDS, registration))
            due = []
            while self._retired[0][0] < now:
                due.append(self._retired.popleft()[1])
        for each in due:
            self._release(each)


def aligned_buffer(num_bytes: int) -> np.ndarray:
    """Memory [num_bytes] uint8 on pages of its own."""
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, ALIGNMENT)), np.uint8)[:num_bytes]


def backend_options(context: StorageContext, kind: type[Options], name: str) -> Options:
    """Returns a backend's options as its struct, without those that are for all backends. Raises ConfigError for
    unknown ones and for wrong values."""
    own = {key: value for key, value in context.options.items() if key != "stall_seconds"}
    known = [each.encode_name for each in msgspec.structs.fields(kind)]
    if unknown := sorted(own.keys() - set(known)):
        raise ConfigError(f"--hicache-storage-backend {name} has no option {unknown[0]!r}; it has {', '.join(known)}.")
    try:
        return msgspec.convert(own, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--hicache-storage-backend-extra-config of the storage {name}: {error}.") from None


def parse_size(value: str | int, option: str) -> int:
    """Bytes of a size such as 1073741824, "200G", "1Gi" or "4gb". Raises ConfigError."""
    units = {"": 1, **{letter: 1024 ** power for power, letter in enumerate("kmgt", 1)}}
    text = str(value).strip().lower()
    number = text.rstrip("bikmgt ")
    unit = text[len(number):].strip().removesuffix("b").removesuffix("i")
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise ConfigError(f"The storage's option {option} must be a size in bytes or like 200G, not {value!r}."
                          ) from None
