"""Facts of a GPU that kernels are chosen by."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

_INTERPRETER_SMS = 8
"""SMs that plans count with on a CPU, under Triton's interpreter."""
_HOPPER_SHARED_BYTES = 227 << 10
"""Shared memory of one program that is assumed on a CPU."""


@dataclass(frozen=True)
class DeviceFacts:
    """``name`` is torch's. ``shared_bytes`` is the most shared memory that one program can have, ``runs_triton`` and
    ``runs_gluon`` say which kernels run at all."""

    name: str
    num_sms: int
    shared_bytes: int
    runs_triton: bool
    runs_gluon: bool
    is_hopper: bool


@functools.cache
def num_sms(device: torch.device) -> int:
    """The SMs of a GPU; what the interpreter plans for on a CPU."""
    if device.type != "cuda":
        return _INTERPRETER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """The most shared memory that one program of a GPU can have."""
    if device.type != "cuda":
        return _HOPPER_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return (device.type == "cuda" and torch.version.cuda is not None
            and torch.cuda.get_device_capability(device) == (9, 0))


@functools.cache
def device_name(device: torch.device) -> str:
    """Torch's name of a GPU, ``cpu`` of a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def device_slug(name: str) -> str:
    """A device's name as its tuning file has it."""
    return name.replace(" ", "_")
