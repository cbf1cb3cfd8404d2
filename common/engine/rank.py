"""Main of an engine rank's process: builds the engine's parts, then runs the loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec
import torch

from ...kernels.tuning.policy import set_batch_invariant
from ..api.errors import ConfigError
from ..api.messages import FromEngine, Loading, Ready, StartFailed
from ..config.checkpoint import resolve_checkpoint
from ..config.command import describe_error
from ..config.model import ModelSpec
from ..config.server import ServerConfig
from ..distributed.agreement import RankAgreement, is_lost_peer
from ..distributed.expert_parallel import ExpertParallel
from ..distributed.parallel import Parallel, init_parallel
from ..distributed.peer_all_reduce import connect_all
from ..distributed.tick_agreement import TickAgreement
from ..distributed.tp import TPGroup
from ..execution.draft_costs import measure_costs
from ..execution.draft_pass import DraftPass
from ..execution.executor import Executor
from ..execution.pp_channel import PPChannel
from ..execution.pp_executor import PPExecutor
from ..execution.simulated_samples import SimulatedSamples
from ..garbage_collector import freeze_collector, warn_of_collections
from ..grammar.store import GrammarStore
from ..kvcache.eviction.base import make_order
from ..kvcache.manager import KVCacheManager
from ..kvcache.storage.storage import Storage
from ..models.registry import load_model_spec
from ..obs.logging import setup_logging
from ..runner.kv_sizing import resolve_dtype
from ..runner.model_runner import ModelRunner
from ..sampling.sampler import Sampler
from ..scheduler.batcher import Batcher
from ..scheduler.make_batcher import make_batcher
from ..scheduler.request_tracker import RequestTracker
from ..speculative.draft_length import CostTable, DraftLength
from ..speculative.simulated import SimulatedAcceptance
from ..weights.checksums import verify_checkpoint
from ..weights.custom_loaders import custom_loaders
from ..weights.removal import drop_page_cache, remove_weights
from .control import Control
from .cuda_stack import warn_of_stack
from .embedding_scheduler import EmbeddingScheduler
from .kv_event_publisher import start_publisher
from .loop import EngineLoop, Scheduler
from .numa import bind_rank
from .rank_channel import PPTicker, RankChannel, Ticker
from .rank_spec import RankSpec
from .switchable_scheduler import SwitchableScheduler, make_switchable
from .unified_scheduler import UnifiedScheduler
from .watchdog import Watchdog

log = logging.getLogger("baton.engine")


@dataclass(frozen=True)
class EngineParts:
    """Parts that a role's scheduler is composed of."""

    config: ServerConfig
    parallel: Parallel
    runner: ModelRunner
    batcher: Batcher
    executor: Executor | PPExecutor
    tracker: RequestTracker
    grammars: GrammarStore | None = None  # on the ranks that sample tokens or send to the API server
    pp_channel: PPChannel | None = None  # between pipeline stages
    tick_agreement: TickAgreement | None = None  # of the ranks of ``tp``

    def make_unified_scheduler(self) -> UnifiedScheduler:
        return UnifiedScheduler(self.batcher, self.executor, self.tracker, overlap=self.overlap)

    @property
    def tp(self) -> TPGroup:
        """The ranks that share requests and a KV pool."""
        return self.parallel.attn_tp

    @property
    def agreeing(self) -> RankAgreement:
        """The ranks that take the same decisions: those of ``tp``, of all pipeline stages."""
        return self.pp_channel or self.tick_agreement or self.tp

    @property
    def overlap(self) -> bool:
        """True where a step is launched before the previous one's results are processed. On a CPU a launch computes the
        step: overlap would only report results one step late."""
        return self.executor.asynchronous and not self.config.schedule.disable_overlap_schedule


SchedulerFactory = Callable[[EngineParts], Scheduler]


def main(spec: RankSpec) -> None:
    """Entry of a unified server's rank."""
    run_rank(spec, unified_scheduler)


def unified_scheduler(parts: EngineParts) -> Scheduler:
    """The scheduler of an engine that runs both phases."""
    if parts.config.model.is_embedding:
        return EmbeddingScheduler(parts.batcher, parts.runner, parts.tracker)
    return parts.make_unified_scheduler()


