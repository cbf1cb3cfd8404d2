"""A prefill server's engine rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..common.engine.rank import EngineParts, run_rank
from ..common.engine.rank_spec import RankSpec
from ..common.engine.unified_scheduler import UnifiedScheduler
from ..kvtransfer.bootstrap import register_rank
from ..kvtransfer.endpoint import transport_arguments
from ..kvtransfer.sender.kv_sender import KVSender
from .prompt_transfers import PromptTransfers
from .scheduler import PrefillScheduler


def main(spec: RankSpec) -> None:
    run_rank(spec, _make_scheduler)


def _make_scheduler(parts: EngineParts) -> PrefillScheduler:
    scheduler = PrefillScheduler(parts.batcher, parts.executor, parts.tracker, overlap=parts.overlap,
                                 **_transfer_arguments(parts))
    scheduler.prompts.register()
    return scheduler


def make_part(parts: EngineParts, unified: UnifiedScheduler) -> PromptTransfers:
    """The prompts that an engine of all roles computes for others, in the steps of its unified scheduler."""
    return PromptTransfers(parts.batcher, parts.tracker, event=lambda: parts.executor.event(),
                           synchronize=unified.synchronize, **_transfer_arguments(parts))


def _transfer_arguments(parts: EngineParts) -> dict[str, Any]:
    """Arguments of a prefill scheduler, and of PromptTransfers."""
    config, pp = parts.config, parts.parallel.pp
    args = config.disaggregation
    host = config.nodes.first_host or config.http.host
    draft_pool = parts.runner.draft_pool
    return {
        "sender": KVSender(**transport_arguments(parts), pp_rank=pp.rank, pp_size=pp.size), "group": parts.agreeing,
        "layer_groups": [len(pool.layout.groups) for pool in parts.runner.pools],
        "draft_groups": 0 if draft_pool is None else len(draft_pool.groups),
        "kv_retain_seconds": args.kv_retain_seconds, "transfer_overlap": args.kv_transfer_overlap,
        "register": partial(register_rank, f"http://{host}:{args.disaggregation_bootstrap_port}",
                            secret=args.cluster_secret)}
