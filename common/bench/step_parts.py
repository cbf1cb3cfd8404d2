"""The parts of a step's time: attention, GEMM, norm, sampling, the host.

On a GPU the part follows from the kernel's name: a CUDA graph records nothing else of it. On a CPU it follows from the
file of the innermost Python call.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # exported without __all__
from torch.profiler import ProfilerActivity, profile

PARTS = ("attention", "GEMM", "norm", "sampling", "other", "host")

_KERNELS = (
    ("attention", r"attn|attention|flash|fmha|paged_(de|pre)|decode_warp|mla_|BatchDecode|BatchPrefill|merge_splits"
                  r"|plan_decode|rope_and_store|scale_by_sinks|MergeState|merge_state"),
    ("norm", r"rms_?norm|layer_?norm"),
    ("GEMM", r"gemm|gemv|matmul|split_k|warp_specialized|cutlass|cublas|nvjet|xmma|splitK|moe_|_quantize_kernel|fp8"),
    ("sampling", r"argmax|ArgMax|_sample_|_truncate_|softmax|SoftMax|sort|Sort|topk|TopK|cumsum|scan|exponential"
                 r"|distribution|multinomial|MaxOps|penalt|bitmask"),
)
"""Patterns of kernel names, tried in order. A kernel that matches none is "other": embedding, activation, copies."""

_FILES = (
    ("attention", ("common/attention/", "kernels/attention/")),
    ("norm", ("common/layers/norm.py",)),
    ("GEMM", ("common/layers/linear.py", "common/layers/vocab.py", "common/layers/moe", "common/quantization/",
              "kernels/gemm/", "kernels/float8/", "kernels/moe/")),
    ("sampling", ("common/sampling/",)),
    ("other", ("common/layers/", "common/models/")),
)


def of_kernel(name: str) -> str:
    return next((part for part, pattern in _KERNELS if re.search(pattern, name)), "other")


def of_frame(name: str) -> str | None:
    """The part of a Python call, which the profiler names ``path(line): function``; None outside of all parts."""
    return next((part for part, paths in _FILES if any(path in name for path in paths)), None)


def recorder(device: torch.device, activities: Iterable[str] | None = None) -> profile:
    """A profiler that records what ``milliseconds`` needs, or the given ``activities`` (CPU, GPU)."""
    if device.type == "cpu":  # a torch built for CUDA logs that it finds no GPU, and from 2.15 on each start and stop
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    kinds = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
    if activities is not None:
        wanted = [kinds[name] for name in activities if name == "CPU" or device.type == "cuda"]
        return profile(activities=wanted or [ProfilerActivity.CPU], with_stack=device.type == "cpu")
    if device.type == "cuda":
        return profile(activities=[ProfilerActivity.CUDA])
    return profile(activities=[ProfilerActivity.CPU], with_stack=True)


def milliseconds(recorded: profile, device: torch.device, step_ms: float, steps: int) -> dict[str, float]:
    """A step's milliseconds by part; ``step_ms`` is its time without the profiler.

    On a GPU the kernels' times, without the host's, which overlap them. On a CPU shares of the recorded time,
    for recording slows each call.
    """
    spent = dict.fromkeys(PARTS, 0.0)
    if device.type == "cuda":
        kernels = [(event.time_range.start, event.time_range.end, event.name) for event in recorded.events() or ()
                   if event.device_type == DeviceType.CUDA]
        for name, micros in advances(kernels):
            spent[of_kernel(name)] += micros / steps / 1e3
        del spent["host"]
        return spent
    for found in recorded.events() or ():
        spent[_part_of(found)] += found.self_cpu_time_total
    total = sum(spent.values()) or 1.0
    return {part: step_ms * value / total for part, value in spent.items()}


def advances(kernels: Iterable[tuple[float, float, str]]) -> Iterator[tuple[str, float]]:
    """By how much each of the kernels ``(start, end, name)`` moved the end of what is done.

    A kernel that starts before the one ahead has ended (programmatic dependent launch) waits for it first: that time
    is not its own.
    """
    done = float("-inf")
    for start, end, name in sorted(kernels, key=lambda kernel: kernel[1]):
        yield name, end - max(start, done)
        done = max(done, end)


def _part_of(event: Any) -> str:
    """By the innermost call that belongs to one."""
    while event is not None:
        if part := of_frame(event.name):
            return part
        event = event.cpu_parent
    return "host"
