"""Host memory that another process of this host can map: anonymous files (memfd_create(2)), looked up by address.

Such a file has no name that could leak: it ends with the last process that has it open or mapped. It is sealed, so that
nobody can shrink it: a process that mapped it may write into a dead owner's pages without harm. Others open it through
/proc, which admits processes of the same user and the same PID namespace.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import NamedTuple

import msgspec
import numpy as np


class HostHandle(msgspec.Struct, frozen=True):
    """Address of our memory for another process. ``inode`` distinguishes the file from a later one with the same
    numbers."""

    pid: int
    fd: int
    inode: int
    offset: int


class _Owned(NamedTuple):
    fd: int
    num_bytes: int


_owned: dict[int, _Owned] = {}  # by address


def shared_bytes(num_bytes: int) -> np.ndarray:
    """``[num_bytes]`` uint8, zeros, in memory that ``handle_of`` can describe. Raises OSError where there is none."""
    fd = os.memfd_create("baton", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        array = np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)
    except BaseException:
        os.close(fd)
        raise
    _owned[array.ctypes.data] = _Owned(fd, num_bytes)
    weakref.finalize(array, _disown, array.ctypes.data).atexit = False
    return array


def handle_of(address: int, num_bytes: int) -> HostHandle | None:
    """The handle of these bytes, None where they do not lie in one array of ``shared_bytes``."""
    for begin, owned in _owned.items():
        if begin <= address and address + num_bytes <= begin + owned.num_bytes:
            return HostHandle(os.getpid(), owned.fd, os.fstat(owned.fd).st_ino, address - begin)
    return None


def map_handle(handle: HostHandle, num_bytes: int) -> np.ndarray:
    """Maps the memory itself, of any process: ``[num_bytes]`` uint8. Raises OSError where it is gone or out of
    reach, or no sealed memory."""
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    if not os.readlink(path).startswith("/memfd:"):  # to open a file of another kind may wait
        raise FileNotFoundError("another file is open there now")
    fd = os.open(path, os.O_RDWR)
    try:
        stat = os.fstat(fd)
        if stat.st_ino != handle.inode or stat.st_size < handle.offset + num_bytes:
            raise FileNotFoundError("another file is open there now")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise PermissionError("its owner may shrink it (F_SEAL_SHRINK is not set)")
        return np.frombuffer(mmap.mmap(fd, stat.st_size), dtype=np.uint8)[handle.offset:][:num_bytes]
    finally:
        os.close(fd)


def _disown(address: int) -> None:
    os.close(_owned.pop(address).fd)
