"""The ring of layers that pass through device buffers: every kernel reads its own layer's weights, in whatever order
the device gets to copies and kernels, and loading leaves in host memory what was written."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.server import OffloadArgs
from baton.common.weights.offload.copy_stream import HostCopies
from baton.common.weights.offload.layer_ring import LayerRing

BYTES = 16


class FakeDevice:
    """Two queues, of kernels and of copies, whose work is done when ``run`` is called, in any order that their events
    allow. It is also the ring's CopyStream."""

    def __init__(self) -> None:
        self.queues: dict[str, list[tuple[Callable[[], object] | None, int]]] = {"kernels": [], "copies": []}
        self.records: dict[int, tuple[str, int]] = {}  # events by number: a queue, and how much of it is to be done
        self.copied: dict[int, int] = {}

    def launch(self, queue: str, work: Callable[[], object]) -> None:
        self.queues[queue].append((work, 0))

    def record(self, queue: str) -> int:
        self.records[len(self.records) + 1] = queue, len(self.queues[queue])
        return len(self.records)

    def wait(self, queue: str, event: int) -> None:
        self.queues[queue].append((None, event))

    def begin(self) -> None:
        self.wait("copies", self.record("kernels"))

    def copy(self, number: int, buffer: torch.Tensor, source: torch.Tensor) -> None:
        self.launch("copies", lambda: buffer[:len(source)].copy_(source))
        self.copied[number] = self.record("copies")

    def wait_for_copy(self, number: int) -> None:
        self.wait("kernels", self.copied[number])

    def wait_for_readers(self, number: int) -> None:
        self.wait("copies", self.record("kernels"))

    def end(self) -> None:
        self.wait("kernels", self.record("copies"))

    def run(self, choose: Callable[[list[str]], str]) -> None:
        done = dict.fromkeys(self.queues, 0)
        while ready := [name for name, queue in self.queues.items() if done[name] < len(queue)]:
            allowed = []
            for name in ready:
                event = self.queues[name][done[name]][1]
                other, count = self.records.get(event, (name, 0))
                if done[other] >= count:
                    allowed.append(name)
            name = choose(allowed)
            work = self.queues[name][done[name]][0]
            if work is not None:
                work()
            done[name] += 1


def read_by_steps(layers: list[int], count: int, buffers: int, choose: Callable[[list[str]], str],
                  device: FakeDevice) -> list[tuple[int, list[int]]]:
    """Returns what the kernels of two steps read, of which each layer has two; the second may run into the next layer
    by a kernel, as deferred products do."""
    sources = [torch.full((BYTES,), layer, dtype=torch.uint8) for layer in layers]
    memory = [torch.full((BYTES,), 255, dtype=torch.uint8) for _ in range(buffers)]
    ring = LayerRing(layers, sources, memory, device)
    seen: list[tuple[int, list[int]]] = []

    def kernel(layer: int) -> None:
        if layer in layers:
            device.launch("kernels", lambda: seen.append((layer, ring.buffer_of(layer).unique().tolist())))

    for _ in range(2):
        with ring.start() as weights:
            for layer in range(count):
                weights.enter(layer)
                kernel(layer)
                kernel(layer - 1)
                weights.leave(layer - 1)
                kernel(layer)
            kernel(count - 1)
    device.run(choose)
    return seen


SCHEDULES = {"kernels first": lambda allowed: allowed[0], "copies first": lambda allowed: allowed[-1],
             **{f"random {seed}": random.Random(seed).choice for seed in range(6)}}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("layers", "count", "buffers"), [
    ([*range(7)], 7, 2), ([1, 3, 5, 7, 9], 10, 2), ([0, 1, 2, 6, 7], 9, 3), ([2, 5, 8], 9, 2)])
def test_kernels_read_their_layer(layers, count, buffers, name):
    seen = read_by_steps(layers, count, buffers, SCHEDULES[name], FakeDevice())
    assert len(seen) == 6 * len(layers)
    assert all(values == [layer] for layer, values in seen), seen


@pytest.mark.parametrize("missing", ["begin", "wait_for_copy", "wait_for_readers"])
def test_every_event_is_needed(missing):
    """Without one of them some order of the device's work gives a kernel another layer's weights."""
    def wrong(name: str) -> bool:
        device = FakeDevice()
        setattr(device, missing, lambda *number: None)
        seen = read_by_steps([*range(7)], 7, 2, SCHEDULES[name], device)
        return any(values != [layer] for layer, values in seen)

    assert any(wrong(name) for name in SCHEDULES)


def test_loading_interleaves_layers():
    sources = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(3)]
    buffers = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2)]
    ring = LayerRing([0, 1, 2], sources, buffers, HostCopies())
    parameters = [ring.buffer_of(layer).view(torch.float32)[1:3] for layer in range(3)]
    for value, layer in enumerate([0, 2, 1, 0, 2, 0]):
        ring.bring(layer)
        parameters[layer][value % 2] = 10 * layer + value
    assert ring.content_of(0, parameters[0]).tolist() == [0, 5]  # not written back yet
    with pytest.raises(AssertionError, match="loading ends"):
        ring.start()
    ring.write_back()
    assert [source.view(torch.float32)[1:3].tolist() for source in sources] == [[0, 5], [12, 0], [24, 21]]
    assert [ring.content_of(layer, parameters[layer]).tolist() for layer in range(3)] == [[0, 5], [12, 0], [24, 21]]


@pytest.mark.parametrize(("args", "chosen"), [
    ({"offload_group_size": 4}, [3, 7]), ({"offload_group_size": 4, "offload_num_in_group": 2}, [2, 3, 6, 7]),
    ({"offload_group_size": 1}, [*range(9)]), ({"cpu_offload_gb": 3.5}, [2, 5, 8]),
    ({"cpu_offload_gb": 99}, [*range(9)]), ({"cpu_offload_gb": 8.9}, [1, 2, 3, 4, 5, 6, 7, 8])])
def test_which_layers_are_offloaded(args, chosen):
    sizes = [1 << 30] * 9
    if len(chosen) <= 2:
        with pytest.raises(ConfigError, match="puts 2 of 9 layers into host memory, of up to 1 GiB each, and the 2"):
            OffloadArgs(**args).choose(sizes)
    else:
        assert OffloadArgs(**args).choose(sizes) == chosen
