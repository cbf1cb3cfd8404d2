"""Settings of ``bench_load``."""

from __future__ import annotations

from dataclasses import dataclass

from ..api.errors import ConfigError
from ..config.cli import flag
from ..config.server import ModelArgs


@dataclass(frozen=True)
class LoadArgs:
    tp_size: int = flag(1, names=("--tp",), help="ranks of the server: one of them loads its share")
    rank: int = flag(0, help="the rank that loads, 0 to --tp-size - 1")
    repeat: int = flag(2, help="timed loads; the first one also finds what the system's page cache has")
    drop_cache: bool = flag(False, help=(
        "let the system drop the files' pages before each load, so that they are read from the disk"))
    output_file: str | None = flag(None, help="append settings and figures to this file, a JSON object a load")

    def __post_init__(self) -> None:
        if self.tp_size < 1 or not 0 <= self.rank < self.tp_size:
            raise ConfigError(f"--rank {self.rank} must be between 0 and --tp-size - 1.")
        if self.repeat < 1:
            raise ConfigError(f"--repeat must be 1 or more, not {self.repeat}.")


@dataclass(frozen=True)
class BenchLoad:
    load: LoadArgs
    model: ModelArgs
