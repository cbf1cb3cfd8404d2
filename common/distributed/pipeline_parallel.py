"""Pipeline parallelism: the stages that a model's layers are parted into, and the way of hidden states through them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..api.errors import ConfigError

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_OUTSIDE_OF_LAYERS = ("model.embed_tokens.", "model.norm.", "lm_head.", "score.")


class PPLink:
    """From a rank of one stage to the rank in its place of the next, for tensors of one device.

    Tensors on a GPU travel over NCCL, behind what the sender's stream computes and ahead of what the receiver's stream
    computes next: neither host waits. On a CPU they travel over gloo, and the receiver waits for them; so do those on a
    GPU that go ``through_host`` memory, and the sender waits for its GPU, too.
    """

    def __init__(self, group: dist.ProcessGroup, kept: int, *, through_host: bool = False):
        """``group`` has two ranks, the sender first. A tensor is kept until ``kept`` more sends have followed; by then
        it must have been received."""
        self._group = group
        self._kept = kept
        self._through_host = through_host
        self._sent: deque[list[tuple[dist.Work, torch.Tensor]]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Returns at once; nobody may write to the tensors any more."""
        sending = []
        for tag, tensor in enumerate(tensors):
            tensor = tensor.cpu().contiguous() if self._through_host else tensor.contiguous()
            work = dist.isend(tensor, group=self._group, tag=tag, group_dst=1)
            assert work is not None
            sending.append((work, tensor))
        self._sent.append(sending)
        if len(self._sent) > self._kept:
            for work, _ in self._sent.popleft():
                work.wait()

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill ``tensors`` with those of a ``send``, which have their shapes and types."""
        taken = tensors
        if self._through_host:
            taken = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        receiving = [dist.irecv(tensor, group=self._group, tag=tag, group_src=0) for tag, tensor in enumerate(taken)]
        for work in receiving:
            assert work is not None
            work.wait()
        if self._through_host:
            for tensor, arrived in zip(tensors, taken):
                tensor.copy_(arrived)


class PPStages:
    """One rank's place in a pipeline of ``size`` stages: it computes the layers of stage ``index``.

    The first stage embeds tokens, the last one has the final norm and the head. ``partition`` says how many layers each
    stage has; without it they are shared as evenly as possible, the first stages having one more.
    """

    def __init__(self, index: int = 0, size: int = 1, *, inward: PPLink | None = None, outward: PPLink | None = None,
                 partition: Sequence[int] = ()):
        assert (inward is None) == (index == 0) and (outward is None) == (index == size - 1)
        self.index = index
        self.size = size
        self._inward = inward
        self._outward = outward
        self._partition = tuple(partition)

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.size - 1

    def layers(self, num_layers: int) -> range:
        """This stage's layers. Raises ConfigError where there are too few, or the partition is of another number."""
        if num_layers < self.size:
            raise ConfigError(f"--pp-size {self.size} is more than the model's {num_layers} layers.")
        each, more = divmod(num_layers, self.size)
        counts = self._partition or tuple(each + (stage < more) for stage in range(self.size))
        if sum(counts) != num_layers:
            raise ConfigError(f"--pp-layer-partition names {sum(counts)} layers, and the model has {num_layers}.")
        begin = sum(counts[:self.index])
        return range(begin, begin + counts[self.index])

    def elsewhere(self, num_layers: int) -> Callable[[str], bool]:
        """Tells of a tensor's name whether another stage has it: another layer's, or the embedding's or the head's."""
        layers = self.layers(num_layers)

        def of_another(name: str) -> bool:
            if found := _LAYER.match(name):
                return int(found[1]) < num_layers and int(found[1]) not in layers
            return self.size > 1 and name.startswith(_OUTSIDE_OF_LAYERS)

        return of_another

    def send(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Hidden states and their residual ``[T, hidden]`` to the next stage; returns at once."""
        assert self._outward is not None
        self._outward.send((x, residual))

    def receive(self, rows: int, width: int, dtype: torch.dtype,
                device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """What the stage before sends of its next step."""
        assert self._inward is not None
        x, residual = (torch.empty(rows, width, dtype=dtype, device=device) for _ in range(2))
        self._inward.receive((x, residual))
        return x, residual

    def __repr__(self) -> str:
        return f"Stages({self.index} of {self.size})"