def switchable_scheduler(parts: EngineParts) -> SwitchableScheduler:
    """The scheduler of an engine that may take any role."""
    scheduler = make_switchable(parts.make_unified_scheduler(), parts, parts.config.mode)
    if parts.config.role.sends_kv:
        scheduler.register()
    return scheduler


def run_rank(spec: RankSpec, make_scheduler: SchedulerFactory) -> None:
    """Build, report Ready (or StartFailed, with a sentence for the operator), and serve until Shutdown."""
    setup_logging(spec.config.logs, f"{spec.config.role.component}.rank{spec.rank}")
    channel = RankChannel(spec.rank, spec.to_engine, spec.from_engine)
    send: Callable[[FromEngine], None] = channel.send if _is_group_leader(spec) else _discard

    def progress(stage: str, share: float) -> None:
        channel.send(Loading(stage, share))

    set_batch_invariant(spec.config.kernels.enable_deterministic_inference)
    try:
        custom_loaders(spec.config.model)  # refused now, if one cannot be imported
        folder = resolve_checkpoint(spec.config.model, lambda share: progress("downloading", share))
        if spec.local_rank == 0:
            verify_checkpoint(spec.config.model, folder, lambda share: progress("verifying", share))
        torch.set_float32_matmul_precision("high" if spec.config.kernels.enable_tf32_matmul else "highest")
        parallel = join_groups(spec)
        if spec.config.nodes.nnodes == 1 and not spec.config.kernels.disable_custom_all_reduce:
            connect_all(parallel,
                        spec.config.largest_captured if parallel.token_exchange.low_latency is not None else 0)
        pp_channel = PPChannel(parallel, spec.config.nodes.first_host or "127.0.0.1") if parallel.pp.size > 1 else None
        agreement = None
        if pp_channel is None and parallel.attn_tp.size > 1:
            agreement = TickAgreement(parallel, spec.config.nodes.first_host or "127.0.0.1")
        parts = build_parts(spec, parallel, send, progress, pp_channel, agreement)
        if spec.config.disaggregation.enable_pd_role_switch:
            make_scheduler = switchable_scheduler
        scheduler = make_scheduler(parts)
        cache = parts.batcher.cache
        events = None
        if spec.rank == 0:
            loads = parts.batcher.loads
            prefetches = None if loads is None else loads.prefetches
            events = start_publisher(spec.config, cache.prefix_cache, cache.tier, lambda: cast(
                "Storage | None", None if prefetches is None else prefetches.storage))
        parallel.world.barrier()  # Ready means that every rank is up
        if spec.local_rank == 0 and spec.config.model.delete_ckpt_after_loading:
            remove_weights(folder)
        elif spec.local_rank == 0 and spec.config.model.weight_loader_drop_cache_after_load:
            drop_page_cache(folder)
    except Exception as error:
        channel.send(StartFailed(_failure_sentence(spec, error)))
        channel.close()
        raise SystemExit(1) from None
    cache = parts.batcher.cache
    if spec.rank == 0:
        channel.send(_ready(parts, scheduler))
    log.info("ready: %d KV pages of %d tokens", cache.num_pages, cache.page_size)
    if (draft_pool := parts.runner.draft_pool) is not None:
        log.info("and as many KV pages of the draft model: %d bytes each, the model's %d",
                 draft_pool.layout.page_bytes, parts.runner.layout.page_bytes)
    for group in cache.groups:
        log.info("and %d KV pages for layers with %s", group.num_pages, group.rule)
    control = Control(spec.config, parallel.world, parts.runner, parts.batcher, scheduler.peers,
                      parts.tracker, scheduler if isinstance(scheduler, SwitchableScheduler) else None)
    if spec.rank == 0 and spec.config.model.enable_pickled_weights:
        log.warning("--enable-pickled-weights: whoever reaches /update_weights_from_tensor is trusted with this server")
    observe = spec.config.observe
    watchdog = (Watchdog(observe.watchdog_timeout, soft_timeout=observe.soft_watchdog_timeout or 0)
                if observe.watchdog_timeout or observe.soft_watchdog_timeout else None)
    freeze_collector()
    warn_of_collections(observe.gc_warning_threshold_secs)
    ticker = Ticker(channel, parallel.tp, agreement=agreement) if pp_channel is None else PPTicker(channel, pp_channel)
    loop = EngineLoop(ticker, parts.tracker, scheduler, cache, control, send, events, watchdog,
                      parts.grammars, parts.runner.dp_sync if parallel.dp_size > 1 else None,
                      None if _is_group_leader(spec) else channel.send)
    _run_loop(loop)
    for closing in (watchdog, events, parts.batcher.loads, cache.tier, pp_channel, agreement, channel, parallel):
        if closing is not None:
            closing.close()


