"""Packed integer weights from the tensors of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...kernels.arguments import PackedInts
from ...kernels.reference import pack_ints, put_scales, put_zeros, unpack_ints
from ..api.errors import ConfigError
from ..weights.slots import DUMMY_STD, Allocate, Slot, TensorKind
from .packed_int_format import BLOCK, PackedIntFormat, StoredTensor
from .shards import Shard

WORD_BITS = 32


@dataclass(frozen=True)
class _Part:
    """A rank's part of a projection: inputs, or groups of them, ``[start, start + size)`` of ``full``, and outputs."""

    outputs: tuple[int, int, int]
    inputs: tuple[int, int, int]


class StoredIntWeight:
    """A packed ``weight`` that is filled with the tensors of a checkpoint.

    With ``act_order`` the inputs are sorted by their groups once they are loaded, so that a group's are consecutive; a
    rank that has some of the inputs has parts of all groups, of any size, and keeps the scales of all. So does one
    whose part of the inputs cuts a group.
    """

    def __init__(self, shards: Sequence[Shard], width: int, scheme: PackedIntFormat, allocate: Allocate):
        self._shards, self._scheme = shards, scheme
        full = shards[0].shape[1]
        self._group = full if scheme.group == -1 else scheme.group
        cuts_groups = self._group < full and width % self._group != 0
        self._indexed = cuts_groups or (scheme.act_order and width < full and self._group < full)
        self._check(full, width)
        if self._group == full and not self._indexed:
            self._group = width
        groups = (full if self._indexed else width) // self._group
        out = sum(shard.size for shard in shards)
        self._values = allocate(out, width * scheme.bits // 8, dtype=torch.uint8)
        self._scales = allocate(groups, out, dtype=torch.int32)
        self._order = allocate(2, width, dtype=torch.int32) if groups > 1 and (
            scheme.act_order or cuts_groups) else None
        self._is_sorted = False
        self.weight = PackedInts(self._values, self._scales, self._order, scheme.bits, self._group, self._indexed)

    def _check(self, full: int, width: int) -> None:
        """Raises ConfigError where groups, or words, are cut."""
        shard = self._shards[0]
        if full % self._group:
            raise ConfigError(f"{shard.name} has {full} inputs, which groups of {self._group} do not divide: use a "
                              "checkpoint whose group_size does, or is -1.")
        if width % BLOCK or (shard.dim == 1 and shard.start % BLOCK):
            raise ConfigError(f"{shard.name} packs {BLOCK} inputs together, and a rank's share of {width} of its "
                              f"{full} inputs is no multiple of {BLOCK}: choose another --tp-size.")
        per = WORD_BITS // self._scheme.bits
        for shard in self._shards:
            if shard.dim == 0 and (shard.start % per or (shard.size % per and shard.size != shard.shape[0])):
                raise ConfigError(f"{shard.name} packs {per} outputs in a word, which a rank's share of {shard.size} "
                                  f"of its {shard.shape[0]} outputs cuts: choose another --tp-size.")

    def slots(self) -> Iterator[Slot]:
        stored, scheme = self._scheme.stored, self._scheme
        finish = self._sort_inputs if self._sorts else None
        for shard in self._shards:
            rows = slice(shard.offset, shard.offset + shard.size)
            inputs, groups = self._inputs_of(shard)
            outputs = (shard.start, shard.size, shard.shape[0]) if shard.dim == 0 else (0, shard.size, shard.shape[0])
            yield self._slot(shard, stored.values, _Part(outputs, inputs), WORDS, self._values[rows],
                             self._load_values(rows, inputs[0]), finish)
            yield self._slot(shard, stored.scales, _Part(outputs, groups), _scale_kind(scheme.bits),
                             self._scales[:, rows], self._load_scales(rows), None)
            if not scheme.symmetric:
                yield self._slot(shard, stored.zeros, _Part(outputs, groups), _zero_kind(scheme), self._scales[:, rows],
                                 self._load_zeros(rows), None)
            yield from self._other_slots(shard, finish)

    @property
    def _sorts(self) -> bool:
        return self._order is not None and self._scheme.act_order

    def _inputs_of(self, shard: Shard) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Returns ``(start, size, all)`` of the rank's inputs, and of their groups."""
        full, width = shard.shape[1], self.weight.width
        start = shard.start if shard.dim == 1 else 0
        group = full if self._scheme.group == -1 else self._scheme.group
        groups = full // group
        if self._indexed or groups == 1:
            return (start, width, full), (0, groups, groups)
        return (start, width, full), (start // group, width // group, groups)

    def _other_slots(self, shard: Shard, finish: Callable[[], object] | None) -> Iterator[Slot]:
        """Yields the slots of the inputs' groups, and of tensors that are not used: checkpoints of GPTQ have zeros, and
        biases of 0, for all layers."""
        stored, nothing = self._scheme.stored, self._scales[:0, 0]
        full = shard.shape[1]
        if self._order is not None and self._sorts:
            yield Slot(f"{shard.name}.{stored.group_index}", self._order[1], (full,), 0,
                       shard.start if shard.dim == 1 else 0, _index_kind(self._scheme.group), self._load_groups, finish)
        else:
            yield Slot(f"{shard.name}.{stored.group_index}", nothing, (full,), optional=True)
        if self._scheme.symmetric:
            groups = 1 if self._scheme.group == -1 else full // self._scheme.group
            yield Slot(f"{shard.name}.{stored.zeros.name}", nothing,
                       _shape(stored.zeros, shard.shape[0], groups, self._scheme.bits), optional=True)
        if stored.shape is not None:
            yield Slot(f"{shard.name}.{stored.shape}", nothing, (2,), optional=True)
        yield Slot(f"{shard.name}.bias", nothing, shard.shape[:1], optional=True)

    def _slot(self, shard: Shard, stored: StoredTensor, part: _Part, kind: TensorKind, target: torch.Tensor,
              load: Callable[[torch.Tensor], object], finish: Callable[[], object] | None) -> Slot:
        """Returns the slot of a tensor, sliced along the dimension that ranks split."""
        bits = self._scheme.bits
        shape = _shape(stored, part.outputs[2], part.inputs[2], bits)
        dimension = "outputs" if shard.dim == 0 else "inputs"
        start, size, full = part.outputs if shard.dim == 0 else part.inputs
        dim = int((shard.dim == 0) != stored.outputs_first)
        if stored.packs == dimension:
            per = WORD_BITS // bits
            start, size = start // per, -(-size // per)
        return Slot(f"{shard.name}.{stored.name}", target, shape, dim, start, kind, load, finish, size=size)

    def _load_values(self, rows: slice, first: int) -> Callable[[torch.Tensor], None]:
        """Loads some outputs' values; the rank's inputs begin with the one ``first``."""
        def load(part: torch.Tensor) -> None:
            if self._order is not None and not self._sorts:
                inputs = torch.arange(self.weight.width, device=self._order.device)
                self._order.copy_(torch.stack((inputs, (first + inputs) // self._group)))
            values = self._unpacked(part, self._scheme.stored.values)[:rows.stop - rows.start]
            self._unsort()
            self._values[rows].copy_(pack_ints(values.contiguous(), self._scheme.bits, self._group))

        return load

    def _load_zeros(self, rows: slice) -> Callable[[torch.Tensor], None]:
        stored = self._scheme.stored

        def load(part: torch.Tensor) -> None:
            values = self._unpacked(part, stored.zeros)[:rows.stop - rows.start]
            put_zeros(self._scales[:, rows], values.T.to(torch.int32) + stored.zero_offset)

        return load

    def _load_scales(self, rows: slice) -> Callable[[torch.Tensor], None]:
        scheme = self._scheme

        def load(part: torch.Tensor) -> None:
            put_scales(self._scales[:, rows], part.T if scheme.stored.scales.outputs_first else part)
            if scheme.symmetric:
                put_zeros(self._scales[:, rows], 1 << (scheme.bits - 1))

        return load

    def _unpacked(self, words: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
        """Returns a tensor's values, uint8 [outputs, inputs or groups]."""
        words = words.to(self._values.device)
        words = words if stored.outputs_first else words.T
        dim = 0 if stored.packs == "outputs" else 1
        return unpack_words(words, dim, self._scheme.bits, self._scheme.stored.positions)

    def _load_groups(self, part: torch.Tensor) -> None:
        assert self._order is not None
        self._unsort()
        self._order[1].copy_(part)

    def _unsort(self) -> None:
        """Brings the inputs into the checkpoint's order, before some of the tensors are replaced."""
        if self._is_sorted:
            assert self._order is not None
            self._permute(torch.argsort(self._order[0]))
            self._is_sorted = False

    def _sort_inputs(self) -> None:
        """Sorts the inputs by their groups, once all tensors are there; raises ConfigError for groups of another
        size."""
        assert self._order is not None
        if self._is_sorted:
            return
        groups = self._order[1].long()
        counts = torch.bincount(groups.clamp(min=0), minlength=len(self._scales))
        if groups.min() < 0 or len(counts) > len(self._scales) or not (self._indexed or (counts == self._group).all()):
            raise ConfigError(f"{self._shards[0].name}.{self._scheme.stored.group_index} does not put {self._group} "
                              f"inputs into each of {len(self._scales)} groups: its checkpoint is damaged.")
        order = torch.argsort(groups, stable=True)
        self._order[0].copy_(torch.arange(len(order), device=order.device))
        self._permute(order)
        self._is_sorted = True

    def _permute(self, order: torch.Tensor) -> None:
        """Puts the input at position ``order[p]`` to position p."""
        assert self._order is not None
        values = unpack_ints(self._values, self._scheme.bits, self._group)[:, order]
        self._values.copy_(pack_ints(values, self._scheme.bits, self._group))
        self._order.copy_(self._order[:, order])


def unpack_words(words: torch.Tensor, dim: int, bits: int, positions: Sequence[int]) -> torch.Tensor:
    """Returns the values of int32 ``words`` [a, b], uint8, of which dimension ``dim`` is 32 / bits times as long. Value
    i of a word of 4 bits is in nibble ``positions[i]``, of 8 bits in byte i."""
    per = WORD_BITS // bits
    places = positions if bits == 4 else range(per)
    shifts = torch.tensor([place * bits for place in places], dtype=torch.int32, device=words.device)
    shifts = shifts[:, None] if dim == 0 else shifts
    values: torch.Tensor = (words.unsqueeze(dim + 1) >> shifts) & (2**bits - 1)
    return values.to(torch.uint8).flatten(dim, dim + 1)


def _shape(stored: StoredTensor, outputs: int, inputs: int, bits: int) -> tuple[int, int]:
    per = WORD_BITS // bits
    if stored.packs == "outputs":
        outputs = -(-outputs // per)
    elif stored.packs == "inputs":
        inputs = -(-inputs // per)
    return (outputs, inputs) if stored.outputs_first else (inputs, outputs)


def _random_words(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-2**31, 2**31, shape, generator=generator, device=generator.device).to(torch.int32)


WORDS = TensorKind("integers packed in int32", "I32", dummy=_random_words)


def _scale_kind(bits: int) -> TensorKind:
    """Dummy values are evenly distributed, so that their deviation is 2 ** bits / sqrt(12)."""
    return TensorKind("weight scale", refuses=("I32", "I8", "U8"), dummy_value=DUMMY_STD * 12**0.5 / 2**bits)


def _zero_kind(scheme: PackedIntFormat) -> TensorKind:
    zero = 2**(scheme.bits - 1) - scheme.stored.zero_offset
    word = sum(zero << place for place in range(0, WORD_BITS, scheme.bits))

    def make(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.full(shape, word - (word >> 31 << WORD_BITS), dtype=torch.int32, device=generator.device)

    return TensorKind("zeros packed in int32", "I32", dummy=make)


def _index_kind(group: int) -> TensorKind:
    def make(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        order = torch.randperm(shape[0], generator=generator, device=generator.device)
        return (order // group).to(torch.int32)

    return TensorKind("each input's group", "I32", dummy=make)
