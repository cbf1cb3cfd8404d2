"""The bench commands. They import what they measure when they are called: it needs the engine's install."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .common.config.command import command

if TYPE_CHECKING:
    from .common.bench.offline_args import BenchOffline
    from .offline import Engine


@command("bench_calibrate")
def bench_calibrate(argv: Sequence[str] | None = None) -> None:
    from .simulate.calibrate import command as calibrate

    calibrate.main(argv)


@command("bench_offline_throughput")
def bench_offline_throughput(argv: Sequence[str] | None = None) -> None:
    """Run ``baton.Engine`` over a data set; the engine is passed in, because common/ may not import it."""
    from .common.bench import offline_throughput

    offline_throughput.main(_engine, argv)


@command("bench_one_batch")
def bench_one_batch(argv: Sequence[str] | None = None) -> None:
    from .common.bench import one_batch

    one_batch.main(argv)


@command("bench_one_batch_server")
def bench_one_batch_server(argv: Sequence[str] | None = None) -> None:
    from .common.bench import one_batch_server

    one_batch_server.main(argv)


@command("bench_draft_acceptance")
def bench_draft_acceptance(argv: Sequence[str] | None = None) -> None:
    from .common.bench import draft_acceptance

    draft_acceptance.main(argv)


@command("bench_deterministic")
def bench_deterministic(argv: Sequence[str] | None = None) -> None:
    from .common.bench import deterministic

    deterministic.main(argv)


@command("bench_eval")
def bench_eval(argv: Sequence[str] | None = None) -> None:
    from .common.bench import evaluation

    evaluation.main(argv)


@command("bench_load")
def bench_load(argv: Sequence[str] | None = None) -> None:
    from .common.bench import load

    load.main(argv)


@command("bench_kvtransfer")
def bench_kvtransfer(argv: Sequence[str] | None = None) -> None:
    from .kvtransfer.bench import run

    run.main(argv)


@command("bench_serving")
def bench_serving(argv: Sequence[str] | None = None) -> None:
    from .common.bench import serving

    serving.main(argv)


def _engine(config: BenchOffline) -> Engine:
    from .offline import Engine

    if not config.offline.pair:
        return Engine(**config.engine_flags)
    gpu = config.offline.decode_base_gpu_id
    return Engine(**config.engine_flags, prefill={}, decode={} if gpu is None else {"base_gpu_id": gpu})
