"""Dummy weights, for benchmarks without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..config.load_format import LOAD_FORMATS
from ..config.server import ModelArgs
from .lazy import LazyTensor
from .slots import Slot
from .source import SourceTensor, lacks


@LOAD_FORMATS.register("dummy")
class DummySource:
    """Norms of one, constant scales, all else normally distributed, by ``--random-seed`` and a tensor's name.

    Each tensor is generated whole on the device and then sliced, so that any number of ranks has the same model.
    """

    reads_checkpoint = False

    def __init__(self, args: ModelArgs):
        self._seed = args.random_seed
        self.name = f"dummy weights of seed {self._seed}"

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        for slot in slots:
            yield SourceTensor(slot.name, _DummyTensor(slot, self._seed), self.name)

    def find(self, name: str) -> LazyTensor:
        raise lacks(self, name)

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        return f"dummy {self._seed}".encode()


class _DummyTensor:
    """The dummy tensor of a slot, generated when it is sliced."""

    def __init__(self, slot: Slot, seed: int):
        self._slot, self._seed = slot, seed

    def get_shape(self) -> list[int]:
        return list(self._slot.shape)

    def get_dtype(self) -> str:
        return self._slot.kind.dtype or "F32"

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._generate()[key]

    def _generate(self) -> torch.Tensor:
        slot, device = self._slot, self._slot.target.device
        value = 1.0 if "norm" in slot.name else slot.kind.dummy_value
        if value is not None:
            return torch.full(slot.shape, value, device=device)
        generator = torch.Generator(device)
        # Hashed to 32 bits: of a wider seed, torch's CPU generator ignores the rest.
        generator.manual_seed(zlib.crc32(f"{self._seed}/{slot.name}".encode()))
        if slot.kind.dummy is not None:
            return slot.kind.dummy(slot.shape, generator)
        # Values that become one byte each are generated in float32.
        dtype = torch.float32 if slot.target.itemsize == 1 else slot.target.dtype
        values = torch.empty(slot.shape, dtype=dtype, device=device)
        values.normal_(0.0, slot.kind.dummy_std, generator=generator)
        limit = slot.kind.dummy_limit
        return values if limit is None else values.clamp_(-limit, limit)
