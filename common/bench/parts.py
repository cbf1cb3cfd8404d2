"""Where a step's time goes: attention, GEMM, norm, sampling, the host.

On a GPU kernels tell by their names what they are part of; they are all that tells it, for a CUDA graph has no other
record of them. On a CPU, where every operation is a call below its part's code, the call's file tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PARTS = ("attention", "GEMM", "norm", "sampling", "other", "host")

_KERNELS = (
    ("attention", r"attn|attention|flash|fmha|paged_(de|pre)|mla_|BatchDecode|BatchPrefill|join_(splits|pieces)|plan_decode|rope_and_store"
                  r"|MergeState|merge_state"),
    ("norm", r"rms_?norm|layer_?norm"),
    ("GEMM", r"gemm|gemv|matmul|cutlass|cublas|nvjet|xmma|splitK|moe_|_quantize_kernel|fp8"),
    ("sampling", r"argmax|ArgMax|softmax|SoftMax|sort|Sort|topk|TopK|cumsum|scan|exponential|distribution|multinomial"
                 r"|MaxOps|penalt|bitmask|greatest|_truncate_kernel|_draw_kernel"),
)
"""The first that matches; what none does is other: embedding, activation, copies."""

_FILES = (
    ("attention", ("common/attention/", "kernels/rope_and_store.py", "kernels/mla_")),
    ("norm", ("common/layers/norm.py",)),
    ("GEMM", ("common/layers/linear.py", "common/layers/vocab.py", "common/layers/moe", "common/quantization/",
              "kernels/moe_")),
    ("sampling", ("common/engine/sampler.py", "common/engine/penalties.py", "common/engine/noise.py")),
    ("other", ("common/layers/", "common/models/")),
)


def of_kernel(name: str) -> str:
    return next((part for part, pattern in _KERNELS if re.search(pattern, name)), "other")


def of_frame(name: str) -> str | None:
    """Of a Python call by the name that the profiler gives it, ``path(line): function``; None where it is of none."""
    return next((part for part, paths in _FILES if any(path in name for path in paths)), None)


def recorder(device: torch.device, activities: Iterable[str] | None = None) -> profile:
    """Records what ``milliseconds`` needs; with ``activities`` (CPU, GPU) what a reader of the trace wants."""
    kinds = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
    if activities is not None:
        wanted = [kinds[name] for name in activities if name == "CPU" or device.type == "cuda"]
        return profile(activities=wanted or [ProfilerActivity.CPU], with_stack=device.type == "cpu")
    if device.type == "cuda":
        return profile(activities=[ProfilerActivity.CUDA])
    return profile(activities=[ProfilerActivity.CPU], with_stack=True)


def milliseconds(recorded: profile, device: torch.device, step_ms: float, steps: int) -> dict[str, float]:
    """A step's milliseconds by part; ``step_ms`` is what it takes when nobody watches.

    On a GPU the kernels' own times, without the host's (which runs beside them). On a CPU shares of the recorded time,
    for recording slows each call.
    """
    spent = dict.fromkeys(PARTS, 0.0)
    if device.type == "cuda":
        for event in recorded.key_averages():
            if event.device_type == DeviceType.CUDA:  # an operation on the host tells its kernels' time once more
                spent[of_kernel(event.key)] += event.self_device_time_total / steps / 1e3
        del spent["host"]
        return spent
    for found in recorded.events() or ():
        spent[_part_of(found)] += found.self_cpu_time_total
    total = sum(spent.values()) or 1.0
    return {part: step_ms * value / total for part, value in spent.items()}


def _part_of(event: Any) -> str:
    """By the innermost call that belongs to one."""
    while event is not None:
        if part := of_frame(event.name):
            return part
        event = event.cpu_parent
    return "host"
