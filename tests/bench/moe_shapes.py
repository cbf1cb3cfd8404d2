"""Layers with experts as published models have them, random, and the time that a piece of work on a device takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...kernels.arguments import ExpertBiases, Scales
from .device_time import captured, run_seconds


@dataclass(frozen=True)
class Shape:
    """One rank's part of a layer. With a ``gate_limit`` it has gpt-oss's gate and biases."""

    hidden: int
    experts: int
    top_k: int
    size: int
    gate_limit: float = 0.0

    @property
    def expert_bytes(self) -> int:
        """Of one expert's matrices in 16 bits."""
        return 3 * 2 * self.hidden * self.size

    def flops(self, tokens: int) -> int:
        return 6 * tokens * self.top_k * self.hidden * self.size


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 128, 8, 768),
    "qwen3-30b-a3b-tp2": Shape(2048, 128, 8, 384),
    "mixtral-8x7b": Shape(4096, 8, 2, 14336),
    "mixtral-8x7b-tp2": Shape(4096, 8, 2, 7168),
    "deepseek-v2-lite": Shape(2048, 64, 6, 1408),
    "deepseek-v3-ep8": Shape(7168, 32, 8, 2048),
    "gpt-oss-20b": Shape(2880, 32, 4, 2880, 7.0),
    "tiny": Shape(64, 8, 2, 64),  # for a look at these scripts on a CPU, under Triton's interpreter
}


class Layer:
    """Random experts, and random choices of tokens. Float8 experts are scaled by blocks, and their tokens bfloat16."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str):
        self.shape = shape
        self.device = device
        self.dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
        self.gate_up = self._random(shape.experts, 2 * shape.size, shape.hidden, dtype=dtype)
        self.down = self._random(shape.experts, shape.hidden, shape.size, dtype=dtype)
        self.biases: ExpertBiases | None = None
        if shape.gate_limit:
            self.biases = ExpertBiases(self._random(shape.experts, 2 * shape.size, dtype=self.dtype),
                                       self._random(shape.experts, shape.hidden, dtype=self.dtype))
        self.scales: Scales | None = None
        if dtype.itemsize == 1:
            self.scales = Scales(*(torch.ones(len(w), *(-(-n // 128) for n in w.shape[1:]), device=device)
                                   for w in (self.gate_up, self.down)), "block")

    def _random(self, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(sizes, device=self.device, dtype=torch.float32 if dtype.itemsize > 2 else torch.bfloat16)
                * 0.02).to(dtype)

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(x, places, weights)``: ``top_k`` different experts a token, all equally likely."""
        x = self._random(count, self.shape.hidden, dtype=self.dtype) * 50
        places = torch.rand(count, self.shape.experts, device=self.device).topk(self.shape.top_k).indices
        return x, places, torch.full(places.shape, 1 / self.shape.top_k, device=self.device)


def micros(work: Callable[[], object], repeats: int = 5) -> float:
    """Median microseconds of ``work``; on a GPU as a CUDA graph, so that launches cost what they cost in decode."""
    if not torch.cuda.is_available():
        work()
        begin = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - begin)
    replay = captured(work)
    replay()
    return 1e6 * statistics.median(run_seconds(replay, repeats))
