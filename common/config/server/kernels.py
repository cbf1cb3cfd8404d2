"""What computes on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..cli import flag


@dataclass(frozen=True)
class KernelArgs:
    attention_backend: Literal["auto", "torch", "triton", "flashinfer"] = flag("auto", help=(
        "auto is flashinfer on a GPU where installed, else triton; torch on a CPU"))
    decode_attention_backend: Literal["auto", "torch", "triton", "flashinfer"] = flag("auto", help=(
        "backend of decode steps; auto is triton on a GPU, which CUDA graphs need, else --attention-backend"))
    sampling_backend: Literal["auto", "torch", "triton"] = flag("auto", help=(
        "what draws tokens: auto is our kernels, which sort nothing, on a GPU where a trial draws as torch does"))
    disable_cuda_graph: bool = flag(False, help="launch a decode step's kernels one by one")
    disable_custom_all_reduce: bool = flag(False, help=(
        "leave small sums of a host's GPUs to NCCL, too, in place of writing them into each other's memory"))
    cuda_graph_max_bs: int = flag(256, help="largest decode batch that runs as a CUDA graph")
    disable_piecewise_cuda_graph: bool = flag(False, help=(
        "launch the kernels of prompts' steps one by one, also where the device waits for that"))
    piecewise_cuda_graph_max_tokens: int = flag(8192, help=(
        "largest step of prompts that may run as CUDA graphs, all but its attention"))
    piecewise_cuda_graph_tokens: tuple[int, ...] = flag((), help=(
        "tokens of such a step to capture, instead of those at which a trial finds that the device waits for the host"))
    cuda_graph_bs: tuple[int, ...] = flag((), help="decode batch sizes to capture, instead of a list up to the largest")
