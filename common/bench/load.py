"""``bench_load``: how long a checkpoint's weights take to load, by phase, without a server."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ..api.errors import ConfigError
from ..config.cli import parse
from ..config.load_format import LOAD_FORMATS
from ..config.server import CacheArgs, ScheduleArgs, ServerConfig
from ..config.server.sglang_flags import SGLANG_FLAGS
from ..distributed.parallel import Parallel
from ..distributed.tp import TPGroup
from ..models.registry import build_model, load_model_spec, tensor_parts
from ..runner.kv_sizing import resolve_dtype
from ..weights.filling import FillTimes
from ..weights.fingerprint import identify
from ..weights.lazy import DTYPES
from ..weights.loader import load_weights, silent
from ..weights.source import open_weights
from .command import reported
from .load_args import BenchLoad
from .report.report import append_line, check_writable

T = TypeVar("T")
_GB = 1e9
_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(BenchLoad, argv, foreign=SGLANG_FLAGS, prog="bench_load", description=(
        "Measure how long a checkpoint's weights take to load, by phase, without a server."))
    sys.exit(reported("bench_load", lambda: run(config)))


@dataclass(frozen=True)
class Figures:
    """Seconds of one load. ``read_s`` and ``copy_s`` are those of all threads together: reading slices from the source,
    and converting and copying them. ``rank_bytes`` is what the rank's weights take, ``checkpoint_bytes`` what the
    checkpoint's tensors do."""

    describe_s: float
    build_s: float
    load_s: float
    read_s: float
    copy_s: float
    fingerprint_s: float
    checkpoint_bytes: int
    rank_bytes: int

    @property
    def rate(self) -> float:
        """Bytes of the rank's weights a second of loading."""
        return self.rank_bytes / self.load_s


def run(config: BenchLoad) -> int:
    check_writable(config.load.output_file, "--output-file")
    device = _device(config)
    print(f"{config.model.model_path} on {device}, --load-format {config.model.load_format}, rank {config.load.rank} "
          f"of {config.load.tp_size}")
    print(f"{'load':>6}{'describe s':>12}{'build s':>9}{'load s':>9}{'read s':>9}{'copy s':>9}{'fingerpr. s':>13}"
          f"{'checkpoint GB':>15}{'rank GB':>10}{'GB/s':>8}", flush=True)
    for number in range(config.load.repeat):
        if config.load.drop_cache:
            _drop_cache(Path(config.model.model_path).expanduser())
        figures = measure(config, device)
        print(f"{number + 1:>6}{figures.describe_s:>12.2f}{figures.build_s:>9.2f}{figures.load_s:>9.2f}"
              f"{figures.read_s:>9.2f}{figures.copy_s:>9.2f}{figures.fingerprint_s:>13.2f}"
              f"{figures.checkpoint_bytes / _GB:>15.3f}{figures.rank_bytes / _GB:>10.3f}{figures.rate / _GB:>8.2f}",
              flush=True)
        if config.load.output_file is not None:
            append_line(config.load.output_file, {
                "model_path": config.model.model_path, "load_format": config.model.load_format, "device": str(device),
                "tp_size": config.load.tp_size, "rank": config.load.rank, **asdict(figures),
                "gb_per_s": figures.rate / _GB})
    return 0


@torch.no_grad()
def measure(config: BenchLoad, device: torch.device) -> Figures:
    """Loads the rank's share once, as a server does; raises ConfigError."""
    args = config.model
    describe_s, spec = _timed(lambda: load_model_spec(args), device)
    tp = TPGroup(config.load.rank, config.load.tp_size, device=device)
    spec.check_tp(tp.size)
    dtype = getattr(torch, resolve_dtype(ServerConfig(args, CacheArgs(), ScheduleArgs()), spec, device))
    build_s, model = _timed(lambda: build_model(spec, Parallel(tp), dtype, device), device)
    slots = [*model.slots()]
    threads = args.copy_threads if LOAD_FORMATS.get(args.load_format).reads_checkpoint else 1
    times = FillTimes()
    load_s, _ = _timed(lambda: load_weights(
        open_weights(args), slots, silent, tied=spec.tie_word_embeddings, unused=spec.unused_names,
        parts=tensor_parts(spec), num_threads=threads, times=times), device)
    fingerprint_s, _ = _timed(lambda: identify(args, spec), device)
    return Figures(describe_s, build_s, load_s, times.read_s, times.copy_s, fingerprint_s,
                   sum(math.prod(tensor.get_shape()) * _BYTES[tensor.get_dtype()]
                       for _, tensor, _ in open_weights(args).tensors(slots)),
                   sum(slot.target.nbytes for slot in slots))


def _timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    begin = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, result


def _device(config: BenchLoad) -> torch.device:
    if config.model.from_instance:
        raise ConfigError("bench_load measures checkpoints: leave --load-format remote_instance out.")
    if config.model.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", config.model.base_gpu_id)


def _drop_cache(path: Path) -> None:
    """Lets the system drop the pages of a checkpoint's files; nothing where it is on the hub."""
    for file in (path,) if path.is_file() else sorted(path.iterdir()) if path.is_dir() else ():
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
