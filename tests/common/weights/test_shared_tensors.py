"""Tensors as handles: what is mapped equals what was shared, and what does not fit the memory is refused."""

from __future__ import annotations

import base64
import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import baton
from baton.common.api.errors import InvalidRequest
from baton.common.shared_memory.cuda import Allocation, DriverError
from baton.common.shared_memory.host import shared_bytes
from baton.common.weights import shared_tensors
from baton.common.weights.shared_tensors import HostFile, SharedTensors, map_tensors

CPU = torch.device("cpu")


def description_of(shared: SharedTensors) -> dict[str, Any]:
    return msgspec.json.decode(base64.b64decode(shared.entry))


def mapped(description: Any) -> list[tuple[str, torch.Tensor]]:
    return map_tensors(msgspec.json.encode(description), CPU)


def num_mappings(inode: int) -> int:
    return sum(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def test_tensors_of_all_kinds_are_mapped():
    torch.manual_seed(0)
    tensors = {"a": torch.randn(3, 5), "scalar": torch.tensor(7.5), "half": torch.randn(9, 7).to(torch.bfloat16),
               "turned": torch.randn(4, 6).T, "bytes": torch.arange(13, dtype=torch.uint8),
               "eight": torch.randn(8, 8).to(torch.float8_e4m3fn), "last": torch.randn(2, 3, 4, dtype=torch.float64)}
    shared = baton.share_tensors(tensors)
    found = dict(map_tensors(base64.b64decode(shared.entry), CPU))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float()), name
    pairs = baton.share_tensors(iter(tensors.items()))
    assert description_of(pairs)["tensors"] == description_of(shared)["tensors"]


def test_nothing_travels_but_handles_and_nothing_stays_mapped():
    shared = baton.share_tensors({"w": torch.zeros(1 << 20)})
    assert len(shared.entry) < 400
    description = description_of(shared)
    inode = description["memory"][0]["inode"]
    [(_, tensor)] = mapped(description)
    assert num_mappings(inode) == 2
    shared.kept[0].view("float32")[5] = 3.0
    assert tensor[5] == 3.0
    del tensor
    gc.collect()
    assert num_mappings(inode) == 1
    del shared
    gc.collect()
    assert num_mappings(inode) == 0
    with pytest.raises(InvalidRequest, match="cannot be mapped .* keep what share_tensors returned"):
        mapped(description)


@pytest.mark.parametrize("change", [
    {"index": 1}, {"index": -1}, {"offset": -4}, {"offset": 2}, {"shape": [-1]}, {"shape": [1 << 70]},
    {"shape": [1 << 70, 0]}, {"shape": [1 << 40, 1 << 40]}])
def test_places_that_are_none(change):
    description = description_of(baton.share_tensors({"w": torch.zeros(64)}))
    description["tensors"][0] |= change
    with pytest.raises(InvalidRequest, match="serialized_named_tensors has no tensor w|no description of handles"):
        mapped(description)


def test_bytes_that_the_memory_does_not_have():
    description = description_of(baton.share_tensors({"w": torch.zeros(64)}))
    for change in ({"shape": [65]}, {"offset": 4}, {"shape": [1 << 50]}):
        wrong = description | {"tensors": [description["tensors"][0] | change]}
        with pytest.raises(InvalidRequest, match="cannot be mapped"):
            mapped(wrong)
    with pytest.raises(InvalidRequest, match="torch has no type 'int31'"):
        mapped(description | {"tensors": [description["tensors"][0] | {"dtype": "int31"}]})


@pytest.mark.parametrize("content", [b"", b"[]", b"\x80\x04.", b'{"memory": [{"type": "disk"}], "tensors": []}',
                                     b'{"memory": [], "tensors": [{"name": 3}]}', b"[" * 100_000])
def test_what_is_no_description(content):
    with pytest.raises(InvalidRequest, match="no description of handles"):
        map_tensors(content, CPU)


def test_memory_that_its_owner_may_shrink_and_files_of_other_kinds(tmp_path):
    description = description_of(baton.share_tensors({"w": torch.zeros(4)}))
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    reading, writing = os.pipe()
    for fd, reason in ((loose, "may shrink it"), (file, "another file"), (reading, "another file")):
        handle = HostFile(os.getpid(), fd, os.fstat(fd).st_ino)
        with pytest.raises(InvalidRequest, match=reason):
            mapped(description | {"memory": [msgspec.to_builtins(handle)]})
        os.close(fd)
    os.close(writing)
    assert shared_bytes(10).tolist() == [0] * 10


