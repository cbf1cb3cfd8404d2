"""Copies from host memory to the device, beside the computation and in step with it."""

from __future__ import annotations

from typing import Protocol

import torch


class CopyStream(Protocol):
    """Copies into numbered buffers, which kernels of the current stream read. All calls are also valid while the
    current stream is captured into a CUDA graph, which then has the copies as nodes of its own."""

    def begin(self) -> None:
        """Lets the copies that follow wait for all work of the current stream."""

    def copy(self, number: int, buffer: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy of ``source`` to the beginning of ``buffer``, after all earlier copies."""

    def wait_for_copy(self, number: int) -> None:
        """Lets the current stream wait for the last copy to this buffer."""

    def wait_for_readers(self, number: int) -> None:
        """Lets the copies that follow wait for the kernels so far, which have read this buffer."""

    def end(self) -> None:
        """Lets the current stream wait for all copies."""


class CudaCopies:
    """Copies of a CUDA device on a stream of their own; sources are pinned."""

    def __init__(self, device: torch.device, num_buffers: int):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied = [torch.cuda.Event() for _ in range(num_buffers)]
        self._read = [torch.cuda.Event() for _ in range(num_buffers)]

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, number: int, buffer: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            buffer[:len(source)].copy_(source, non_blocking=True)
            self._copied[number].record(self._stream)

    def wait_for_copy(self, number: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied[number])

    def wait_for_readers(self, number: int) -> None:
        self._read[number].record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._read[number])

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class HostCopies:
    """Copies of an engine on a CPU, done at once."""

    def begin(self) -> None:
        """Does nothing: all work is done."""

    def copy(self, number: int, buffer: torch.Tensor, source: torch.Tensor) -> None:
        buffer[:len(source)].copy_(source)

    def wait_for_copy(self, number: int) -> None:
        """Does nothing: the copy is done."""

    def wait_for_readers(self, number: int) -> None:
        """Does nothing: they are done."""

    def end(self) -> None:
        """Does nothing: the copies are done."""


def copy_stream(device: torch.device, num_buffers: int) -> CopyStream:
    """Returns the copies of a device."""
    return CudaCopies(device, num_buffers) if device.type == "cuda" else HostCopies()
