"""One rank's model, its KV pool and its attention: a batch in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from ..api.commands import MemoryKind
from ..api.errors import ConfigError
from ..api.identity import ModelIdentity
from ..attention.base import AttentionPlanner
from ..config.model import ModelSpec
from ..config.server import ServerConfig
from ..distributed.capture import may_capture
from ..distributed.parallel import Parallel
from ..forward.forward_batch import (
    NO_ROWS,
    AfterGroup,
    DecodeTable,
    ForwardBatch,
    Row,
    build_forward_batch,
    build_run_batch,
)
from ..kvcache.layout import KVLayout
from ..kvcache.pool import KVPool
from ..models.micro_batches import MicroBatch
from ..models.piecewise import PiecewiseStep
from ..quantization.methods import check_device, check_float8
from ..weights.loader import Progress, silent
from .attention_choice import AttentionChoice
from .cuda_graphs.decode_graphs import DecodeGraphs, sizes_to_capture
from .cuda_graphs.prefill_graph_selection import PrefillGraphSelection
from .device_memory import DeviceMemory
from .dp_sync import DPStepInfo, DPSync
from .eplb import ExpertBalancer, ExpertCounts, ExpertRecord, connect_experts, expert_layers
from .kv_sizing import count_pages, kv_layout, kv_scales, resolve_dtype
from .layer_group_events import LayerGroupEvents
from .model_weights import ModelWeights
from .mtp import MTPDraftLayers
from .preflight import check_pool, token_bytes
from .two_batch_overlap import TwoBatchOverlap

_MANY_ROWS = 64
"""Of a prompt whose products and norms are other kernels than those of a few rows."""


class ModelRunner:
    """Owns what lives on the device. ``load`` builds it; ``forward`` is its one operation.

    ``pool`` has ``num_pages`` pages of ``layout`` for requests, with tensor parallelism equally many on every rank,
    and a last one that takes what the padding of decode batches writes.
    """

    def __init__(self, config: ServerConfig, weights: ModelWeights, pool: KVPool, attention: AttentionPlanner,
                 device: torch.device, parallel: Parallel | None = None):
        self._parallel = parallel or Parallel()
        self.meeting = DPSync(self._parallel)
        self._turn = DPStepInfo.of_rows_each(self._parallel.dp_size, 1)
        self._config = config
        self.spec = weights.spec
        self.device = device
        self.pool = pool
        self.layout: KVLayout = pool.layout
        self.num_pages = pool.num_pages - 1
        self._captures = False
        self._graphs: DecodeGraphs | None = None
        self._weights = weights
        self._model = model = weights.model
        self._attention = attention
        counts = ExpertCounts(model) if self._parallel.experts.counted else None
        self.expert_record = ExpertRecord(counts)
        args = config.parallel
        self._balancer = None
        if args.enable_eplb and counts is not None:
            self._balancer = ExpertBalancer(counts, args.eplb_rebalance_num_iterations)
        self._memory: dict[MemoryKind, DeviceMemory] = {
            "weights": DeviceMemory((slot.target for slot in model.slots()), keep=True),
            "kv_cache": DeviceMemory(pool.groups, keep=False),
        }
        self._no_ids = torch.empty(0, dtype=torch.int64, device=device)
        self._two: TwoBatchOverlap | None = None
        self._cut = False  # this turn's step
        self.prompts = PrefillGraphSelection(model, self._parallel)
        self._group_ends = LayerGroupEvents(pool.layout.groups, device)

    @classmethod
    @torch.no_grad()  # not inference_mode: transfers write to the pool's tensors outside of it
    def load(cls, config: ServerConfig, spec: ModelSpec, parallel: Parallel, device: torch.device | str,
             progress: Progress) -> ModelRunner:
        """Load weights and allocate the pool; ``progress(what, fraction)`` is told on the way.

        Raises ConfigError where the configuration does not fit the model, the checkpoint or the memory.
        """
        device = torch.device(device)
        spec.check_tp(parallel.attention.size, parallel.mlp.size)
        parallel.experts.check(spec.moe)
        dtype = resolve_dtype(config, spec, device)
        check_device(spec.quantization, dtype, device)
        if config.cache.kv_cache_dtype != "auto":
            check_float8(device, "--kv-cache-dtype auto")
        attention = AttentionChoice(config, spec, parallel, dtype)
        attention.check(device)  # refuse before loading
        _check_pool(config, spec, parallel, dtype, device)
        weights = ModelWeights.load(config, spec, parallel, dtype, device, progress)
        connect_experts(config, spec, parallel, weights.model)
        scales = kv_scales(config.cache, config.model, spec)
        layout = kv_layout(config.cache, spec, parallel.attention.size, dtype, scales,
                           parallel.stages.layers(spec.num_layers))
        counted = count_pages(config, spec, layout, parallel, device)
        num_pages = int(parallel.everyone.min_reduce(np.array([counted]))[0])
        if num_pages < 1:
            raise ConfigError("No memory is left for the KV pool: raise --mem-fraction-static, lower "
                              "--chunked-prefill-size, or use more GPUs with --tp-size.")
        pool = _allocated(layout, num_pages + 1, device, shared=config.disaggregation.shares_memory)
        runner = cls(config, weights, pool, attention.over(pool), device, parallel)
        if config.data_parallel.enable_two_batch_overlap:
            runner._overlap(attention.over(pool))
        if device.type == "cuda":
            runner._warm_up(progress)
            decodes = config.mode != "prefill" and not config.model.is_embedding
            prompts = config.captured_prompts(spec.context_length) > 0
            if (decodes or prompts) and not config.kernels.disable_cuda_graph and may_capture(parallel):
                runner._captures = decodes
                runner.prompts.choose(config, spec, runner._begin)
            runner._capture_all(progress)
        progress("ready", 1.0)
        return runner

    def _warm_up(self, progress: Progress) -> None:
        """Compile the kernels now: FlashInfer takes about 100 s, which the first request would wait for."""
        for layer in list(expert_layers(self._model).values())[:1]:  # the others are alike
            layer.experts.warm_up(self._config.schedule.largest_prefill(self.spec.context_length))
        for group in dict.fromkeys([self._parallel.attention, self._parallel.mlp]):
            if group.peers is not None:
                group.peers.warm_up(self._model.width, self._model.dtype)
        embeds, groups = self._config.model.is_embedding, self._parallel.dp_size
        compute = self.hidden if embeds else self.forward
        many = min(_MANY_ROWS, self.spec.context_length)

        def step(rows: int, is_decode: bool = False) -> None:
            self._begin(DPStepInfo([rows] * groups, [1] * groups, steady=is_decode))
            row = Row([0] * rows, 0, np.zeros(self.layout.pages_for(rows), np.int32))
            compute(build_forward_batch([row], self.layout.page_size, self.device, is_decode))
            torch.cuda.synchronize(self.device)

        steps: list[Callable[[], None]] = [lambda: self._attention.warm_up(lambda: step(1)), lambda: step(many)]
        if not embeds:
            steps.append(lambda: step(1, is_decode=True))
        for done, run in enumerate(steps, 1):
            run()
            progress("warming up kernels", done / len(steps))

    def _capture_all(self, progress: Progress) -> None:
        self.prompts.capture(self._begin, progress)
        if self._captures:
            self._capture(progress)

    @torch.inference_mode()
    def _capture(self, progress: Progress) -> None:
        sizes = sizes_to_capture(self._config.kernels.cuda_graph_bs, self._config.largest_captured)
        self._graphs = DecodeGraphs(
            self._model, self._attention, sizes, self.layout.page_size, self.layout.pages_for(self.spec.context_length),
            self.num_pages, self.device,
            lambda size: self._begin(DPStepInfo.of_rows_each(self._parallel.dp_size, size)),
            lambda share: progress("capturing CUDA graphs", share))

    def check_weights(self, model_path: str, revision: str | None) -> None:
        """Raises ConfigError where ``update_weights`` could not load this checkpoint; changes nothing."""
        self._weights.check(model_path, revision, self.layout.scales)

    def update_weights(self, model_path: str, revision: str | None) -> None:
        """Load another checkpoint, which ``check_weights`` accepted, over the weights. No step is in flight."""
        self._weights.update(model_path, revision)

    @property
    def spare_page(self) -> int:
        """The pool's page that no request reads."""
        return self.num_pages

    @property
    def model(self) -> ModelIdentity:
        """Whose weights these are."""
        return self._weights.identity

    def load_predictors(self, progress: Progress) -> MTPDraftLayers:
        """The checkpoint's layers of multi-token prediction, beside this model. Raises ConfigError."""
        return MTPDraftLayers.load(self._config, self.spec, self._parallel, self._model, self.pool.num_pages,
                                   self.device,
                                   progress)

    def release(self, kinds: Iterable[MemoryKind]) -> None:
        """Give device memory back. No step is in flight, and none may run until ``resume``."""
        for kind in kinds:
            self._graphs = None  # they hold addresses
            self.prompts.release()
            self._memory[kind].release()

    def resume(self, kinds: Iterable[MemoryKind], *, complete: bool) -> None:
        """Take memory again; ``complete``: afterwards nothing is released, so that steps may run."""
        for kind in kinds:
            self._memory[kind].resume()
        if complete:
            self._capture_all(silent)

    def padding(self, num_reqs: int) -> list[Row]:
        """Rows that bring a decode batch of ``num_reqs`` to the size it runs at; none without CUDA graphs. Called after
        ``meet``."""
        size = self._replayed_size(num_reqs)
        return [] if size is None or self._graphs is None else [self._graphs.padding_row] * (size - num_reqs)

    def _replayed_size(self, num_reqs: int) -> int | None:
        """At which a decode batch of so many replays a graph; None where it does not."""
        if self._parallel.dp_size > 1:
            return self._turn.size
        return self._graphs.size_for(num_reqs) if self._graphs else None

    def meet(self, num_tokens: int, num_scored: int, *, decodes: bool) -> bool:
        """Once a turn, before the batch is built: agree with the other data-parallel ranks on what is computed in it.

        ``num_tokens`` rows are computed here, of which ``num_scored`` get logits; 0 both without a batch. ``decodes``:
        a graph could do it. False where nobody computes anything.
        """
        if self._parallel.dp_size == 1:
            return num_tokens > 0
        turn = self.meeting.agree(num_tokens, num_scored, decodes=decodes)
        if turn is not None:
            self._begin(turn.replayed(self._graphs.size_for) if self._graphs else turn)
        return turn is not None

    def _overlap(self, attention: AttentionPlanner) -> None:
        """Compute prompts in halves from now on, the second one with ``attention``. Raises ConfigError."""
        self._two = TwoBatchOverlap.of(self._config, self._parallel, self._model, (self._attention, attention))

    def _begin(self, turn: DPStepInfo) -> None:
        self._turn = turn
        self._cut = self._two is not None and self._two.begin(turn)
        self._parallel.tokens.begin(turn.tokens, decodes=turn.steady)
        self._parallel.scored.begin(turn.scored)

    def accompany(self) -> None:
        """A turn without a batch: other data-parallel ranks that compute need this rank's share of their layers.

        It computes one row of its own, or as many as the others' graphs have, into the scratch page, so that no kernel
        ever sees an empty batch.
        """
        decodes = not self._config.model.is_embedding
        if self.meet(0, 0, decodes=decodes):
            if self._graphs is not None and self._replayed_size(0) is not None:
                self.decode(NO_ROWS, self._no_ids)
                return
            rows = [Row([0], 0, np.array([self.num_pages]))] * (1 + self._cut)
            batch = build_forward_batch(rows, self.layout.page_size, self.device, decodes, [])
            if decodes:
                self.forward(batch)
            else:
                self.hidden(batch)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, after_group: AfterGroup | None = None) -> torch.Tensor:
        """Float32 logits ``[R, vocab]`` of ``batch.logits_rows``; the batch's keys and values enter the pool.

        ``after_group(g, event)`` is called once the last layer of layer group g has been enqueued: its pages may
        be read when ``event`` has happened (on a CPU they may be read at once, and ``event`` is None).
        """
        self._between_steps()
        if batch.is_decode and self._graphs is not None and self._replayed_size(batch.num_reqs) == batch.num_reqs:
            assert after_group is None and batch.logits_rows is not None
            return self._graphs.run(batch)[:len(batch.logits_rows)].float()
        return self._model.forward(batch, self._attention, self._group_ends.telling(after_group), self._plan(batch),
                                   self._pieces(batch)).float()

    @torch.inference_mode()
    def decode(self, table: DecodeTable, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A decode step: logits ``[B, vocab]`` of ``table``'s rows in the engine's type, whose tokens ``token_ids`` [B]
        int64 are on the device, and the likeliest tokens ``[B]`` where a graph has found them. Later steps overwrite
        both."""
        self._between_steps()
        size = None if self._graphs is None else self._replayed_size(len(table.positions))
        if self._graphs is not None and size is not None:
            return self._graphs.decode(table, token_ids, size)
        batch = build_run_batch(table, token_ids, self.device)
        self._attention.plan(batch)
        return self._model.forward(batch, self._attention, self._group_ends.telling(None),
                                   pieces=self._pieces(batch)), None

    @torch.inference_mode()
    def forward_with_hidden(self, batch: ForwardBatch, num_logits: int,
                            after_group: AfterGroup | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward``'s logits of the first ``num_logits`` of ``batch.logits_rows``, and the hidden states
        ``[R - num_logits, hidden]`` of the others behind the last norm. Runs without CUDA graphs, which keep none."""
        self._between_steps()
        hidden = self._model.hidden(batch, self._attention, self._group_ends.telling(after_group), self._plan(batch),
                                    self._pieces(batch))
        return self._model.scores(hidden[:num_logits]).float(), hidden[num_logits:]

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states ``[R, hidden]`` of ``batch.logits_rows``, behind the model's last norm."""
        self._between_steps()
        return self._model.hidden(batch, self._attention, self._group_ends.telling(None), self._plan(batch),
                                  self._pieces(batch))

    def _plan(self, batch: ForwardBatch) -> list[MicroBatch]:
        """Plan its attention; the halves of a step that is cut."""
        if self._two is not None and self._cut:
            return self._two.plan(batch)
        self._attention.plan(batch)
        return []

    def _pieces(self, batch: ForwardBatch) -> PiecewiseStep | None:
        """What is recorded of this turn's step."""
        return None if self._cut else self.prompts.pieces(batch, self._turn)

    def _between_steps(self) -> None:
        """Experts move here. Every rank comes here once a step, whether it replays a graph or not."""
        if self._balancer is not None:
            self._balancer.turn()

    @torch.inference_mode()
    def score(self, pooled: torch.Tensor) -> torch.Tensor:
        """Of a classifier, its labels' scores ``[R, labels]`` of pooled hidden states; else the states themselves.
        Float32 both."""
        labels = self._model.labels
        return pooled if labels is None else labels(pooled)


def _check_pool(config: ServerConfig, spec: ModelSpec, parallel: Parallel, dtype: str, device: torch.device) -> None:
    """Raises ConfigError for a --max-total-tokens that the GPU could not hold without any weights."""
    tokens = config.cache.max_total_tokens
    if tokens is not None and device.type == "cuda":
        layers = parallel.stages.layers(spec.num_layers)
        each = token_bytes(config.cache, spec, parallel.attention.size, dtype, len(layers))
        check_pool(tokens, each, torch.cuda.mem_get_info(device)[1], str(device))


def _allocated(layout: KVLayout, num_pages: int, device: torch.device, *, shared: bool) -> KVPool:
    """Raises ConfigError where there is no memory for the pool."""
    try:
        return KVPool(layout, num_pages, device, shared=shared)
    except (RuntimeError, MemoryError, OSError) as error:  # torch raises the first, on GPUs and in host memory
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        size = num_pages * layout.page_bytes / (1 << 30)
        raise ConfigError(f"There is no memory for the KV pool of {size:.1f} GiB on {device}: lower --max-total-tokens "
                          "or --mem-fraction-static.") from None
