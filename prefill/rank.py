"""A prefill server's engine rank."""

from __future__ import annotations

from functools import partial

from ..common.engine.rank import EngineParts, run_rank
from ..common.engine.rank_spec import RankSpec
from ..kvtransfer.backends import make_backend
from ..kvtransfer.bootstrap import register_rank
from ..kvtransfer.sender.kv_sender import KVSender
from .scheduler import PrefillScheduler


def main(spec: RankSpec) -> None:
    run_rank(spec, _make_scheduler)


def _make_scheduler(parts: EngineParts) -> PrefillScheduler:
    config, runner, tp = parts.config, parts.runner, parts.tp
    args = config.disaggregation
    sender = KVSender(
        args=args, host=config.http.host, rank=tp.rank, tp_size=tp.size,
        dp_rank=parts.parallel.dp_rank, dp_size=parts.parallel.dp_size, layout=runner.layout,
        pp_rank=parts.parallel.stages.index, pp_size=parts.parallel.stages.size,
        model=runner.model, server=config.http.shown_url, spare_page=runner.spare_page,
        num_pages=runner.pool.num_pages, regions=runner.pool.regions(),
        backend=make_backend(args.disaggregation_transfer_backend, config.http.host, args.disaggregation_ib_device))
    host = config.nodes.first_host or config.http.host
    register = partial(register_rank, f"http://{host}:{args.disaggregation_bootstrap_port}",
                       secret=args.cluster_secret)
    register(sender.info)
    return PrefillScheduler(parts.batcher, parts.executor, parts.tracker, sender, parts.agreeing,
                            len(runner.layout.groups), overlap=parts.overlap, kv_retain_seconds=args.kv_retain_seconds,
                            transfer_overlap=args.kv_transfer_overlap, register=register)
