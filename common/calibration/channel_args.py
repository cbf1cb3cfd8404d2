"""Settings of ``calibrate_double_sparsity``."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.cli import flag
from ..config.rules import at_least
from ..config.server import CacheArgs, KernelArgs, ModelArgs, OffloadArgs, ScheduleArgs, ServerConfig


@dataclass(frozen=True)
class CalibrationArgs:
    text_file: str = flag(required=True, help="text in UTF-8, of the kind that the server will see")
    output_file: str = flag(required=True, help="the JSON file to write, for --ds-channel-config-path")
    num_samples: int = flag(256, help="most blocks of the text that the model reads")
    block_size: int = flag(512, help="tokens of a block; the last one may have fewer")

    def __post_init__(self) -> None:
        at_least(self, 1, "num_samples", "block_size")


@dataclass(frozen=True)
class CalibrateDoubleSparsity:
    calibration: CalibrationArgs
    model: ModelArgs
    kernels: KernelArgs
    offload: OffloadArgs

    @property
    def server(self) -> ServerConfig:
        """The configuration under which the model is loaded."""
        return ServerConfig(self.model, CacheArgs(), ScheduleArgs(), kernels=self.kernels, offload=self.offload)
