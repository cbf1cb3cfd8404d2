"""Linear methods of bitsandbytes' weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...kernels.reference import TABLES, pack_ints, put_scales, scale_words
from ..api.errors import ConfigError
from ..weights.slots import PAIRS, Allocate, Slot, TensorKind
from .bitsandbytes import BLOCK, Kind
from .int8_linear import INT8_LARGEST, INT8_VALUES
from .packed_int_linear import PackedIntLinear, allocate_ints
from .shards import Shard

ABSMAX = TensorKind("blocks' largest magnitudes", dummy_value=0.05)
SCB = TensorKind("outputs' largest magnitudes", dummy_value=0.06)


def bnb_linear(shards: Sequence[Shard], width: int, kind: Kind, stored: bool, allocate: Allocate) -> PackedIntLinear:
    """Returns the linear method of a weight of 4 bits that index a table; ``stored`` in the checkpoint, or made while
    it is loaded."""
    if width % BLOCK:
        raise ConfigError(f"{shards[0].name} is quantized in blocks of {BLOCK} values, and a rank's share of "
                          f"{width} of its {shards[0].shape[1]} inputs cuts one: choose another --tp-size.")
    weight = allocate_ints(shards, width, 4, BLOCK, allocate)._replace(table=kind)

    def slots() -> Iterator[Slot]:
        for shard in shards:
            values, (out, full) = shard.rows_of(weight.values), shard.shape
            scales = weight.scales[:, shard.offset:shard.offset + shard.size].T
            start = shard.start // BLOCK if shard.dim == 1 else shard.start
            if not stored:
                yield Slot(f"{shard.name}.weight", values, shard.shape, shard.dim, shard.start,
                           load=_quantize_into(values, scales), size=width if shard.dim == 1 else shard.size)
                continue
            yield Slot(f"{shard.name}.weight", values, (out, full // 2), shard.dim,
                       shard.start // 2 if shard.dim == 1 else shard.start, PAIRS, _pack_into(values))
            yield Slot(f"{shard.name}.absmax", scales, (out, full // BLOCK), shard.dim, start, ABSMAX,
                       _scale_into(scales))

    return PackedIntLinear(weight, allocate.dtype, slots)


def _pack_into(target: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Packs bytes of two values, the first in the upper bits."""
    def load(part: torch.Tensor) -> None:
        part = part.to(target.device)
        target.copy_(pack_ints(torch.stack((part >> 4, part & 15), -1).flatten(1), 4, BLOCK))

    return load


def _quantize_into(values: torch.Tensor, scales: torch.Tensor) -> Callable[[torch.Tensor], object]:
    def load(part: torch.Tensor) -> None:
        codes, absmax = quantize_nf4(part.to(values.device))
        values.copy_(pack_ints(codes, 4, BLOCK))
        put_scales(scales, absmax)

    return load


def quantize_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``weight`` [out, in] to NF4, each value to the nearest one: ``(codes [out, in] uint8, absmax)``."""
    table = torch.tensor(TABLES["nf4"], device=weight.device)
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    absmax = blocks.abs().amax(-1)
    codes = torch.bucketize(blocks / absmax.clamp(min=1e-12)[..., None], (table[1:] + table[:-1]) / 2)
    return codes.to(torch.uint8).flatten(1), absmax


def bnb_int8_linear(shards: Sequence[Shard], width: int, allocate: Allocate) -> PackedIntLinear:
    """Returns the linear method of a packed integer weight whose slots take int8 weights and ``SCB``, the largest
    magnitude of each output."""
    weight = allocate_ints(shards, width, 8, width, allocate)

    def slots() -> Iterator[Slot]:
        for shard in shards:
            values, scales = shard.rows_of(weight.values), shard.rows_of(weight.scales[0])
            yield Slot(f"{shard.name}.weight", values, shard.shape, shard.dim, shard.start, INT8_VALUES,
                       _shift_into(values))
            yield Slot(f"{shard.name}.SCB", scales, shard.shape[:1], 0, shard.start if shard.dim == 0 else 0, SCB,
                       _shift_scale_into(scales))

    return PackedIntLinear(weight, allocate.dtype, slots)


def _shift_into(target: torch.Tensor) -> Callable[[torch.Tensor], object]:
    return lambda part: target.copy_((part.to(torch.int16) + 128).to(torch.uint8))


def _scale_into(target: torch.Tensor) -> Callable[[torch.Tensor], object]:
    return lambda part: put_scales(target, part)


def _shift_scale_into(target: torch.Tensor) -> Callable[[torch.Tensor], object]:
    return lambda part: target.copy_(scale_words(part.float() / INT8_LARGEST, 128))
