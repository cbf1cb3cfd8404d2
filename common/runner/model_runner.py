"""The model runner of one rank: model, KV pool, attention and CUDA graphs; computes logits of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.attention.move_slots import move_slots
from ..api.errors import ConfigError, InvalidRequest
from ..api.identity import ModelIdentity
from ..attention.base import AttentionPlanner
from ..attention.workspace import AttentionWorkspace
from ..commands.memory import MemoryKind
from ..config.checkpoint import resolve_metadata
from ..config.model import ModelSpec
from ..config.server import ServerConfig
from ..config.server.speculative import SPECULATIVE_ALGORITHMS
from ..distributed.capture import may_capture
from ..distributed.parallel import Parallel
from ..distributed.step_rows import StepRows
from ..forward.chain_rows import ChainLevels, ChainRows
from ..forward.forward_batch import (
    NO_COLUMNS,
    AfterGroup,
    ForwardBatch,
    ModelInput,
    Row,
    build_forward_batch,
)
from ..forward.step_context import StepContext
from ..kvcache.cache_group import CacheGroup, SlidingWindow
from ..kvcache.layout import KVLayout
from ..kvcache.pool import KVPool
from ..kvcache.state_group import StateGroup
from ..kvcache.tiers.base import PageLoad, StepLoads
from ..models.decoder.module_calls import ModuleCall
from ..quantization.float8 import check_float8
from ..request.req import Req
from ..speculative.base import DraftContext, Drafter, DraftModel
from ..speculative.simulated import SimulatedAcceptance
from ..weights.loader import Progress, silent
from ..weights.sharded_state_source import save_sharded
from ..weights.staging import Destination
from .attention_choice import AttentionChoice
from .chain_steps import ChainSteps, chain_drafter
from .chosen_experts import ChosenExpertRows
from .cuda_graphs.capture_profile import capture_profile
from .cuda_graphs.chain_graphs import ChainModel, ChainPool, Verified
from .cuda_graphs.collection_paused import collection_paused
from .cuda_graphs.decode_graphs import DecodeGraphs, GraphPages, sizes_to_capture
from .cuda_graphs.prefill_graph_selection import PrefillGraphSelection
from .cuda_graphs.try_capture import try_capture
from .device_memory import DeviceMemory
from .dp_sync import DPStepInfo, DPSync
from .draft_weights import DraftWeights
from .eplb import ExpertBalancer, ExpertCounts, ExpertUtilization, connect_experts, expert_layers
from .expert_location import place_experts
from .expert_record import expert_record
from .forward_hooks import add_hooks
from .kv_sizing import cache_layouts, count_pages, kv_scales, page_counts, resolve_dtype
from .layer_group_events import LayerGroupEvents
from .model_weights import ModelWeights
from .nvtx_ranges import mark_ranges
from .preflight import check_pool, draft_token_bytes, pool_layers, token_bytes
from .tensor_dump import TensorDump
from .tensor_input import TensorInput, read_input
from .two_batch_overlap import TwoBatchOverlap

_WARM_UP_PREFILL_ROWS = 64
"""Rows of a prefill step that uses other GEMM and norm kernels than steps of a few rows."""


class StepLogits(NamedTuple):
    """Logits ``[R, vocab]`` of a step in the engine's type; their argmax ``[R]`` int64, where a graph has computed it;
    hidden states ``[num_hidden, hidden]``. Later steps overwrite the first two. For a drafter ``features`` [T, F] of
    all rows, and the batch."""

    logits: torch.Tensor
    argmax: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    features: torch.Tensor | None = None
    batch: ForwardBatch | None = None


class ModelRunner:
    """Owns what lives on the device. ``load`` builds it; ``step`` computes an engine's steps, on CUDA graphs where it
    can, ``forward`` and ``hidden_states`` a batch without decode graphs.

    ``pool`` has ``num_pages`` pages of ``layout`` for requests, with tensor parallelism equally many on every rank,
    and a last one, the scratch page, for the padding of decode batches.

    With a ``draft_model`` its ``drafter`` drafts on the device; a page of the ``draft_pool`` has the id of the same
    tokens' page in ``pool``. ``lookahead``: tokens after a page on which what it stores there depends.
    """

    def __init__(self, config: ServerConfig, weights: ModelWeights, pools: Sequence[KVPool],
                 attention: AttentionPlanner, device: torch.device, parallel: Parallel | None = None,
                 draft: tuple[DraftModel, KVPool] | None = None):
        self._parallel = parallel or Parallel()
        self.dp_sync = DPSync(self._parallel)
        self._config = config
        self.spec = weights.spec
        self.device = device
        self.pools = tuple(pools)
        self.pool = pools[0]
        self.layout: KVLayout = self.pool.layout
        self.num_pages = self.pool.num_pages - 1
        self.before_step: Callable[[int], None] | None = None
        """Called before each step of the engine with its number of requests in prefill."""
        self.page_loads: StepLoads | None = None
        """The tier whose loads steps wait for, layer group by layer group where no CUDA graph has the whole step."""
        self._captures_decode = False
        self._decode_graphs: DecodeGraphs | None = None
        self._weights = weights
        self._model = model = weights.model
        self._attention = attention
        self._workspace = AttentionWorkspace(device)
        counts = ExpertCounts(model) if self._parallel.experts.counts_tokens else None
        args = config.parallel
        self.expert_record = expert_record(args, counts, weights.spec.num_layers)
        self.chosen_experts: ChosenExpertRows | None = None
        if config.answers.enable_return_routed_experts:
            rows = config.schedule.largest_prefill(weights.spec.context_length) + config.schedule.max_running_requests
            self.chosen_experts = ChosenExpertRows(expert_layers(model), weights.spec, rows, device)
        self._expert_balancer = None
        self._expert_utilization = None
        if args.enable_expert_distribution_metrics and counts is not None:
            self._expert_utilization = ExpertUtilization(counts)
        if args.enable_eplb and counts is not None:
            self._expert_balancer = ExpertBalancer(counts, args)
        self.draft_model: DraftModel | None = None
        self.draft_pool: KVPool | None = None
        self.drafter: Drafter | None = None
        self.lookahead = 0
        self._draft_weights: DraftWeights | None = None
        slots, groups = list(model.slots()), [group for pool in pools for group in pool.groups]
        if draft is not None:
            self.draft_model, self.draft_pool = draft
            self.drafter = self.draft_model.make_drafter(self.draft_pool, self._workspace)
            self.lookahead = int(self.draft_model.shifted)
            self._draft_weights = DraftWeights(config, weights.spec, self.draft_model)
            slots += self.draft_model.slots()
            groups += self.draft_pool.groups
        self._memory: dict[MemoryKind, DeviceMemory] = {
            "weights": DeviceMemory((slot.target for slot in slots), keep=True),
            "kv_cache": DeviceMemory(groups, keep=False),
        }
        self._no_ids = torch.empty(0, dtype=torch.int64, device=device)
        self._two_batch_overlap: TwoBatchOverlap | None = None
        self._tensor_dump: TensorDump | None = None
        self.prefill_graphs = PrefillGraphSelection(model, self._parallel)
        self.chain_steps = self._make_chain_steps()
        self._layer_group_events = LayerGroupEvents([pool.layout for pool in pools], device)

    @classmethod
    @torch.no_grad()  # not inference_mode: transfers write to the pool's tensors outside of it
    def load(cls, config: ServerConfig, spec: ModelSpec, parallel: Parallel, device: torch.device | str,
             progress: Progress) -> ModelRunner:
        """Loads weights and allocates the pool; reports ``progress(stage, fraction)``.

        Raises ConfigError where the configuration does not fit the model, the checkpoint or the memory.
        """
        device = torch.device(device)
        spec.check_tp(parallel.attn_tp.size, parallel.tp.size, whole_dense=parallel.experts.whole_dense)
        parallel.experts.check(spec.moe)
        dtype = resolve_dtype(config, spec, device)
        if spec.quantization is not None:
            spec.quantization.check_device(dtype, device)
        if config.cache.kv_cache_dtype != "auto":
            check_float8(device, "--kv-cache-dtype auto")
        if config.speculative.speculative_draft_kv_cache_dtype not in (None, "auto"):
            check_float8(device, "--speculative-draft-kv-cache-dtype auto")
        attention = AttentionChoice(config, spec, parallel, dtype)
        attention.check(device)  # refuse before loading
        _check_pool(config, spec, parallel, dtype, device)
        weights = ModelWeights.load(config, spec, parallel, dtype, device, progress)
        connect_experts(config, spec, parallel, weights.model)
        place_experts(config.parallel, weights.model)
        scales = kv_scales(config.cache, config.model, spec)
        layouts = cache_layouts(config, spec, parallel, dtype, scales)
        draft = _load_draft(config, DraftContext(config, spec, parallel, weights.model, dtype, device, progress))
        draft_layout = None if draft is None else draft.layout
        num_local_pages = count_pages(config, spec, layouts, parallel, device, draft_layout)
        num_pages = int(parallel.world.min_reduce(np.array([num_local_pages]))[0])
        if num_pages < 1:
            raise ConfigError("No memory is left for the KV pool: raise --mem-fraction-static, lower "
                              "--chunked-prefill-size, or use more GPUs with --tp-size.")
        pools = [_allocate_pool(layout, count + 1, device, shared=config.disaggregation.shares_memory)
                 for layout, count in zip(layouts, page_counts(config.cache, layouts, num_pages))]
        draft_pool = None
        if draft is not None:
            draft_pool = draft, _allocate_pool(draft.layout, num_pages + 1, device,
                                               shared=config.disaggregation.shares_memory)
        runner = cls(config, weights, pools, attention.over(pools), device, parallel, draft_pool)
        if config.data_parallel.enable_two_batch_overlap:
            runner._enable_two_batch_overlap()
        if device.type == "cuda":
            runner._warm_up(progress)
            decodes = (config.duties.decodes and not config.model.is_embedding
                       and not config.kernels.disable_decode_cuda_graph)
            captures_prefill = config.captured_prompts(spec.context_length) > 0
            captures = weights.model.supports_cuda_graphs and config.captures_graphs
            if (decodes or captures_prefill) and captures and may_capture(parallel):
                runner._captures_decode = decodes
                runner.prefill_graphs.select(config, spec)
                if runner.chain_steps is not None and decodes:
                    runner.chain_steps.select(config)
            profiles = config.debug.enable_profile_cuda_graph
            with capture_profile(parallel.world.rank, device) if profiles else nullcontext():
                runner._capture(progress)
        runner._observe_modules()
        if config.debug.debug_tensor_dump_input_file is not None:
            runner._compute_input(read_input(config.debug.debug_tensor_dump_input_file, spec))
        progress("ready", 1.0)
        return runner

    def _observe_modules(self) -> None:
        """Dumps tensors and marks ranges from now on, where that is asked for. Raises ConfigError."""
        args = self._config.debug
        add_hooks(args.hooks, self._model.module_calls())
        if args.debug_tensor_dump_output_folder is not None:
            self._tensor_dump = TensorDump(args, self._model, self.spec.num_layers, self._parallel)
        if args.enable_layerwise_nvtx_marker:
            mark_ranges([ModuleCall(("step",), self, "step"), *self._model.module_calls()])

    @torch.inference_mode()
    def _compute_input(self, given: TensorInput) -> None:
        """Computes prompts at start, as one step of every attention group, in pages that nobody has yet. Raises
        ConfigError where they are too many tokens for a step, or not of this model."""
        assert self._tensor_dump is not None
        most = self._config.schedule.largest_prefill(self.spec.context_length)
        lens = [len(prompt) for prompt in given.prompts]
        pages = [self.layout.pages_for(length) for length in lens]
        if sum(lens) > most or sum(pages) >= min(pool.num_pages for pool in self.pools):
            raise ConfigError(f"--debug-tensor-dump-input-file has {sum(lens)} tokens, too many for a step: raise "
                              "--chunked-prefill-size, --max-prefill-tokens or --max-total-tokens.")
        own = np.split(np.arange(sum(pages), dtype=np.int32), np.cumsum(pages)[:-1])
        rows = [Row(prompt.tolist(), 0, ids, further=[ids] * len(self.pools[1:]))
                for prompt, ids in zip(given.prompts, own)]
        groups = self._parallel.dp_size
        info = DPStepInfo([sum(lens)] * groups, [len(rows)] * groups, all_decode=False)
        batch = build_forward_batch(rows, self.layout.page_size, self.device)
        compute = self._model.hidden_states if self._config.model.is_embedding else self._model.forward
        with self._tensor_dump.compared(given, batch):
            compute(self.plan(batch, info))

    def _warm_up(self, progress: Progress) -> None:
        """Compiles the kernels now: FlashInfer takes about 100 s, which the first request would wait for."""
        for layer in list(expert_layers(self._model).values())[:1]:  # the others are alike
            layer.experts.warm_up(self._config.schedule.largest_prefill(self.spec.context_length))
        for group in dict.fromkeys([self._parallel.attn_tp, self._parallel.tp]):
            if group.symm_comm is not None:
                group.symm_comm.warm_up(self._model.hidden_size, self._model.dtype)
        embeds, groups = self._config.model.is_embedding, self._parallel.dp_size
        compute = self.hidden_states if embeds else self.forward
        prefill_rows = min(_WARM_UP_PREFILL_ROWS, self.spec.context_length)

        def step(rows: int) -> None:
            info = DPStepInfo([rows] * groups, [1] * groups, all_decode=rows == 1)
            pages = np.zeros(self.layout.pages_for(rows), np.int32)
            row = Row([0] * rows, 0, pages, further=[pages] * len(self.pools[1:]))
            compute(build_forward_batch([row], self.layout.page_size, self.device), info=info)
            torch.cuda.synchronize(self.device)

        steps: list[Callable[[], None]] = [lambda: self._attention.warm_up(lambda: step(2)), lambda: step(prefill_rows),
                                           lambda: step(1)]
        for done, run in enumerate(steps, 1):
            run()
            progress("warming up kernels", done / len(steps))

    def _capture(self, progress: Progress) -> None:
        with collection_paused():
            self.prefill_graphs.capture(progress)
            if self._captures_decode and not self._model.may_fail_capture:
                self._capture_decode(progress)
            elif self._captures_decode:
                self._captures_decode = try_capture(lambda: self._capture_decode(progress), self._parallel,
                                                    "Decode steps", "the model")
            if self.chain_steps is not None:
                self.chain_steps.capture(progress)

    @torch.inference_mode()
    def _capture_decode(self, progress: Progress) -> None:
        sizes = sizes_to_capture(self._config.kernels.cuda_graph_bs, self._config.largest_captured)
        self._decode_graphs = DecodeGraphs(
            self._model, self._attention, self._workspace, sizes, self.layout.page_size,
            [GraphPages(_most_pages(pool.layout, self.spec.context_length), scratch)
             for pool, scratch in zip(self.pools, self.scratch_pages)], self.device,
            lambda size: self._rows_of(DPStepInfo.uniform_decode(self._parallel.dp_size, size)),
            lambda fraction: progress("capturing CUDA graphs", fraction),
            exact=self._config.kernels.disable_cuda_graph_padding)

    def _make_chain_steps(self) -> ChainSteps | None:
        """Returns the chain steps that may be captured; None without a drafter that drafts chains on its own."""
        drafter, model = chain_drafter(self.drafter), self.draft_model
        if drafter is None or model is None or len(self.pools) > 1 or self._parallel.dp_size > 1:
            return None
        parts = ChainModel(self._model, self._attention, self._workspace, drafter, model.features)
        pool = ChainPool(self.layout.page_size, self.scratch_page, self.spec.context_length)
        shares = self._config.speculative.simulated_acceptance
        simulated = None if shares is None else SimulatedAcceptance(shares, self._config.model.random_seed)
        return ChainSteps(parts, pool, self._parallel, simulated)

    @property
    def chain_levels(self) -> ChainLevels | None:
        """The steps with ``StepInput.chains`` that are captured, if any."""
        return None if self.chain_steps is None else self.chain_steps.levels

    @property
    def captures_decode(self) -> bool:
        """True where plain decode steps are CUDA graphs."""
        return self._captures_decode

    def check_weights(self, model_path: str, revision: str | None, load_format: str = "auto") -> None:
        """Raises ConfigError where ``update_weights`` could not load this checkpoint; changes nothing."""
        args = self._weights.args_of(model_path, revision, load_format)
        self._weights.check(args, self._scales)
        if self._draft_weights is not None:
            self._draft_weights.check(args)

    def update_weights(self, model_path: str, revision: str | None, load_format: str = "auto") -> None:
        """Loads another checkpoint, which ``check_weights`` accepted, over the weights. No step is in flight."""
        args = self._weights.args_of(model_path, revision, load_format)
        self._weights.update(args)
        if self._draft_weights is not None:
            self._draft_weights.update(args)

    def save_weights(self, folder: str, pattern: str, max_bytes: int) -> int:
        """Writes this rank's parts of the model's weights, and on rank 0 what else the checkpoint has; returns the
        bytes of the weights. Raises InvalidRequest for a checkpoint without a config.json, and as ``save_sharded``."""
        metadata = resolve_metadata(self._config.model)
        if not (metadata / "config.json").exists():
            raise InvalidRequest(f"{metadata} has no config.json, which a copy of the weights needs: copy the "
                                 "checkpoint.", param="path")
        slots = [slot for destination in self.destinations(draft=False) for slot in destination.slots()]
        rank = self._parallel.tp.rank
        return save_sharded(slots, Path(folder).expanduser(), rank, pattern, max_bytes, metadata if not rank else None)

    def destinations(self, *, draft: bool = True) -> list[Destination]:
        """Returns what takes weights that a trainer sends: the model, and with ``draft`` a draft model whose weights
        are in the model's checkpoint."""
        drafts = self._draft_weights.destinations() if draft and self._draft_weights is not None else []
        return [self._weights.destination(), *drafts]

    def weights_pushed(self, digest: str) -> None:
        """Records that a trainer's tensors are among the weights; ``digest`` is that of all tensors that it sent."""
        self._weights.pushed(digest)
        if self._draft_weights is not None:
            self._draft_weights.pushed(digest)

    def hold_experts(self, held: bool) -> None:
        """Leaves experts where they are while ``held``: slices of them are staged by rank."""
        if self._expert_balancer is not None:
            self._expert_balancer.held = held

    @property
    def scratch_page(self) -> int:
        """The first cache group's page that no request reads."""
        return self.num_pages

    @property
    def scratch_pages(self) -> list[int]:
        """The page of each cache group that no request reads."""
        return [pool.num_pages - 1 for pool in self.pools]

    def new_cache_groups(self) -> list[CacheGroup]:
        """Returns the further cache groups, all of whose pages are free."""
        in_flight = self._config.duties.receives_kv
        return [StateGroup(pool.num_pages - 1, pool.layout.page_size, in_flight=in_flight)
                if pool.layout.form == "state" else
                CacheGroup(SlidingWindow(pool.layout.retained_tokens), pool.num_pages - 1, pool.layout.page_size)
                for pool in self.pools if pool.layout.retained_tokens is not None]

    @property
    def _scales(self) -> tuple[tuple[float, float], ...]:
        """The KV scales of all of the rank's layers, in order; none where the cache is not in float8."""
        scales = sorted((layout.number_of(layer), scale) for layout in (pool.layout for pool in self.pools)
                        for layer, scale in enumerate(layout.scales))
        return tuple(scale for _, scale in scales)

    @property
    def model(self) -> ModelIdentity:
        """The identity of the weights."""
        return self._weights.identity

    @property
    def draft_algorithm(self) -> str | None:
        """The name of the algorithm that the draft model is of."""
        return None if self.draft_model is None else self._config.speculative.speculative_algorithm

    @property
    def draft_identity(self) -> ModelIdentity | None:
        """The identity of the draft model's weights; reads its checkpoint."""
        return None if self._draft_weights is None else self._draft_weights.identity

    def release(self, kinds: Iterable[MemoryKind]) -> None:
        """Frees device memory. No step is in flight, and none may run until ``resume``."""
        for kind in kinds:
            self._decode_graphs = None  # they contain addresses
            self.prefill_graphs.release()
            if self.chain_steps is not None:
                self.chain_steps.release()
            self._memory[kind].release()

    def resume(self, kinds: Iterable[MemoryKind], *, complete: bool) -> None:
        """Allocates memory again; ``complete``: afterwards nothing is released, so that steps may run."""
        for kind in kinds:
            self._memory[kind].resume()
        if complete:
            self._capture(silent)

    def _graph_size(self, num_reqs: int, info: DPStepInfo | None) -> int | None:
        """Returns the size of the graph that a decode batch of ``num_reqs`` replays; None where it does not."""
        if self._parallel.dp_size > 1:
            return None if info is None else info.graph_size
        return self._decode_graphs.size_for(num_reqs) if self._decode_graphs else None

    def sync_dp(self, num_tokens: int, num_logits: int, *, can_decode: bool) -> DPStepInfo | None:
        """Agrees with the other data-parallel ranks on the step, once in each iteration, before the batch is built.

        ``num_tokens`` rows are computed here, of which ``num_logits`` get logits; both 0 without a batch.
        ``can_decode``: a decode graph could compute it. Returns the step, which the calls that build and compute the
        batch take; None where no rank computes anything.
        """
        if self._parallel.dp_size == 1:
            return DPStepInfo([num_tokens], [num_logits], all_decode=can_decode) if num_tokens else None
        info = self.dp_sync.sync(num_tokens, num_logits, can_decode=can_decode)
        return info.padded_to_graph(self._decode_graphs.size_for) if info and self._decode_graphs else info

    def _enable_two_batch_overlap(self) -> None:
        """Computes prefill steps in two micro-batches from now on. Raises ConfigError."""
        self._two_batch_overlap = TwoBatchOverlap.from_config(self._config, self._parallel, self._model,
                                                              self._attention, self._workspace)

    def _rows_of(self, info: DPStepInfo) -> tuple[StepRows, StepRows]:
        """Returns the rows of the step's layers, and those of its LM head."""
        return (self._parallel.token_exchange.step(info.num_tokens, all_decode=info.all_decode),
                self._parallel.logits_exchange.step(info.num_logits))

    def _split_counts(self, info: DPStepInfo) -> tuple[list[int], list[int]] | None:
        """Returns the rows of the micro-batches of a step that is split; see TwoBatchOverlap."""
        return None if self._two_batch_overlap is None else self._two_batch_overlap.split_counts(info)

    @torch.inference_mode()
    def plan(self, batch: ForwardBatch, info: DPStepInfo | None = None, after_group: AfterGroup | None = None,
             workspace: AttentionWorkspace | None = None, loads: Sequence[PageLoad] = ()) -> StepContext:
        """Plans a step, for ``run``; see ``forward`` for the arguments. Its layers wait for ``loads``.

        A step that is planned before the runner's others have run has a ``workspace`` of its own, which the caller
        keeps: it is not split, and replays no piecewise graphs.
        """
        if info is None:
            assert self._parallel.dp_size == 1, "sync_dp returns the step of several attention groups"
            info = DPStepInfo([batch.num_tokens], [batch.num_tokens], all_decode=batch.is_decode)
        rows, logits = self._rows_of(info)
        after_layer = self._layer_group_events.after_layer(after_group, loads)
        if workspace is not None:
            return StepContext(batch, self._attention.plan(batch, workspace), rows, logits, after_layer)
        split = self._split_counts(info)
        if split is not None:
            assert self._two_batch_overlap is not None
            for load in loads:  # the first micro-batch is ahead of the calls of ``after_layer``
                load.wait_on_device()
            microbatches = self._two_batch_overlap.plan(batch, split)
            return StepContext(batch, microbatches[-1].step.attention, rows, logits, after_layer, microbatches)
        piecewise = self.prefill_graphs.step_for(batch, info)
        plan = self._attention.plan(batch, self._workspace, out=None if piecewise is None else piecewise.attention_out)
        return StepContext(batch, plan, rows, logits, after_layer, piecewise=piecewise)

    @torch.inference_mode()
    def run(self, step: StepContext) -> torch.Tensor:
        """Computes a step that was planned; returns its logits ``[R, vocab]`` in float32."""
        with self.expert_record.step(step.batch):
            return self._model.forward(step).float()

    @torch.inference_mode()
    def run_idle_batch(self) -> None:
        """Takes part in an iteration without a batch: other data-parallel ranks that compute need this rank's part of
        their layers.

        It computes one row, or as many as the others' graphs have, into the scratch page, so that no kernel ever gets
        an empty batch.
        """
        can_decode = not self._config.model.is_embedding
        info = self.sync_dp(0, 0, can_decode=can_decode)
        if info is None:
            return
        if self._replay(ModelInput(NO_COLUMNS, self._no_ids), info) is not None:
            return
        first, *further = [np.array([page]) for page in self.scratch_pages]
        rows = [Row([0], 0, first, further=further)] * (1 if self._split_counts(info) is None else 2)
        batch = build_forward_batch(rows, self.layout.page_size, self.device, [])
        self._rebalance_experts()
        compute = self._model.forward if can_decode else self._model.hidden_states
        compute(self.plan(batch, info))

    @torch.inference_mode()
    def step(self, step: ModelInput, after_group: AfterGroup | None = None) -> StepLogits:
        """Computes a step, and stores its keys and values in the pool; agrees on it with other data-parallel ranks.

        ``after_group(g, event)`` is called once the last layer of layer group g has been enqueued: its pages may be
        read after ``event`` (on a CPU at once, and ``event`` is None). Decode graphs have no such events, and no hidden
        states.
        """
        can_replay = step.is_plain_decode and after_group is None
        info = self.sync_dp(step.columns.num_tokens, step.num_logits, can_decode=can_replay)
        if can_replay and (replayed := self._replay(step, info)) is not None:
            return replayed
        columns = step.columns
        if self._config.speculative.speculative_attention_mode == "prefill":
            columns = columns._replace(verifies=False)
        batch = ForwardBatch.from_columns(columns, step.token_ids, self.device, step.logits_rows, step.embeds)
        self._rebalance_experts()
        context = self.plan(batch, info, after_group, loads=self._take_loads())
        with self._observed(batch, prefill=step.num_prefill > 0):
            return self._compute(step, batch, context)

    @contextmanager
    def _observed(self, batch: ForwardBatch, *, prefill: bool) -> Iterator[None]:
        """The context of a step's computation, which may be dumped and recorded."""
        dump = self._tensor_dump
        with self.expert_record.step(batch), nullcontext() if dump is None else dump.recorded(batch, prefill=prefill):
            yield

    def _compute(self, step: ModelInput, batch: ForwardBatch, context: StepContext) -> StepLogits:
        if not step.num_hidden and step.features is None:
            return StepLogits(self._model.forward(context), batch=batch)
        features = None
        if step.features is None:
            states = self._model.hidden_states(context)
        else:
            states, features = self._model.hidden_states_and_features(context, step.features)
        logits = self._model.compute_logits(states[:step.num_logits], context.logits)
        hidden = states[step.num_logits:] if step.num_hidden else None
        return StepLogits(logits, None, hidden, features, batch)

    @property
    def step_loads(self) -> Sequence[PageLoad]:
        """Loads of pages for which the next step waits."""
        return () if self.page_loads is None else self.page_loads.step_loads

    def wait_for_loads(self) -> None:
        """Lets the current stream wait for ``step_loads``."""
        for load in self._take_loads():
            load.wait_on_device()

    def _take_loads(self) -> Sequence[PageLoad]:
        return () if self.page_loads is None else self.page_loads.take_step_loads()

    def verify_chains(self, chains: ChainRows) -> Verified:
        """Computes the model of a step of ``chain_levels``; see ChainSteps."""
        assert self.chain_steps is not None
        self.wait_for_loads()
        self._rebalance_experts()
        return self.chain_steps.verify(chains)

    def draft_chains(self, verified: Verified, reqs: Sequence[Req], *, greedy: bool) -> None:
        """Computes the rest of the step; see ChainSteps."""
        assert self.chain_steps is not None
        self.chain_steps.draft(verified, reqs, greedy=greedy)

    def move_slots(self, batch: ForwardBatch, first_rows: torch.Tensor, paths: torch.Tensor) -> None:
        """Copies the keys and values of rows of ``batch`` to the slots of others, in all pools; see the kernel."""
        for index, pool in enumerate(self.pools):
            own = batch.in_group(index)
            for group in pool.groups:
                move_slots(group, own.page_of_token, own.offset_in_page, first_rows, paths)

    @torch.inference_mode()
    def zero_pages(self, index: int, page_ids: np.ndarray) -> None:
        """Zeroes pages of a cache group, in the draft model's pool too; waits, because a transfer may write to them
        next."""
        pools = [self.pools[index], *([self.draft_pool] if self.draft_pool is not None and index == 0 else [])]
        for pool in pools:
            for group in pool.groups:
                group.view(torch.uint8)[torch.from_numpy(page_ids).to(group.device)] = 0
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _replay(self, step: ModelInput, info: DPStepInfo | None) -> StepLogits | None:
        """Computes a plain decode step on a graph; returns None where there is none of its size."""
        size = self._graph_size(step.columns.num_reqs, info)
        if self._decode_graphs is None or size is None:
            return None
        self.wait_for_loads()
        self._rebalance_experts()
        return StepLogits(*self._decode_graphs.decode(step, size))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, after_group: AfterGroup | None = None,
                info: DPStepInfo | None = None) -> torch.Tensor:
        """Returns float32 logits ``[R, vocab]`` of ``batch.logits_rows``, as ``step`` without decode graphs. ``info``
        is what ``sync_dp`` returned for the batch; with one attention group it may be left out."""
        self._rebalance_experts()
        context = self.plan(batch, info, after_group, loads=self._take_loads())
        with self.expert_record.step(batch):
            return self._model.forward(context).float()

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch, info: DPStepInfo | None = None) -> torch.Tensor:
        """Returns hidden states ``[R, hidden]`` of ``batch.logits_rows`` after the final norm. ``info`` as in
        ``forward``."""
        self._rebalance_experts()
        context = self.plan(batch, info, loads=self._take_loads())
        with self._observed(batch, prefill=True):
            return self._model.hidden_states(context)

    @property
    def expert_gauges(self) -> Mapping[str, float]:
        """How evenly ranks are used, where that is measured."""
        return {} if self._expert_utilization is None else self._expert_utilization.gauges

    def _rebalance_experts(self) -> None:
        """Moves experts where it is time. Every rank calls it once a step, whether it replays a graph or not."""
        if self._expert_balancer is not None:
            self._expert_balancer.count_step()
        if self._expert_utilization is not None:
            self._expert_utilization.count_step()
        self.expert_record.count_step()

    @torch.inference_mode()
    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Returns a classifier's scores ``[R, labels]`` of pooled hidden states, of other models the states themselves,
        in float32."""
        classifier = self._model.classifier
        return pooled if classifier is None else classifier(pooled)


def _load_draft(config: ServerConfig, context: DraftContext) -> DraftModel | None:
    """Loads the draft model of the configuration's algorithm, where that has one. Raises ConfigError."""
    name = config.speculative.speculative_algorithm
    load = None if name is None else SPECULATIVE_ALGORITHMS.get(name).load
    if load is None:
        return None
    draft = load(context)
    assert draft.layout.page_size == config.cache.page_size, "a page of both pools holds the same tokens"
    return draft


