"""A decode server's engine rank."""

from __future__ import annotations

from ..common.engine.rank import EngineParts, run_rank
from ..common.engine.rank_spec import RankSpec
from ..common.engine.unified_scheduler import UnifiedScheduler
from ..kvtransfer.backends import make_backend
from ..kvtransfer.receiver.kv_receiver import KVReceiver
from .scheduler import DecodeScheduler


def main(spec: RankSpec) -> None:
    run_rank(spec, _make_scheduler)


def _make_scheduler(parts: EngineParts) -> DecodeScheduler:
    config, runner, tp = parts.config, parts.runner, parts.tp
    args = config.disaggregation
    receiver = KVReceiver(
        args=args, host=config.http.host, rank=tp.rank, tp_size=tp.size,
        dp_rank=parts.parallel.dp_rank, dp_size=parts.parallel.dp_size, layout=runner.layout,
        model=runner.model, server=config.http.shown_url, spare_page=runner.spare_page,
        num_pages=runner.pool.num_pages, regions=runner.pool.regions(),
        backend=make_backend(args.disaggregation_transfer_backend, config.http.host, args.disaggregation_ib_device))
    unified = UnifiedScheduler(parts.batcher, parts.executor, parts.tracker, overlap=parts.overlap)
    return DecodeScheduler(unified, receiver, tp)
