"""Servers of each role on the virtual clock: the real scheduler of the role, composed as its rank composes it."""

from __future__ import annotations

from typing import Any, cast

from ...common.config.server import ScheduleArgs
from ...common.distributed.tp import TPGroup
from ...common.engine.unified_scheduler import UnifiedScheduler
from ...common.kvcache.manager import KVCacheManager
from ...common.scheduler.request_tracker import RequestTracker
from ...decode.scheduler import DecodeScheduler
from ...prefill.scheduler import PrefillScheduler
from ..costs.model import Costs
from .batcher import VirtualBatcher
from .device import VirtualDevice, VirtualStep
from .engine import Engine, Outputs, decode_outputs
from .events import Events
from .transfer import Network, VirtualReceiver, VirtualSender

RETAIN_SECONDS = 5.0


class ServerParts:
    """Parts that the engines of all roles have."""

    def __init__(self, costs: Costs, args: ScheduleArgs, *, decodes: bool, prefix_cache: bool, outputs: Outputs,
                 pool_tokens: int, layer_groups: int, max_requests: int):
        self.device = VirtualDevice(costs.steps, layer_groups)
        self.cache = KVCacheManager(pool_tokens // costs.page_size, costs.page_size, prefix_cache)
        self.tracker = RequestTracker(lambda message: decode_outputs(message, outputs, self.device.now),
                                      eos_ids=frozenset(), vocab_size=1 << 31, max_request_tokens=pool_tokens,
                                      max_requests=max_requests, timeout=1e12, reserves_output=decodes)
        self.batcher = VirtualBatcher(self.cache, args, decodes=decodes)
        self.overlap = not args.disable_overlap_schedule

    @property
    def executor(self) -> Any:
        return self.device


def unified_engine(name: str, events: Events, parts: ServerParts, outputs: Outputs) -> Engine:
    scheduler = UnifiedScheduler(parts.batcher, parts.executor, parts.tracker, overlap=parts.overlap)
    return Engine(name, events, parts.device, parts.batcher, parts.tracker, scheduler, outputs,
                  lambda: _steady(scheduler))


def decode_engine(name: str, events: Events, parts: ServerParts, outputs: Outputs, network: Network) -> Engine:
    unified = UnifiedScheduler(parts.batcher, parts.executor, parts.tracker, overlap=parts.overlap)
    receiver = VirtualReceiver(name, network, parts.cache.num_pages, lambda: parts.device.now, lambda: engine.notify())
    scheduler = DecodeScheduler(unified, cast(Any, receiver), TPGroup())
    engine = Engine(name, events, parts.device, parts.batcher, parts.tracker, scheduler, outputs,
                    lambda: None if scheduler.arrived and parts.batcher.has_slot else _steady(unified))
    return engine


def prefill_engine(name: str, events: Events, parts: ServerParts, outputs: Outputs, network: Network) -> Engine:
    sender = VirtualSender(name, network, lambda: parts.device.now, lambda: engine.notify())
    scheduler = PrefillScheduler(parts.batcher, parts.executor, parts.tracker, cast(Any, sender), TPGroup(),
                                 [network.costs.layer_groups], register=lambda info: None, overlap=parts.overlap,
                                 kv_retain_seconds=RETAIN_SECONDS)
    engine = Engine(name, events, parts.device, parts.batcher, parts.tracker, scheduler, outputs)
    return engine


def _steady(scheduler: UnifiedScheduler) -> VirtualStep | None:
    """The decode step in flight, where nothing but decode steps can follow it unless a request ends or arrives."""
    batcher, in_flight = scheduler.batcher, scheduler._pipeline.in_flight
    if in_flight is None or batcher.prefilling or batcher.paused is not None:
        return None
    if batcher.waiting and (batcher.has_slot or batcher.priorities.enabled):
        return None
    return cast(VirtualStep, in_flight)
