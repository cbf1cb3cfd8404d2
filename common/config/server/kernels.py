"""Flags of kernels, attention backends and CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...api.errors import ConfigError
from ...registry import Choices, Registry
from ..cli import flag

if TYPE_CHECKING:
    from ...attention.base import AttentionFactory
    from ...attention.mla.base import LatentFactory
    from ...sampling.sampling_backend import SamplingFactory

ATTENTION_BACKENDS: Registry[AttentionFactory] = Registry("attention backend", "baton.common.attention")
LATENT_BACKENDS: Registry[LatentFactory] = Registry("backend of multi-head latent attention",
                                                    "baton.common.attention.mla")
SAMPLING_BACKENDS: Registry[SamplingFactory] = Registry("sampling backend", "baton.common.sampling")
ATTENTION_CHOICES = Choices.of(ATTENTION_BACKENDS, LATENT_BACKENDS, others=("auto",))
SAMPLING_CHOICES = Choices.of(SAMPLING_BACKENDS, others=("auto",))


@dataclass(frozen=True)
class KernelArgs:
    attention_backend: str = flag("auto", choices=ATTENTION_CHOICES, help=(
        "auto is flashinfer on a GPU where it is installed and supports the model, else triton; torch on a CPU"))
    decode_attention_backend: str = flag("auto", choices=ATTENTION_CHOICES, help=(
        "backend of decode steps; auto is triton on a GPU, else that of --attention-backend"))
    sampling_backend: str = flag("auto", choices=SAMPLING_CHOICES, help=(
        "triton samples by kernels that sort nothing; auto is triton on a GPU where a trial gives torch's tokens"))
    disable_cuda_graph: bool = flag(False, help="launch a decode step's kernels one by one")
    disable_custom_all_reduce: bool = flag(False, help=(
        "use NCCL for all all-reduces of a host's GPUs, instead of writing small ones into peer memory"))
    cuda_graph_max_bs: int = flag(256, help="largest decode batch that runs as a CUDA graph")
    disable_piecewise_cuda_graph: bool = flag(False, help="launch the kernels of prefill steps one by one")
    piecewise_cuda_graph_max_tokens: int = flag(8192, help=(
        "largest prefill step that may run as piecewise CUDA graphs (all but its attention)"))
    piecewise_cuda_graph_tokens: tuple[int, ...] = flag((), help=(
        "sizes in tokens to capture, instead of those at which a trial finds that the device waits for the host"))
    cuda_graph_bs: tuple[int, ...] = flag((), help=(
        "decode batch sizes to capture, instead of a list up to --cuda-graph-max-bs"))

    def __post_init__(self) -> None:
        for name in ("cuda_graph_bs", "piecewise_cuda_graph_tokens"):
            least = min(getattr(self, name), default=1)
            if least < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {least}.")
