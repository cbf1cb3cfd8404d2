"""A decode server's engine rank."""

from __future__ import annotations

from ..common.engine.rank import EngineParts, run_rank
from ..common.engine.rank_spec import RankSpec
from ..kvtransfer.endpoint import transport_arguments
from ..kvtransfer.receiver.kv_receiver import KVReceiver
from .scheduler import DecodeScheduler


def main(spec: RankSpec) -> None:
    run_rank(spec, _make_scheduler)


def _make_scheduler(parts: EngineParts) -> DecodeScheduler:
    receiver = KVReceiver(**transport_arguments(parts))
    return DecodeScheduler(parts.make_unified_scheduler(), receiver, parts.agreeing,
                           scrubs_failed=parts.config.observe.enable_nan_detection)
