"""``bench_offline_throughput`` over ``baton.Engine``, which stands above all folders."""

from __future__ import annotations

from collections.abc import Sequence

from .common.bench import offline_throughput
from .common.bench.offline_args import BenchOffline
from .offline import Engine


def bench_offline_throughput(argv: Sequence[str] | None = None) -> None:
    """Console script."""
    offline_throughput.main(_engine, argv)


def _engine(config: BenchOffline) -> Engine:
    if not config.offline.pair:
        return Engine(**config.engine_flags)
    gpu = config.offline.decode_base_gpu_id
    return Engine(**config.engine_flags, prefill={}, decode={} if gpu is None else {"base_gpu_id": gpu})


if __name__ == "__main__":
    bench_offline_throughput()
