"""The weights of a running rank as they are in its memory, sent to a rank of an equal server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import torch

from ..api.errors import ConfigError
from ..api.identity import ModelIdentity
from .slots import Slot


class Channel(Protocol):
    """A process group of two, of which the sender is rank 0."""

    device: torch.device

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites the receiver's ``tensor`` with the sender's."""


class TensorFacts(msgspec.Struct, frozen=True):
    """A slot's name and type, the shape of its part on this rank, and where that begins in the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


class Manifest(msgspec.Struct, frozen=True):
    """What is sent: the identity of the weights, their version's name, and the tensors in their order."""

    identity: ModelIdentity
    weight_version: str
    tensors: tuple[TensorFacts, ...]


def check_sendable(slots: Iterable[Slot]) -> None:
    """Raises ConfigError for weights that are not held as the checkpoint has them."""
    for slot in slots:
        if slot.load is not None or slot.finish is not None or slot.memory is not None:
            raise ConfigError(f"{slot.name} is quantized, repacked or in host memory: such weights are not sent to "
                              "other servers. Let them load the checkpoint.")


@torch.no_grad()
def send_weights(channel: Channel, slots: Sequence[Slot], identity: ModelIdentity, weight_version: str) -> int:
    """Sends a manifest, then all tensors of this rank; returns their bytes."""
    kept = [slot for slot in slots if slot.target.numel()]
    content = msgspec.msgpack.encode(Manifest(identity, weight_version, tuple(map(_facts, kept))))
    channel.broadcast(torch.tensor([len(content)], dtype=torch.int64, device=channel.device))
    channel.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(channel.device))
    for slot in kept:
        channel.broadcast(slot.target.contiguous())
    return sum(slot.target.nbytes for slot in kept)


@torch.no_grad()
def receive_weights(channel: Channel, slots: Sequence[Slot]) -> Manifest:
    """Overwrites this rank's weights with those that ``send_weights`` sends. Raises ConfigError, with no weight
    received, where the sender's are laid out otherwise."""
    size = int(channel.broadcast(torch.zeros(1, dtype=torch.int64, device=channel.device)).item())
    content = channel.broadcast(torch.empty(size, dtype=torch.uint8, device=channel.device))
    manifest = msgspec.msgpack.decode(bytes(content.cpu().numpy()), type=Manifest)
    kept = [slot for slot in slots if slot.target.numel()]
    for sent, slot in zip(manifest.tensors, kept):
        if sent != _facts(slot):
            raise ConfigError(f"The seed instance sends {sent.name} as {sent.dtype}{list(sent.shape)}, and this server "
                              f"has {slot.name} as {_facts(slot).dtype}{list(slot.target.shape)}: start both with the "
                              "same model, --dtype and parallel sizes.")
    if len(manifest.tensors) != len(kept):
        raise ConfigError(f"The seed instance has {len(manifest.tensors)} tensors on this rank, and this server "
                          f"{len(kept)}: start both with the same model and parallel sizes.")
    for slot in kept:
        whole = slot.target.is_contiguous()
        part = slot.target if whole else torch.empty_like(slot.target, memory_format=torch.contiguous_format)
        channel.broadcast(part)
        if not whole:
            slot.target.copy_(part)
    return manifest


def _facts(slot: Slot) -> TensorFacts:
    return TensorFacts(slot.name, str(slot.target.dtype).removeprefix("torch."), tuple(slot.target.shape), slot.start)
