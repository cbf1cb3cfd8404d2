"""Weights that a trainer has sent, staged beside the model's until all of them are copied over it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..api.errors import ConfigError, InvalidRequest
from ..config.quantization import Unpack
from .lazy import InMemory, LazyTensor
from .loader import TensorParts
from .slots import Slot, finish_loading
from .uploads import upload

_SPARE_BYTES = 1 << 30
"""Device memory that staged weights leave to the steps beside which they are staged."""
ORIGIN = "the update"
"""Where errors say that a tensor is."""


@dataclass(frozen=True)
class Destination:
    """A model that takes tensors by the names of its checkpoint.

    ``slots`` are those of now: experts may have moved since the last call. ``parts`` and ``unpack`` are those of the
    model's family and of its packed format. ``ignores`` returns whether a name without a slot is none to refuse:
    another pipeline stage has it, or the model computes it from others.
    """

    slots: Callable[[], Iterable[Slot]]
    ignores: Callable[[str], bool]
    parts: TensorParts | None = None
    unpack: Unpack | None = None


class Staging:
    """Tensors of one update, or of a part of it: this rank's slices, in the trainer's types."""

    def __init__(self, destinations: Sequence[Destination], *, borrowed: bool = False):
        """``borrowed``: the tensors' memory is the trainer's, who overwrites it once they are staged."""
        self._borrowed = borrowed
        self._destinations = destinations
        self._slots = [{slot.name: slot for slot in each.slots()} for each in destinations]
        self._unpacks = any(each.unpack is not None for each in destinations)
        self._staged: dict[tuple[int, str], torch.Tensor] = {}
        self._packed: dict[str, torch.Tensor] = {}
        self.digests: dict[str, str] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the staged slices."""
        return sum(part.nbytes for part in self._staged.values())

    def add(self, name: str, tensor: torch.Tensor, digest: str = "") -> None:
        """Stages this rank's slices of a whole tensor. Raises InvalidRequest for a name that the model does not have,
        and for another shape or type than it asks for."""
        self.digests[name] = digest
        if self._unpacks:
            self._packed[name] = tensor  # a packed tensor is read with its scales, which may come later
            return
        self._add(name, InMemory(tensor))

    def close(self) -> None:
        """Stages what could not be before all tensors were there. Raises as ``add``."""
        for name, tensor in self._packed.items():
            self._add(name, InMemory(tensor))
        self._packed.clear()

    def _add(self, name: str, tensor: LazyTensor) -> None:
        known = False
        try:
            for index, destination in enumerate(self._destinations):
                for own_name, part in self._tensors_of(destination, name, tensor):
                    slot = self._slots[index].get(own_name) or self._slots[index].get(f"model.{own_name}")
                    if slot is None:
                        known = known or destination.ignores(own_name)
                        continue
                    known = True
                    slot.kind.check(slot.name, part, slot.shape, ORIGIN)
                    if slot.target.numel():
                        kept = _kept(slot.part_of(part), slot.target.device, borrowed=self._borrowed)
                        self._staged[index, slot.name] = kept
        except ConfigError as error:
            raise InvalidRequest(str(error), param="names") from None
        if not known:
            raise InvalidRequest(f"The model has no tensor {name}: use the names of its checkpoint.", param="names")

    def _tensors_of(self, destination: Destination, name: str,
                    tensor: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
        unpacked: Iterable[tuple[str, LazyTensor]] = ((name, tensor),)
        if destination.unpack is not None:
            unpacked = destination.unpack(name, tensor, self._find)
        for own_name, part in unpacked:
            yield from ((own_name, part),) if destination.parts is None else destination.parts(own_name, part)

    def _find(self, name: str) -> LazyTensor:
        if name not in self._packed:
            raise ConfigError(f"The update lacks {name}, which is read with the others of its layer: send them in one "
                              "request.")
        return InMemory(self._packed[name])

    def merged(self, later: Staging) -> Staging:
        """Returns this one with what a later part of the same update has staged."""
        result = Staging(self._destinations)
        result._staged = self._staged | later._staged
        result.digests = self.digests | later.digests
        return result

    @torch.no_grad()
    def apply(self) -> None:
        """Copies all staged slices over the models' weights, at their addresses, and empties the staging. No step may
        be in flight."""
        filled: list[Slot] = []
        targets: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for index, destination in enumerate(self._destinations):
            for slot in destination.slots():
                # A slot without a target takes nothing, and another one may have its name.
                part = self._staged.pop((index, slot.name), None) if slot.target.numel() else None
                if part is None:
                    continue
                filled.append(slot)
                target = slot.target
                plain = slot.load is None and slot.memory is None and part.shape == target.shape
                if plain and part.device == target.device:
                    targets.append(target)
                    parts.append(part)
                elif plain and part.dtype == target.dtype:
                    target.copy_(part, non_blocking=True)  # no other copy on the device, where there may be no room
                else:
                    slot.write(part.to(target.device, non_blocking=True))
        assert not self._staged, "slots left the model while their tensors were staged"
        if targets:
            torch._foreach_copy_(targets, parts)  # one call: a mixture of experts has 30,000 slots
        finish_loading(filled)
        if filled and filled[0].target.is_cuda:
            torch.cuda.synchronize(filled[0].target.device)  # before the staging's memory is used again


def _kept(part: torch.Tensor, device: torch.device, *, borrowed: bool) -> torch.Tensor:
    """Returns a slice that keeps no more memory than its own, of ``borrowed`` memory a copy: on the device where there
    is room, else in pinned host memory."""
    if device.type == "cuda":
        if not _has_room(device, part.nbytes):
            return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
        if not part.is_cuda:
            return upload(part, device)
    return part if not borrowed and part.nbytes == part.untyped_storage().nbytes() else part.clone()


def _has_room(device: torch.device, num_bytes: int) -> bool:
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused - num_bytes > _SPARE_BYTES