def _ready(parts: EngineParts, scheduler: Scheduler) -> Ready:
    cache, runner = parts.batcher.cache, parts.runner
    capacity = cache.num_pages * cache.page_size
    return Ready(capacity, min(capacity, runner.spec.context_length), runner.model, scheduler.peers.key)


def _run_loop(loop: EngineLoop) -> None:
    """Run the loop until Shutdown; exits where another rank has ended."""
    try:
        loop.run()
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        log.error("another rank of the engine has ended, so this one ends")
        log.debug("the error that showed it", exc_info=True)
        raise SystemExit(1) from None


def _failure_sentence(spec: RankSpec, error: Exception) -> str:
    """Explains a rank's failure to start, in a sentence for the operator."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        details = "; ".join(str(error).split(". ")[:2])
        return f"The GPU has too little free memory ({details}): lower --mem-fraction-static or --max-total-tokens."
    return f"Rank {spec.rank} could not start: {describe_error(error)}"


def build_parts(spec: RankSpec, parallel: Parallel, send: Callable[[FromEngine], None],
                progress: Callable[[str, float], None], pp_channel: PPChannel | None = None,
                agreement: TickAgreement | None = None) -> EngineParts:
    """Builds the engine's parts. ``pp_channel``: with several pipeline stages; ``agreement``: with several
    tensor-parallel ranks. Raises ConfigError, or torch.OutOfMemoryError, where the engine cannot be built."""
    config = spec.config
    model: ModelSpec = load_model_spec(config.model)
    runner = ModelRunner.load(config, model, parallel, parallel.device, progress)
    cache = KVCacheManager(runner.num_pages, runner.layout.page_size, not config.cache.disable_radix_cache,
                           runner.new_cache_groups(), runner.lookahead,
                           make_order(config.cache.radix_eviction_policy, config.cache.radix_eviction_policy_config))
    cache.zero_pages = runner.zero_pages
    tracker = RequestTracker(
        send,
        eos_ids=frozenset(model.eos_token_ids),
        vocab_size=model.vocab_size,
        max_request_tokens=min(runner.num_pages * runner.layout.page_size, model.context_length),
        max_requests=config.schedule.max_queued_requests + config.schedule.max_running_requests,
        timeout=config.schedule.request_timeout,
        reserves_output=config.duties.decodes,
        random_seed=None if config.speculative.speculative_algorithm is None else config.model.random_seed,
    )
    sampler = Sampler(model.vocab_size, runner.device, config.model.random_seed + parallel.dp_rank, parallel.attn_tp,
                      original_logprobs=config.model.return_original_logprob, backend=config.kernels.sampling_backend,
                      dtype=getattr(torch, resolve_dtype(config, model, runner.device)),
                      accept_thresholds=config.speculative.accept_thresholds,
                      checks_finite=config.observe.enable_nan_detection)
    grammars = None
    if parallel.attn_tp.rank == 0 and (parallel.pp.is_first or parallel.pp.is_last):
        grammars = GrammarStore(config.grammar.whitespace, model.vocab_size, tracker.eos_ids,
                                config.grammar.grammar_backend)
    draft_pass = None
    if runner.drafter is not None and runner.draft_model is not None:
        draft_pass = DraftPass(runner.drafter, runner.draft_model.features, parallel.attn_tp)
    here = Executor(runner, sampler, grammars, draft_pass, _simulated_samples(config))
    executor: Executor | PPExecutor = here
    if pp_channel is not None:
        executor = PPExecutor(here, pp_channel, parallel, one_step=config.schedule.disable_overlap_schedule)
    batcher = make_batcher(config, runner, cache, parallel.attn_tp, pp_channel or agreement)
    if config.speculative.speculative_adaptive and config.role.decodes and batcher.drafting is not None:
        batcher.drafting.adapt(_draft_length(config, here, runner, cache, parallel.attn_tp,
                                              batcher.drafting.on_device))
    return EngineParts(config, parallel, runner, batcher, executor, tracker, grammars, pp_channel, agreement)


def _draft_length(config: ServerConfig, executor: Executor, runner: ModelRunner, cache: KVCacheManager, tp: TPGroup,
                  on_device: bool) -> DraftLength:
    """Measures the cost of steps; all ranks take the first one's."""
    num_drafts = config.speculative.num_drafts
    costs = measure_costs(executor, runner, cache, config.schedule.max_running_requests, num_drafts,
                          on_device=on_device)
    encoded = tp.broadcast_bytes(msgspec.msgpack.encode(costs) if tp.rank == 0 else None)
    costs = msgspec.msgpack.decode(encoded, type=CostTable)
    log.info("milliseconds of steps by rows %s: plain %s, verify %s, draft %s", costs.rows,
             *([round(1e3 * value, 2) for value in part] for part in (costs.plain, costs.verify, costs.draft)))
    return DraftLength(costs, num_drafts)


