"""An encoder: embeddings of tokens, positions and token types, layers with a norm after each sum, and perhaps a head.

It reads whole sequences, of which no keys and values are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import embedding

from ...api.errors import ConfigError
from ...config.model import ModelSpec
from ...distributed.parallel import Parallel
from ...distributed.step_rows import ONE_GROUP, StepRows
from ...distributed.tp import TPGroup
from ...forward.forward_batch import ForwardBatch
from ...forward.step_context import StepContext
from ...layers.activations import activation_of
from ...layers.layer_norm import LayerNorm
from ...layers.linear import ColumnLinear, Columns, RowLinear
from ...layers.vocab import VocabTable
from ...weights.slots import Allocate, Slot, allocator
from ..decoder.module_calls import ModuleCall

if TYPE_CHECKING:
    from ..bert import EncoderSpec


class EncoderLayer:
    """``norm(x + attention(x))``, then ``norm(x + MLP(x))``."""

    def __init__(self, name: str, spec: ModelSpec, own: EncoderSpec, tp: TPGroup, allocate: Allocate):
        self.name, size, eps = name, spec.hidden_size, own.norm_eps
        self._head_dim = spec.head_dim
        self.qkv = ColumnLinear(size, [Columns.shard(f"{name}.attention.self.{part}", size, tp)
                                       for part in ("query", "key", "value")], True, allocate)
        self.output = RowLinear(f"{name}.attention.output.dense", size, size, True, tp, allocate)
        self.attention_norm = LayerNorm(f"{name}.attention.output.LayerNorm", size, eps, allocate)
        width = spec.intermediate_size
        self.up = ColumnLinear(size, [Columns.shard(f"{name}.intermediate.dense", width, tp)], True, allocate)
        self._activate = activation_of(own.activation, gated=False)
        self.down = RowLinear(f"{name}.output.dense", width, size, True, tp, allocate)
        self.norm = LayerNorm(f"{name}.output.LayerNorm", size, eps, allocate)

    def compute(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Computes the layer of ``x`` [T, hidden]."""
        parts = self.qkv(x).split_with_sizes(self.qkv.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in parts)
        x = self.attention_norm(x + self.output(step.attention.run(0, q, k, v).flatten(1)))
        return self.norm(x + self.down(self._activate(self.up(x))))

    def slots(self) -> Iterator[Slot]:
        for part in (self.qkv, self.output, self.attention_norm, self.up, self.down, self.norm):
            yield from part.slots()


class EncoderHead:
    """A classifier ``[R, hidden] -> [R, labels]`` of two layers with a tanh between them, whole on every rank."""

    def __init__(self, spec: ModelSpec, own: EncoderSpec, allocate: Allocate):
        dense, out = own.head_layers
        self._dense = ColumnLinear(spec.hidden_size, [Columns.whole(dense, spec.hidden_size)], True, allocate)
        self._out = ColumnLinear(spec.hidden_size, [Columns.whole(out, spec.num_labels)], True, allocate)
        self._dtype = allocate.dtype

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 scores of the first tokens' hidden states of any float type."""
        return self._out(self._dense(hidden.to(self._dtype)).tanh()).float()

    def slots(self) -> Iterator[Slot]:
        yield from self._dense.slots()
        yield from self._out.slots()


class EncoderModel:
    """One rank's part of the model; its weights are uninitialised until a loader has filled ``slots()``."""

    supports_microbatches = supports_cuda_graphs = trims_last_layer = may_fail_capture = False
    layers: tuple[Any, ...] = ()
    embed_tokens = None

    def __init__(self, spec: ModelSpec, own: EncoderSpec, parallel: Parallel, dtype: torch.dtype,
                 device: torch.device):
        """Raises ConfigError for a model with offloaded layers."""
        if spec.offload is not None and spec.offload.enabled:
            raise ConfigError("--cpu-offload-gb and --offload-group-size stream the layers of decoders: leave them out "
                              f"for {spec.architecture}.")
        allocate, plain = allocator(dtype, device, spec.quantization), allocator(dtype, device)
        self.pp, self.hidden_size, self.dtype, self.device = parallel.pp, spec.hidden_size, dtype, device
        self.token_exchange, self.logits_exchange = parallel.token_exchange, parallel.logits_exchange
        self._own = own
        self._words = VocabTable("embeddings.word_embeddings", spec.vocab_size, spec.hidden_size, parallel.tp, plain)
        self._positions = plain(own.positions, spec.hidden_size)
        self._types = plain(own.token_types, spec.hidden_size)
        self._norm = LayerNorm("embeddings.LayerNorm", spec.hidden_size, own.norm_eps, plain)
        self._layers = [EncoderLayer(f"encoder.layer.{index}", spec, own, parallel.tp, allocate)
                        for index in range(spec.num_layers)]
        self.classifier = EncoderHead(spec, own, plain) if spec.head == "classifier" else None

    def hidden_states(self, step: StepContext) -> torch.Tensor:
        """Returns hidden states ``[R, hidden]`` of the batch's ``logits_rows``. The batch has whole sequences."""
        batch = step.batch
        x = self._embed(batch)
        for layer in self._layers:
            x = layer.compute(x, step)
        return x if batch.logits_rows is None else x[batch.logits_rows]

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = self._words.embed(batch.input_ids) + embedding(self._token_types(batch), self._types)
        return self._norm(x + embedding(batch.positions + self._own.first_position, self._positions))

    def _token_types(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns the token types [T]: 1 after the first separator of a sequence."""
        if self._own.separator_id is None:
            return torch.zeros_like(batch.input_ids)
        separators = (batch.input_ids == self._own.separator_id).to(torch.int64)
        before = separators.cumsum(0) - separators  # of all sequences up to a token
        first_rows = torch.arange(len(before), device=before.device) - batch.positions
        return (before - before[first_rows]).clamp(max=1)

    def forward(self, step: StepContext) -> torch.Tensor:
        raise AssertionError("an encoder has no logits of tokens")

    def compute_logits(self, hidden: torch.Tensor, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        raise AssertionError("an encoder has no logits of tokens")

    def module_calls(self) -> Iterator[ModuleCall]:
        """Yields the calls of the layers, in their order in a step."""
        for layer in self._layers:
            yield ModuleCall((layer.name,), layer, "compute")

    def slots(self) -> Iterator[Slot]:
        yield from self._words.slots()
        yield Slot("embeddings.position_embeddings.weight", self._positions, tuple(self._positions.shape))
        yield Slot("embeddings.token_type_embeddings.weight", self._types, tuple(self._types.shape))
        yield from self._norm.slots()
        for layer in self._layers:
            yield from layer.slots()
        if self.classifier is not None:
            yield from self.classifier.slots()
