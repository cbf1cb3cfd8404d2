"""Which NUMA node a rank is bound to."""

from __future__ import annotations

import os

import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.engine import numa

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def bound(tmp_path, monkeypatch):
    """A host of two nodes with four CPUs each, whose GPU at 0000:1b:00 is at node 1; the CPUs that were bound to."""
    nodes, devices = tmp_path / "nodes", tmp_path / "devices"
    for name, cpus in (("node0", "0-1,4-5\n"), ("node1", "2-3,6,7\n")):
        (nodes / name).mkdir(parents=True)
        (nodes / name / "cpulist").write_text(cpus)
    (devices / "0000:1b:00.0").mkdir(parents=True)
    (devices / "0000:1b:00.0" / "numa_node").write_text("1\n")
    monkeypatch.setattr(numa, "_NODES", nodes)
    monkeypatch.setattr(numa, "_PCI_DEVICES", devices)
    seen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: seen.append(cpus))
    monkeypatch.setattr(numa, "_pci_address", lambda index: f"0000:{0x1A + index:02x}:00.0")
    yield seen
    assert len(seen) % len(os.listdir("/proc/self/task")) == 0, "all threads are bound"


def test_a_rank_is_bound_to_the_node_of_its_gpu(bound):
    numa.bind_rank((), 0, GPU)
    assert bound and all(cpus == {2, 3, 6} for cpus in bound)


def test_named_nodes(bound):
    numa.bind_rank((1, 0), 0, GPU)  # of GPU 1
    assert bound and all(cpus == {0, 1, 4, 5} for cpus in bound)
    bound.clear()
    numa.bind_rank((1, 0), 0, CPU)
    assert bound and all(cpus == {2, 3, 6} for cpus in bound)


def test_who_is_not_bound(bound, tmp_path):
    numa.bind_rank((), 0, CPU)
    numa.bind_rank((0, -1), 0, GPU)
    (tmp_path / "devices" / "0000:1b:00.0" / "numa_node").write_text("-1\n")  # the firmware does not say
    numa.bind_rank((), 0, GPU)
    (tmp_path / "devices" / "0000:1b:00.0" / "numa_node").unlink()
    numa.bind_rank((), 0, GPU)
    assert bound == []


def test_refusals(bound):
    with pytest.raises(ConfigError, match="--numa-node 2: this host has no node 2 with CPUs that the server may use."):
        numa.bind_rank((2,), 0, CPU)
    with pytest.raises(ConfigError, match="--numa-node names 1 nodes, and none for the GPU or rank 1: give each one."):
        numa.bind_rank((0,), 0, GPU)
