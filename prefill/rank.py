"""A prefill server's engine rank."""

from __future__ import annotations

from functools import partial

from ..common.engine.rank import EngineParts, run_rank
from ..common.engine.rank_spec import RankSpec
from ..kvtransfer.bootstrap import register_rank
from ..kvtransfer.endpoint import transport_arguments
from ..kvtransfer.sender.kv_sender import KVSender
from .scheduler import PrefillScheduler


def main(spec: RankSpec) -> None:
    run_rank(spec, _make_scheduler)


def _make_scheduler(parts: EngineParts) -> PrefillScheduler:
    config, pp = parts.config, parts.parallel.pp
    args = config.disaggregation
    sender = KVSender(**transport_arguments(parts), pp_rank=pp.rank, pp_size=pp.size)
    host = config.nodes.first_host or config.http.host
    register = partial(register_rank, f"http://{host}:{args.disaggregation_bootstrap_port}",
                       secret=args.cluster_secret)
    register(sender.info)
    draft_pool = parts.runner.draft_pool
    return PrefillScheduler(parts.batcher, parts.executor, parts.tracker, sender, parts.agreeing,
                            [len(pool.layout.groups) for pool in parts.runner.pools], overlap=parts.overlap,
                            kv_retain_seconds=args.kv_retain_seconds,
                            transfer_overlap=args.kv_transfer_overlap, register=register,
                            draft_groups=0 if draft_pool is None else len(draft_pool.groups))
