"""Replaces modules of a model of transformers by Baton's, after a trial that shows what computes the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...api.errors import ConfigError
from ...config.model import ModelSpec
from ...config.quantization import LayerFormat
from ...distributed.tp import TPGroup
from ...layers.linear import ColumnLinear, Columns, RowLinear
from ...layers.mlp import MLP
from ...layers.vocab import VocabTable
from ...weights.slots import Allocate, Slot, allocator
from ..decoder.self_attention import PositionStep, SelfAttention
from .attention import TrialAttention, attending, current_step
from .blocks import (
    ATTENTION_PARTS,
    MLP_PARTS,
    Rotary,
    attention_form,
    mlp_activation,
    norm_eps,
    replace_norm,
)
from .experts import ExpertsOf, is_experts
from .linear import (
    Embedding,
    FusedPart,
    FusedProjections,
    Head,
    Projection,
    ReducedProjection,
    own_slots,
)
from .names import CheckpointNames

_SPLIT = {"colwise": "columns", "colwise_gather_output": "gathered columns", "rowwise": "rows",
          "rowwise_split_input": "split rows"}
"""The styles of a plan that split a linear layer, as transformers names them."""
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of linear layers that choose experts: a few rows of weights, which are not quantized while they are loaded."""


def run_trial(model: Any, attention: TrialAttention, device: torch.device,
              dtype: torch.dtype) -> dict[int, list[nn.Module]]:
    """Computes two rows without any product, to refuse now what attention could not compute later; returns the linear
    layers that have the same input, under numbers of their inputs. Parameters of other modules get memory."""
    inputs: list[torch.Tensor] = []  # kept, so that each has an id of its own
    readers: dict[int, list[nn.Module]] = {}
    stubs: list[Any] = []
    embedding = model.get_input_embeddings()
    for module in model.modules():
        stub = _stub_of(module, inputs, readers, dtype, is_embedding=module is embedding)
        if stub is not None:
            module.forward = stub  # type: ignore[method-assign]
            stubs.append(module)
        else:
            _give_memory(module, device)
    try:
        with attending(attention), torch.inference_mode():
            model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device),
                  position_ids=torch.arange(2, device=device)[None], use_cache=False)
    finally:
        for module in stubs:
            del module.forward
    return readers


def _stub_of(module: Any, inputs: list[torch.Tensor], readers: dict[int, list[nn.Module]],
             dtype: torch.dtype, *, is_embedding: bool) -> Callable[..., torch.Tensor] | None:
    """Returns what answers with zeros in the place of a module whose parameters have no memory."""
    if type(module) is nn.Linear:
        def project(x: torch.Tensor) -> torch.Tensor:
            inputs.append(x)
            readers.setdefault(id(x), []).append(module)
            return x.new_zeros(*x.shape[:-1], module.out_features)

        return project
    if is_embedding and type(module) is nn.Embedding:
        return lambda ids: torch.zeros(*ids.shape, module.embedding_dim, dtype=dtype, device=ids.device)
    return (lambda hidden_states, *_: torch.zeros_like(hidden_states)) if is_experts(module) else None


def _give_memory(module: nn.Module, device: torch.device) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            module._parameters[name] = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=False)


@dataclass
class Replaced:
    """What has replaced modules: ``made`` has slots. ``captures``: CUDA graphs capture all of it. ``inside`` are the
    names of modules which others compute."""

    model: Any
    names: CheckpointNames
    made: list[Any] = field(default_factory=list)
    inside: tuple[str, ...] = ()
    captures: bool = True
    _owned: set[int] = field(default_factory=set)

    def own(self, *modules: nn.Module) -> None:
        """Records that the parameters of ``modules`` have slots in ``made``."""
        self._owned.update(id(parameter) for module in modules for parameter in module.parameters())

    def slots(self) -> Iterator[Slot]:
        yield from own_slots(list(self.model.modules()))
        for made in self.made:
            yield from made.slots()
        buffers = dict(self.model.named_buffers())
        stored = {*self.model.state_dict()}
        seen: set[int] = set()
        for name, tensor in [*self.model.named_parameters(), *((n, b) for n, b in buffers.items() if n in stored)]:
            if id(tensor) not in self._owned and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield Slot(self.names.of(name), tensor.data, tuple(tensor.shape))


