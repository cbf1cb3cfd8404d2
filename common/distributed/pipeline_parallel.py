"""Pipeline parallelism: the stages that a model's layers are split into, and the channels between them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from ..api.errors import ConfigError

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_OUTSIDE_OF_LAYERS = ("model.embed_tokens.", "model.norm.", "lm_head.", "score.")


class PPLink:
    """A one-way channel from a rank of one stage to the rank with its index in the next, for tensors of one device.

    Tensors on a GPU are sent with NCCL, ordered after the sender's and before the receiver's stream: neither host
    waits. Tensors on a CPU are sent with gloo, and the receiver waits for them. With ``through_host`` so are tensors on
    a GPU, and the sender waits for its GPU, too."""

    def __init__(self, group: dist.ProcessGroup, max_in_flight: int, *, through_host: bool = False):
        """``group`` has two ranks, the sender first. A sent tensor is referenced until ``max_in_flight`` more sends
        have followed; by then it must have been received."""
        self._group = group
        self._max_in_flight = max_in_flight
        self._through_host = through_host
        self._sent: deque[list[tuple[dist.Work, torch.Tensor]]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends the tensors without waiting; they must not be written to any more."""
        sending = []
        for tag, tensor in enumerate(tensors):
            tensor = tensor.cpu().contiguous() if self._through_host else tensor.contiguous()
            work = dist.isend(tensor, group=self._group, tag=tag, group_dst=1)
            assert work is not None
            sending.append((work, tensor))
        self._sent.append(sending)
        if len(self._sent) > self._max_in_flight:
            for work, _ in self._sent.popleft():
                work.wait()

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills ``tensors`` with those of a ``send``, which have their shapes and types."""
        buffers = tensors
        if self._through_host:
            buffers = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        receiving = [dist.irecv(tensor, group=self._group, tag=tag, group_src=0) for tag, tensor in enumerate(buffers)]
        for work in receiving:
            assert work is not None
            work.wait()
        if self._through_host:
            for tensor, arrived in zip(tensors, buffers):
                tensor.copy_(arrived)


class PPStages:
    """One rank's stage in a pipeline of ``size`` stages: it computes the layers of stage ``rank``.

    The first stage embeds tokens, the last one has the final norm and the head. ``partition`` holds the number of
    layers of each stage; without it they are split as evenly as possible, and the first stages have one more."""

    def __init__(self, rank: int = 0, size: int = 1, *, from_previous: PPLink | None = None,
                 to_next: PPLink | None = None,
                 partition: Sequence[int] = ()):
        assert (from_previous is None) == (rank == 0) and (to_next is None) == (rank == size - 1)
        self.rank = rank
        self.size = size
        self._from_previous = from_previous
        self._to_next = to_next
        self._partition = tuple(partition)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def layers(self, num_layers: int) -> range:
        """Returns this stage's layers; raises ConfigError for fewer layers than stages, or a partition of another
        number of layers."""
        return self.layers_of_stages(num_layers)[self.rank]

    def layers_of_stages(self, num_layers: int) -> list[range]:
        """Returns the layers of every stage; raises ConfigError as ``layers`` does."""
        if num_layers < self.size:
            raise ConfigError(f"--pp-size {self.size} is more than the model's {num_layers} layers.")
        each, more = divmod(num_layers, self.size)
        counts = self._partition or tuple(each + (stage < more) for stage in range(self.size))
        if sum(counts) != num_layers:
            raise ConfigError(f"--pp-layer-partition names {sum(counts)} layers, and the model has {num_layers}.")
        ends = list(accumulate(counts))
        return [range(end - count, end) for end, count in zip(ends, counts)]

    def on_other_stage(self, num_layers: int) -> Callable[[str], bool]:
        """Returns a predicate: whether another stage loads the tensor of this name (another layer's, or the embedding's
        or the head's)."""
        layers = self.layers(num_layers)

        def is_on_other_stage(name: str) -> bool:
            if layer := _LAYER.match(name):
                return int(layer[1]) < num_layers and int(layer[1]) not in layers
            return self.size > 1 and name.startswith(_OUTSIDE_OF_LAYERS)

        return is_on_other_stage

    def send(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Sends hidden states and their residual ``[T, hidden]`` to the next stage, without waiting."""
        assert self._to_next is not None
        self._to_next.send((x, residual))

    def receive(self, rows: int, width: int, dtype: torch.dtype,
                device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Receives hidden states and their residual ``[rows, width]`` of the previous stage's next step."""
        assert self._from_previous is not None
        x, residual = (torch.empty(rows, width, dtype=dtype, device=device) for _ in range(2))
        self._from_previous.receive((x, residual))
        return x, residual

    def __repr__(self) -> str:
        return f"Stages({self.rank} of {self.size})"
