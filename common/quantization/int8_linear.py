"""Linear method of int8 weights and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...kernels.arguments import Float8Rows, Int8Format
from ...kernels.int8.int8_matmul import compile_tiles, int8_matmul
from ...kernels.reference import INT8_LEAST
from ...kernels.rowwise.int8_quantize import quantize_int8
from ..api.errors import ConfigError
from ..weights.slots import Allocate, Slot, TensorKind
from .int8 import Int8
from .methods import SeparateProduct
from .shards import Shard

INT8_LARGEST = 127
_DUMMY_SCALE = 0.02 / 40
INT8_VALUES = TensorKind("int8", "I8", dummy_std=40.0, dummy_limit=INT8_LARGEST)
EITHER_VALUES = TensorKind("int8 or not quantized", refuses=("F8_E4M3", "F8_E5M2", "U8"))
"""With ``--quantization w8a8_int8``, where config.json says nothing of the checkpoint's format."""
SCALE = TensorKind("weight scale", keeps_ones=False, dummy_value=_DUMMY_SCALE)
INPUT_SCALE = TensorKind("input scale", keeps_ones=False, dummy_value=2.0**-4)
ZERO_POINT = TensorKind("zero point", keeps_ones=False, dummy_value=0.0)


def quantize_int8_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``[..., out, in]`` to int8 and a scale an output, ``[..., out]``."""
    wide = weight.float()
    scale = wide.abs().amax(-1).clamp(min=INT8_LEAST) / INT8_LARGEST
    return (wide / scale[..., None]).round().to(torch.int8), scale


class Int8Linear(SeparateProduct):
    """``scale`` [out] holds the scale of each output. Fused projections with static activation scales share one that
    covers what each of them was calibrated for. With zero points ``sums`` [out] are the sums of the dequantized
    weight's inputs."""

    def __init__(self, shards: Sequence[Shard], width: int, scheme: Int8, allocate: Allocate):
        self.shards, self.scheme, self._dtype = shards, scheme, allocate.dtype
        out = sum(shard.size for shard in shards)
        if allocate.device.type == "cuda":
            if width % 16:
                raise ConfigError(f"{shards[0].name} has {width} inputs on each rank, and products in int8 take "
                                  "multiples of 16: choose another --tp-size.")
            compile_tiles(out, width, allocate.dtype, allocate.device)
        self.weight = allocate(out, width, dtype=torch.int8)
        self.scale = allocate(out, dtype=torch.float32)
        self.sums = allocate(out, dtype=torch.float32) if scheme.asymmetric else None
        static = scheme.activations == "static"
        # Of each projection, a scale and a zero point.
        self._inputs = allocate(len(shards), 2, dtype=torch.float32) if static else None
        scale = allocate(1, dtype=torch.float32) if static else None
        shift = allocate(1, dtype=torch.float32) if static and scheme.asymmetric else None
        self._form = Int8Format(scheme.asymmetric, scale, shift)
        self._quantized_here: set[str] = set()
        self._stored: set[str] = set()
        self._scaled: set[str] = set()

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        y = int8_matmul(quantize_int8(x, self._form, gated=gated), self.weight, self.scale, self.sums)
        return y if bias is None else y.add_(bias)

    def dequantize(self) -> torch.Tensor:
        return (self.weight.float() * self.scale[:, None]).to(self._dtype)

    def slots(self) -> Iterator[Slot]:
        for index, shard in enumerate(self.shards):
            target, scale = shard.rows_of(self.weight), shard.rows_of(self.scale)
            stored = self.scheme.stored
            yield Slot(f"{shard.name}.weight", target, shard.shape, shard.dim, shard.start,
                       INT8_VALUES if stored else EITHER_VALUES, load=self._weight_into(shard, target, scale),
                       finish=self._finish)
            whole = self.scheme.weights == "tensor"
            yield Slot(f"{shard.name}.weight_scale", scale, () if whole else shard.shape[:1], 0,
                       0 if whole or shard.dim else shard.start, SCALE, load=self._scale_into(shard, scale),
                       finish=self._finish, optional=not stored)
            if self._inputs is not None:
                yield self._input_slot(shard, "input_scale", INPUT_SCALE, self._inputs[index, :1])
                if self.scheme.asymmetric:
                    yield self._input_slot(shard, "input_zero_point", ZERO_POINT, self._inputs[index, 1:])

    def _input_slot(self, shard: Shard, name: str, kind: TensorKind, target: torch.Tensor) -> Slot:
        return Slot(f"{shard.name}.{name}", target, (), kind=kind, finish=self._finish,
                    load=lambda part: target.fill_(part.float().item()))

    def _weight_into(self, shard: Shard, target: torch.Tensor, scale: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def load(part: torch.Tensor) -> None:
            if self.scheme.stored or part.dtype == torch.int8:
                self._stored.add(shard.name)
                self._quantized_here.discard(shard.name)
                target.copy_(part)
                return
            self._quantized_here.add(shard.name)
            for kept, made in zip((target, scale), quantize_int8_channels(part.to(target.device))):
                kept.copy_(made)

        return load

    def _scale_into(self, shard: Shard, target: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def load(part: torch.Tensor) -> None:
            self._scaled.add(shard.name)
            if shard.name not in self._quantized_here:  # which has the scales made for it
                target.copy_(part.float().flatten())

        return load

    def _finish(self) -> None:
        """Raises ConfigError where int8 weights came without their scales."""
        if lacking := self._stored - self._scaled:
            raise ConfigError(f"The checkpoint lacks {min(lacking)}.weight_scale, and the weight is int8: use a "
                              "checkpoint with scales.")
        if self.sums is not None:
            self.sums.copy_(self.weight.sum(1, dtype=torch.float32) * self.scale)
        if self._inputs is None or self._form.scale is None:
            return
        scale, zero = self._inputs.unbind(1)
        if self._form.shift is None:
            self._form.scale.copy_(scale.max())
            return
        low, high = ((-128 - zero) * scale).min(), ((127 - zero) * scale).max()
        self._form.scale.copy_((high - low) / 255)
        self._form.shift.copy_((-128 - (low / self._form.scale).round()) * self._form.scale)
