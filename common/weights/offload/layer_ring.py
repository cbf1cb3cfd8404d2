"""The ring of device buffers through which layers' weights pass that are kept in host memory.

Layer k of those layers has buffer k modulo their number, whose addresses its parameters have, so that kernels and CUDA
graphs find them there. A step copies each layer before it computes, and the next one of its buffer once it has: several
copies are ahead of the computation. Nothing is left over from step to step, so that graphs, eager steps and loading may
follow one another in any order.

Loading needs no step: a layer whose parameters are written is brought to its buffer first, and written back to host
memory before another one takes the buffer, and when loading ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .copy_stream import CopyStream


class LayerPass:
    """The passage of a step through a model's layers, all of whose weights are on the device."""

    def enter(self, layer: int) -> None:
        """Waits for the weights of ``layer``, before its first kernel."""

    def leave(self, layer: int) -> None:
        """Gives the memory of the weights of ``layer`` to another one, after its last kernel. Layers leave in their
        order."""

    def __enter__(self) -> LayerPass:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the passage."""


class LayerRing:
    """``sources[k]`` [bytes] uint8 in host memory has the weights of layer ``layers[k]``; they pass through
    ``buffers``, each of which is as large as the largest."""

    def __init__(self, layers: Sequence[int], sources: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor],
                 copies: CopyStream):
        self._sources, self._buffers, self._copies = list(sources), list(buffers), copies
        self._number_of = {layer: number for number, layer in enumerate(layers)}
        self._loading: dict[int, int] = {}  # the layers that are in buffers to be written, by buffer
        self._written: set[int] = set()  # the layers that have been written

    def buffer_of(self, layer: int) -> torch.Tensor:
        return self._buffers[self._number_of[layer] % len(self._buffers)]

    def start(self) -> LayerPass:
        """Starts a step: copies the first layers, after all that was launched before."""
        assert not self._loading, "loading ends before a step"
        return _RingPass(self._number_of, self._sources, self._buffers, self._copies)

    def bring(self, layer: int) -> None:
        """Brings a layer's weights to its buffer, to be written there until ``write_back``. No step is in flight."""
        number = self._number_of[layer]
        index = number % len(self._buffers)
        held = self._loading.get(index)
        if held == number:
            return
        if held is not None:
            self._write_back(index)
        if number in self._written:
            source = self._sources[number]
            self._buffers[index][:len(source)].copy_(source)
        self._loading[index] = number

    def write_back(self) -> None:
        """Writes the weights of all layers that were brought back to host memory."""
        for index in [*self._loading]:
            self._write_back(index)

    def _write_back(self, index: int) -> None:
        number = self._loading.pop(index)
        source = self._sources[number]
        source.copy_(self._buffers[index][:len(source)])
        self._written.add(number)

    def content_of(self, layer: int, parameter: torch.Tensor) -> torch.Tensor:
        """Returns what a parameter of ``layer`` holds, in host memory."""
        number = self._number_of[layer]
        index = number % len(self._buffers)
        memory = self._buffers[index] if self._loading.get(index) == number else self._sources[number]
        begin = parameter.data_ptr() - self._buffers[index].data_ptr()
        span = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride()))
        found = memory[begin:begin + span * parameter.itemsize].view(parameter.dtype).cpu()
        return found.as_strided(parameter.shape, parameter.stride()).clone()


class _RingPass(LayerPass):
    """The passage of one step."""

    def __init__(self, number_of: dict[int, int], sources: list[torch.Tensor], buffers: list[torch.Tensor],
                 copies: CopyStream):
        self._number_of, self._sources, self._buffers, self._copies = number_of, sources, buffers, copies
        self._queued = 0  # layers whose copies are queued
        copies.begin()
        for _ in range(min(len(buffers), len(sources))):
            self._queue()

    def _queue(self) -> None:
        index = self._queued % len(self._buffers)
        self._copies.copy(index, self._buffers[index], self._sources[self._queued])
        self._queued += 1

    def enter(self, layer: int) -> None:
        number = self._number_of.get(layer)
        if number is not None:
            assert number < self._queued, "layers are entered in their order"
            self._copies.wait_for_copy(number % len(self._buffers))

    def leave(self, layer: int) -> None:
        number = self._number_of.get(layer)
        if number is None or self._queued == len(self._sources):
            return
        assert self._queued == number + len(self._buffers), "layers leave in their order, each once"
        self._copies.wait_for_readers(number % len(self._buffers))
        self._queue()

    def __exit__(self, *error: object) -> None:
        self._copies.end()