def _simulated_samples(config: ServerConfig) -> SimulatedSamples | None:
    shares = config.speculative.simulated_acceptance
    if shares is None or not config.role.decodes:
        return None
    log.warning("SIMULATED ACCEPTANCE of drafts, %.2f tokens a step: answers are not the model's own",
                1 + sum(shares))
    return SimulatedSamples(SimulatedAcceptance(shares, config.model.random_seed))


def join_groups(spec: RankSpec) -> Parallel:
    """Initialises torch.distributed and its groups. Raises ConfigError where the host lacks the rank's device."""
    device = device_of(spec)
    bind_rank(spec.config.parallel.numa_node, spec.local_rank, device)
    if spec.local_rank == 0:
        warn_of_stack(device)
    if device.type == "cpu":
        torch.set_num_threads(_num_threads(spec))
    return init_parallel(spec.rank, spec.world_size, spec.config.dp_size, spec.dist_init, device,
                         experts=partial(ExpertParallel.from_args, spec.config.parallel,
                                         nnodes=spec.config.nodes.nnodes,
                                         keeps_chosen=spec.config.answers.enable_return_routed_experts),
                         dp_head=spec.config.data_parallel.enable_dp_lm_head, pp_size=spec.config.parallel.pp_size,
                         pp_partition=spec.config.parallel.pp_layer_partition,
                         overlap=spec.config.data_parallel.enable_two_batch_overlap,
                         backend=spec.config.parallel.dist_backend, timeout=spec.config.parallel.dist_timeout)


def _num_threads(spec: RankSpec) -> int:
    """Returns the rank's threads on a CPU. Several cut a tensor by its size, and compute the last elements of each part
    by other code than the others."""
    if spec.config.kernels.enable_deterministic_inference:
        return 1
    return int(os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // (2 * spec.world_size))))


def device_of(spec: RankSpec) -> torch.device:
    """The rank's GPU, which ranks may share with --dist-backend gloo, or the CPU. Raises ConfigError."""
    kind = spec.config.model.device
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    gpus, count = spec.config.model, torch.cuda.device_count()
    usable = range(gpus.base_gpu_id, count, gpus.gpu_id_step)
    index = gpus.base_gpu_id + spec.local_rank * gpus.gpu_id_step
    if spec.config.parallel.dist_backend == "gloo" and usable:
        index = usable[spec.local_rank % len(usable)]
    if index >= count:
        raise ConfigError(
            f"Rank {spec.rank} needs GPU {index}, this host has {count}; lower --tp-size, --base-gpu-id or "
            "--gpu-id-step, let ranks share GPUs by --dist-backend gloo, or use --device cpu.")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _is_group_leader(spec: RankSpec) -> bool:
    """True for the first rank of its attention group, which sends for the group."""
    return spec.rank % (spec.world_size // spec.config.dp_size) == 0


def _discard(message: FromEngine) -> None:
    """Drop a message: the other ranks of a group track the same requests and send nothing."""
