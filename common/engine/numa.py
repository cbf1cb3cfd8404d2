"""Binds a rank to the CPUs of a NUMA node: its own threads, and the memory that they touch first, are then next to its
GPU."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ..api.errors import ConfigError

log = logging.getLogger("baton.engine")

_NODES, _PCI_DEVICES = Path("/sys/devices/system/node"), Path("/sys/bus/pci/devices")


def bind_rank(nodes: Sequence[int], local_rank: int, device: torch.device) -> None:
    """Binds this process to the node that ``nodes`` names for its GPU, on a CPU for the rank; without any to that of
    the GPU, if there is one. Raises ConfigError where none is named, or one that does not exist or whose CPUs the
    process must not use."""
    if nodes:
        index = local_rank if device.index is None else device.index
        if index >= len(nodes):
            raise ConfigError(f"--numa-node names {len(nodes)} nodes, and none for the GPU or rank {index}: give each "
                              "one.")
        node = nodes[index]
        if node >= 0 and not bind(node):
            raise ConfigError(f"--numa-node {node}: this host has no node {node} with CPUs that the server may use.")
        return
    found = node_of(device)
    if found is not None and len(list(_NODES.glob("node[0-9]*"))) > 1:
        bind(found)


def bind(node: int) -> bool:
    """Moves all threads to the node's CPUs, of those that the process may use, and says so in the log; returns False
    where there are none."""
    cpus = _cpus_of(node) & os.sched_getaffinity(0)
    if not cpus:
        return False
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:  # it has ended
            continue
    log.info("bound to NUMA node %d, %d CPUs", node, len(cpus))
    return True


def node_of(device: torch.device) -> int | None:
    """Returns the NUMA node of a GPU, None where the system states none."""
    if device.type != "cuda":
        return None
    try:
        node = int((_PCI_DEVICES / _pci_address(device.index) / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def _pci_address(index: int) -> str:
    """Returns a GPU's address in sysfs's form, 0000:1b:00.0; raises OSError or AttributeError without a driver."""
    address = ctypes.create_string_buffer(32)
    torch.cuda.init()
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(address, len(address), index)
    if status:
        raise OSError(f"CUDA error {status}")
    return address.value.decode().lower()


def _cpus_of(node: int) -> set[int]:
    """Reads a list such as ``0-3,8``."""
    try:
        text = (_NODES / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return set()
    bounds = [part.split("-") for part in text.split(",") if part]
    return {cpu for first, *last in bounds for cpu in range(int(first), int(last[-1] if last else first) + 1)}