def test_a_rank_on_a_cpu_maps_no_gpu():
    description = {"memory": [{"type": "cuda", "device": "GPU-1", "handle": base64.b64encode(bytes(64)).decode(),
                               "num_bytes": 64}],
                   "tensors": [{"name": "w", "dtype": "float32", "shape": [4], "index": 0, "offset": 0}]}
    with pytest.raises(InvalidRequest, match="memory of the GPU GPU-1, and this server runs on a CPU"):
        mapped(description)


class HostIpc:
    """CUDA IPC over allocations of host memory, ``begin`` to ``bytes``; a handle is the address of one."""

    def __init__(self, *allocations: torch.Tensor):
        self.sizes = {each.data_ptr(): each.nbytes for each in allocations}
        self.opened: list[int] = []

    def allocation_of(self, address: int) -> Allocation:
        for begin, size in self.sizes.items():
            if begin <= address < begin + size:
                return Allocation(begin, size)
        raise DriverError("invalid argument")

    def handle_of(self, begin: int) -> bytes:
        return begin.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        begin = int.from_bytes(handle, "little")
        self.allocation_of(begin)
        self.opened.append(begin)
        return begin

    def close(self, begin: int) -> None:
        self.opened.remove(begin)


def as_tensor(mapped: Any, device: torch.device) -> torch.Tensor:
    """What torch makes of GPU memory: a tensor that keeps its owner."""
    interface = mapped.__cuda_array_interface__
    memory = (ctypes.c_ubyte * interface["shape"][0]).from_address(interface["data"][0])
    memory.owner = mapped
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.fixture
def gpu(monkeypatch):
    """Two allocations, and the handles of three tensors in them."""
    blocks = [torch.arange(256, dtype=torch.uint8), torch.arange(64, dtype=torch.uint8)]
    tensors = {"a": blocks[0][16:48].view(torch.float32).view(2, 4), "b": blocks[0][48:50], "whole": blocks[1]}
    ipc = HostIpc(*blocks)
    monkeypatch.setattr(shared_tensors, "_ipc", lambda device: ipc)
    monkeypatch.setattr(shared_tensors, "_uuid", lambda device: f"GPU-{device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    memory, places, kept = shared_tensors._share_gpu(list(tensors.items()))
    return ipc, tensors, memory, places, kept


def test_tensors_of_one_allocation_share_its_handle(gpu):
    ipc, tensors, memory, places, kept = gpu
    assert [each.num_bytes for each in memory] == [256, 64]
    assert [(place.index, place.offset, place.shape) for place in places] == [(0, 16, [2, 4]), (0, 48, [2]),
                                                                            (1, 0, [64])]
    content = msgspec.json.encode(shared_tensors.TensorHandles(memory, places))
    found = dict(map_tensors(content, torch.device("cuda", 0)))
    assert all(torch.equal(found[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)
    assert len(ipc.opened) == 2
    whole = found.pop("whole")
    del found
    gc.collect()
    assert ipc.opened == [tensors["whole"].data_ptr()]
    del whole
    gc.collect()
    assert not ipc.opened


def test_gpu_memory_that_does_not_have_the_tensors(gpu):
    ipc, _, memory, places, _ = gpu
    replace = msgspec.structs.replace
    for tensors, first, reason in [
            ([replace(places[1], shape=[209])], {}, "names 257 bytes of GPU memory that has 256"),
            (places, {"num_bytes": 1 << 40, "handle": bytes(64)}, "must see this GPU"),
            (places, {"num_bytes": 49}, "names 50 bytes of GPU memory that has 49")]:
        content = msgspec.json.encode(shared_tensors.TensorHandles([replace(memory[0], **first), memory[1]], tensors))
        with pytest.raises(InvalidRequest, match=reason):
            map_tensors(content, torch.device("cuda", 0))
    gc.collect()
    assert not ipc.opened


def test_memory_that_cuda_cannot_share(gpu):
    with pytest.raises(RuntimeError, match="CUDA cannot share the memory of w .* leave expandable_segments out"):
        shared_tensors._share_gpu([("w", torch.zeros(4))])
