"""A decode server's engine rank."""

from __future__ import annotations

from ..common.engine.rank import EngineParts, run_rank
from ..common.engine.rank_spec import RankSpec
from ..common.engine.unified_scheduler import UnifiedScheduler
from ..kvtransfer.endpoint import transport_arguments
from ..kvtransfer.receiver.kv_receiver import KVReceiver
from .scheduler import DecodeScheduler


def main(spec: RankSpec) -> None:
    run_rank(spec, _make_scheduler)


def _make_scheduler(parts: EngineParts) -> DecodeScheduler:
    return make_part(parts, parts.make_unified_scheduler())


def make_part(parts: EngineParts, unified: UnifiedScheduler) -> DecodeScheduler:
    """The scheduler of an engine that decodes what prefill servers have computed, in the steps of ``unified``."""
    receiver = KVReceiver(**transport_arguments(parts))
    return DecodeScheduler(unified, receiver, parts.agreeing,
                           scrubs_failed=parts.config.observe.enable_nan_detection)