class _Replacement:
    """Replaces the modules of one model."""

    def __init__(self, model: Any, spec: ModelSpec, tp: TPGroup, allocate: Allocate, plain: Allocate):
        self.model, self.spec, self.tp = model, spec, tp
        self.allocate, self.plain = allocate, plain
        self.plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
        self.names = CheckpointNames(model)
        self.result = Replaced(model, self.names)
        self.at = {id(module): name for name, module in model.named_modules()}

    def style(self, name: str) -> str | None:
        return self.plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))

    def stored(self, name: str) -> str:
        """Returns the checkpoint's name of a layer."""
        return self.names.of(f"{name}.weight").removesuffix(".weight")

    def put(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module)

    # ------------------------------------------------------------------ blocks

    def norms(self) -> None:
        for module in self.model.modules():
            eps = norm_eps(module)
            if eps is not None:
                replace_norm(module, eps)

    def attention(self, trial: TrialAttention) -> None:
        """Replaces self-attention whose heads are rotated as the model's one rotary module says."""
        rotary = self._rotary()
        if rotary is None:
            return
        table: torch.Tensor | None = None
        for layer, module in trial.modules.items():
            name = self.at[id(module)]
            styles = [self.style(f"{name}.{part}") for part in ATTENTION_PARTS]
            if self.tp.size > 1 and styles != ["colwise", "colwise", "colwise", "rowwise"]:
                continue
            form = attention_form(module, self.spec, rotary)
            if form is None or [self.stored(f"{name}.{part}") for part in ATTENTION_PARTS] != [
                    f"{self.stored_parent(name)}.{part}" for part in ATTENTION_PARTS]:
                continue
            if table is None:
                table = self._table(rotary)
            own = SelfAttention(self.stored_parent(name), layer, self.spec, self.tp, self.allocate,
                                qkv_bias=module.q_proj.bias is not None, o_bias=module.o_proj.bias is not None,
                                head_norm_eps=form.head_norm_eps,
                                position_step=None if form.factor == 1.0 else _scaled(form.factor))
            self._drop(name, module)
            module.forward = _attend_by(own, table)
            self.result.made.append(own)

    def stored_parent(self, name: str) -> str:
        return self.stored(f"{name}.{ATTENTION_PARTS[0]}").rpartition(".")[0]

    def _rotary(self) -> Rotary | None:
        module = getattr(self.model.base_model, "rotary_emb", None)
        if module is None:
            return None

        def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            positions = positions.to(self.plain.device)
            cos, sin = module(torch.zeros(1, device=positions.device), positions)
            return cos.float().cpu(), sin.float().cpu()

        try:
            cos, sin = rotary(torch.tensor([[0, 3]]))
        except (TypeError, RuntimeError, ValueError, KeyError):
            return None  # it has several kinds of embeddings
        width = cos.shape[-1] // 2
        halves = (torch.equal(x[..., :width], x[..., width:]) for x in (cos, sin))
        return rotary if cos.dim() == 3 and all(halves) else None

    def _table(self, rotary: Rotary) -> torch.Tensor:
        """Returns the rotary table as layers/rotary.py makes them."""
        cos, sin = rotary(torch.arange(self.spec.context_length)[None])
        width = cos.shape[-1] // 2
        return torch.cat((cos[0, :, :width], sin[0, :, :width]), -1).contiguous().to(self.plain.device)

    def mlps(self) -> None:
        for name, module in list(self.model.named_modules()):
            activation = mlp_activation(module)
            if activation is None:
                continue
            styles = [self.style(f"{name}.{part}") for part in MLP_PARTS]
            gate, up, down = (module._modules[part] for part in MLP_PARTS)
            parent = self.stored(f"{name}.gate_proj").rpartition(".")[0]
            if (self.tp.size > 1 and styles != ["colwise", "colwise", "rowwise"]
                    or len({linear.bias is not None for linear in (gate, up, down)}) > 1
                    or [self.stored(f"{name}.{part}") for part in MLP_PARTS] != [f"{parent}.{p}" for p in MLP_PARTS]):
                continue
            self._check_divides(name, gate.out_features)
            own = MLP(parent, gate.in_features, gate.out_features, gate.bias is not None, self.tp, self.allocate,
                      activation)
            self._drop(name, module)
            module.forward = _compute_by(own)
            self.result.made.append(own)

    def _drop(self, name: str, module: nn.Module) -> None:
        """Removes the children of a module, whose work another does."""
        module._modules.clear()
        self.result.inside = (*self.result.inside, f"{name}.")

    # ------------------------------------------------------------------ layers

    def experts(self) -> None:
        for name, module in list(self.model.named_modules()):
            if not is_experts(module):
                continue
            if self.spec.quantization is not None:
                raise ConfigError("--model-impl transformers does not quantize experts, nor load quantized ones: leave "
                                  "--quantization out, and use a checkpoint in bfloat16, float16 or float32.")
            style = self.style(name)
            if self.tp.size > 1 and style != "moe_tp_experts":
                raise ConfigError(f"--model-impl transformers cannot split the experts of {self.spec.architecture}, "
                                  "which has no plan for them: leave --tp-size out.")
            stored = (self.names.parts_of(f"{name}.gate_up_proj"), self.names.parts_of(f"{name}.down_proj"))
            made = ExpertsOf(module, stored, self.tp, self.plain)
            self.result.captures = self.result.captures and made.is_plain
            self.result.made.append(made)
            self.result._owned.update((id(module.gate_up_proj), id(module.down_proj)))

    def vocabulary(self, ties: bool) -> None:
        """Replaces the token embedding and the head, one table where the model ties them."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        table = None
        if type(embedding) is nn.Embedding:
            table = self._table_of(embedding, embedding.num_embeddings, embedding.embedding_dim)
            self.put(self.at[id(embedding)], Embedding(table))
        if type(head) is not nn.Linear or head.bias is not None:
            return
        if ties and table is None:
            head.weight = embedding.weight
            self.at.pop(id(head))  # it stays
            return
        own = table if ties and table is not None else self._table_of(head, head.out_features, head.in_features)
        self.put(self.at[id(head)], Head(own, owns=not ties))

    def _table_of(self, module: nn.Module, vocab_size: int, width: int) -> VocabTable:
        return VocabTable(self.stored(self.at[id(module)]), vocab_size, width, self.tp, self.plain)

    def linears(self, readers: dict[int, list[nn.Module]]) -> None:
        for group in readers.values():
            self._fuse([module for module in group if self._is_left(module)])
        for name, module in list(self.model.named_modules()):
            if self._is_left(module):
                self.put(name, self._linear(name, module))

    def _is_left(self, module: nn.Module) -> bool:
        name = self.at.get(id(module), "")
        return type(module) is nn.Linear and bool(name) and not name.startswith(self.result.inside or ("\0",))

    def _fuse(self, group: list[Any]) -> None:
        """Computes projections of one input together, where they are alike."""
        names = [self.at[id(module)] for module in group]
        alike = {(name.rpartition(".")[0], self.style(name), module.bias is None, self._format_of(name))
                 for name, module in zip(names, group)}
        if len(set(names)) < 2 or len(alike) > 1 or len(set(names)) < len(names) or self._kind(names[0], 0) not in (
                "columns", "whole"):
            return
        parts = [self._columns(name, module) for name, module in zip(names, group)]
        fused = FusedProjections(ColumnLinear(group[0].in_features, parts, group[0].bias is not None,
                                              self._allocate_of(names[0])))
        for index, name in enumerate(names):
            self.put(name, FusedPart(fused, index))

    def _allocate_of(self, name: str) -> Allocate:
        """Returns what allocates a layer: a checkpoint says which layers it quantizes; while others are loaded, all
        are but routers and heads."""
        if self.spec.family.quantized_checkpoint or name.rpartition(".")[2] not in _ROUTERS:
            return self.allocate
        return self.plain

    def _format_of(self, name: str) -> LayerFormat | None:
        quantization = self._allocate_of(name).quantization
        return None if quantization is None else quantization.for_layer(self.stored(name))

    def _kind(self, name: str, width: int) -> str:
        """Returns how a linear layer of ``width`` outputs is split."""
        if self.tp.size == 1:
            return "whole"
        style = self.style(name)
        if style is None or style == "replicated_with_grad_allreduce":
            return "whole"
        if style not in _SPLIT:
            raise ConfigError(f"--model-impl transformers cannot split {name} as its plan says ({style}): leave "
                              "--tp-size out.")
        if _SPLIT[style] == "gathered columns" and width % self.tp.size:
            return "whole"
        return _SPLIT[style]

    def _columns(self, name: str, module: Any) -> Columns:
        stored, size = self.stored(name), module.out_features
        if self._kind(name, size) == "whole":
            return Columns.whole(stored, size)
        spec = self.spec
        if size == spec.num_kv_heads * spec.head_dim and spec.num_kv_heads < self.tp.size:
            return Columns.kv_shard(stored, spec.num_kv_heads, spec.head_dim, self.tp)
        self._check_divides(name, size)
        return Columns.shard(stored, size, self.tp)

    def _linear(self, name: str, module: Any) -> nn.Module:
        kind, allocate = self._kind(name, module.out_features), self._allocate_of(name)
        has_bias = module.bias is not None
        if kind in ("rows", "split rows"):
            self._check_divides(name, module.in_features)
            row = RowLinear(self.stored(name), module.in_features, module.out_features, has_bias, self.tp, allocate)
            return ReducedProjection(row, module.in_features // self.tp.size, splits=kind == "split rows")
        column = ColumnLinear(module.in_features, [self._columns(name, module)], has_bias, allocate)
        return Projection(column, self.tp, gathers=kind == "gathered columns")

    def _check_divides(self, name: str, size: int) -> None:
        if size % self.tp.size:
            raise ConfigError(f"--tp-size {self.tp.size} must divide the width {size} of {name}.")


def _scaled(factor: float) -> PositionStep:
    """Returns a step that multiplies queries by ``factor``."""
    return lambda q, k, cos_sin, positions: (q * factor, k, cos_sin)


def _attend_by(own: SelfAttention, table: torch.Tensor) -> Callable[..., tuple[torch.Tensor, None]]:
    def forward(hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        step = current_step()
        heads = own.attend(own.project(hidden_states[0]), step, table, False)
        step.after_layer(own.layer)
        return own.output(heads)[None], None

    return forward


def _compute_by(own: MLP) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return own(x.reshape(-1, x.shape[-1])).view(x.shape)

    return forward


def replace_modules(model: Any, spec: ModelSpec, tp: TPGroup, dtype: torch.dtype, device: torch.device,
                    readers: dict[int, list[nn.Module]], trial: TrialAttention, *, ties: bool) -> Replaced:
    """Replaces what it can, and all linear layers. ``ties``: the head's weight is the embedding's. Raises ConfigError
    for a model that cannot be split over ``tp``."""
    plain = allocator(dtype, device)
    work = _Replacement(model, spec, tp, allocator(dtype, device, spec.quantization), plain)
    if tp.size > 1 and not any(style in _SPLIT for name, style in work.plan.items() if not name.startswith("lm_head")):
        raise ConfigError(f"--model-impl transformers cannot split {spec.architecture}, which has no plan for tensor "
                          "parallelism: leave --tp-size out.")
    work.attention(trial)
    work.norms()
    work.mlps()
    work.experts()
    work.vocabulary(ties)
    work.linears(readers)
    return work.result