def _most_pages(layout: KVLayout, context_length: int) -> int:
    """Returns the most pages of a request that a decode step reads."""
    pages = layout.pages_for(context_length)
    if layout.retained_tokens is None:
        return pages
    return min(pages, SlidingWindow(layout.retained_tokens).max_pages(layout.page_size))


def _check_pool(config: ServerConfig, spec: ModelSpec, parallel: Parallel, dtype: str, device: torch.device) -> None:
    """Raises ConfigError for a --max-total-tokens that the GPU could not hold without any weights."""
    tokens = config.cache.max_total_tokens
    if tokens is not None and device.type == "cuda":
        layers = parallel.pp.layers(spec.num_layers)
        bytes_per_token = token_bytes(config.cache, spec, parallel.attn_tp.size, dtype,
                                      pool_layers(config, spec, layers))
        bytes_per_token += draft_token_bytes(config, spec, parallel.attn_tp.size, dtype)
        check_pool(tokens, bytes_per_token, torch.cuda.mem_get_info(device)[1], str(device))


def _allocate_pool(layout: KVLayout, num_pages: int, device: torch.device, *, shared: bool) -> KVPool:
    """Raises ConfigError where there is no memory for the pool."""
    try:
        return KVPool(layout, num_pages, device, shared=shared)
    except (RuntimeError, MemoryError, OSError) as error:  # torch raises the first, on GPUs and in host memory
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        size = num_pages * layout.page_bytes / (1 << 30)
        raise ConfigError(f"There is no memory for the KV pool of {size:.1f} GiB on {device}: lower --max-total-tokens "
                          "or --mem-fraction-static.") from None
