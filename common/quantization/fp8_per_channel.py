"""Per-channel and per-tensor float8: a weight scale for each output or projection, an activation scale for each token
or, static, for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...kernels.arguments import Float8Format, Float8Rows
from ...kernels.float8.fp8_scaled_matmul import compile_tiles, scaled_matmul
from ...kernels.rowwise.fp8_quantize import quantize
from ..api.errors import ConfigError
from ..weights.slots import Allocate, Slot
from .float8 import FLOAT8, FLOAT8_VALUES, INPUT_SCALE, WEIGHT_SCALE, quantize_channels, quantize_tensor
from .fp8 import Fp8
from .shards import Shard


class Fp8PerChannel:
    """Linear method of per-channel and per-tensor float8. ``scale`` [out] holds the scale of each output, whether its
    projection has one or each output its own.

    With one static activation scale and one weight scale, the GEMM takes two numbers (``scale`` [1]). Fused projections
    with static activation scales share the largest: what each of them was calibrated for fits within it.
    """

    def __init__(self, shards: Sequence[Shard], width: int, scheme: Fp8, allocate: Allocate):
        self.shards = shards
        self.scheme = scheme
        self._dtype = allocate.dtype
        out = sum(shard.size for shard in shards)
        if allocate.device.type == "cuda" and (out % 16 or width % 16):
            raise ConfigError(f"{shards[0].name} has {width} inputs and {out} outputs on each rank, and float8 "
                              "products take multiples of 16: choose another --tp-size, or leave --quantization out.")
        static = scheme.activations == "static"
        single = static and scheme.weights == "tensor" and len(shards) == 1
        self.weight = allocate(out, width, dtype=FLOAT8)
        self.scale = allocate(1 if single else out, dtype=torch.float32)
        self.input_scale = allocate(1, dtype=torch.float32) if static else None
        self._activation_format = Float8Format(width, self.input_scale)
        self._input_scales = allocate(len(shards), dtype=torch.float32) if static else None
        if allocate.device.type == "cuda":
            compile_tiles(out, width, allocate.dtype, allocate.device)

    def activation_format(self, rows: int) -> Float8Format | None:
        return self._activation_format

    def fused_activation(self) -> None:
        """Returns None: the layer that follows activates, as it quantizes its input anyway."""

    def deferred(self, x: torch.Tensor) -> None:
        """Returns None: no kernel adds the product to the residual."""

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        q = x if isinstance(x, Float8Rows) else quantize(x, self._activation_format, gated=gated)
        y = scaled_matmul(q.values, q.scale, self.weight, self.scale, q.dtype)
        return y if bias is None else y.add_(bias)

    def dequantize(self) -> torch.Tensor:
        return (self.weight.float() * self.scale[:, None]).to(self._dtype)

    def slots(self) -> Iterator[Slot]:
        for index, shard in enumerate(self.shards):
            slot = shard.slot(self.weight)
            scale = self.scale if self.scale.numel() == 1 else shard.rows_of(self.scale)
            if not self.scheme.stored:
                yield Slot(slot.name, slot.target, slot.shape, slot.dim, slot.start,
                           load=self._quantize_into(slot.target, scale))
                continue
            yield Slot(slot.name, slot.target, slot.shape, slot.dim, slot.start, FLOAT8_VALUES)
            yield self._scale_slot(shard, scale)
            if self._input_scales is not None:
                yield Slot(f"{shard.name}.{self.scheme.input_scale}", self._input_scales[index:index + 1], (),
                           kind=INPUT_SCALE, load=self._load_input_scale(index))

    def _scale_slot(self, shard: Shard, scale: torch.Tensor) -> Slot:
        name = f"{shard.name}.{self.scheme.weight_scale}"
        if self.scheme.weights == "tensor":
            return Slot(name, scale, (), kind=WEIGHT_SCALE, load=lambda part: scale.fill_(part.float().item()))
        # Where inputs are split over the ranks, each of them has all outputs.
        start = shard.start if shard.dim == 0 else 0
        return Slot(name, scale, shard.shape[:1], 0, start, WEIGHT_SCALE,
                    load=lambda part: scale.copy_(part.float().flatten()))

    def _quantize_into(self, target: torch.Tensor, scale: torch.Tensor) -> Callable[[torch.Tensor], None]:
        quantize = quantize_tensor if self.scheme.weights == "tensor" else quantize_channels

        def load(part: torch.Tensor) -> None:
            q, scales = quantize(part.to(target.device))
            target.copy_(q)
            scale.copy_(scales)

        return load

    def _load_input_scale(self, index: int) -> Callable[[torch.Tensor], None]:
        assert self.input_scale is not None and self._input_scales is not None
        scales, shared = self._input_scales, self.input_scale

        def load(part: torch.Tensor) -> None:
            # Right once all have been loaded; until then others may be those of the weights before.
            scales[index].fill_(part.float().item())
            shared.copy_(scales.max())

        return load
