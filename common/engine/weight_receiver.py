"""Receives weights from trainers on one rank: beside the steps, into a staging area, from which they are applied."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..api.errors import Conflict, InvalidRequest
from ..commands.weights_from_tensor import TensorForm
from ..distributed.tp import TPGroup
from ..distributed.update_group import UpdateGroup, join_update_group
from ..runner.model_runner import ModelRunner
from ..runner.weight_inspection import digests_of, read_rows, stored_tensors
from ..weights.custom_loaders import WeightLoader, load_by
from ..weights.digest import combined_digest, tensor_digest
from ..weights.pickled import unpickled
from ..weights.pushed import NamedTensor, dtype_of, from_safetensors, num_bytes, split_bucket
from ..weights.shared_tensors import map_tensors
from ..weights.slots import Slot, finish_loading
from ..weights.staging import Staging
from .background import BackgroundTasks

_MAX_REASONS = 3


@dataclass(frozen=True)
class Applied:
    """The outcome of an update: ``num_tensors``, of which this rank has ``num_bytes``, were applied in ``seconds``."""

    num_tensors: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.num_tensors} tensors are applied: {self.num_bytes} bytes a rank in {self.seconds:.4f} s."


class WeightReceiver:
    """Receives on one rank. All ranks make the same calls in the same order, from their loops; what waits for a trainer
    runs in the background, and ends on all of them with the same outcome.
    """

    def __init__(self, world: TPGroup, runner: ModelRunner, timeout: float,
                 loaders: Mapping[str, WeightLoader] = MappingProxyType({})):
        """``timeout``: seconds to wait for a trainer. ``loaders``: those of --custom-weight-loader."""
        self._loaders = loaders
        self._world = world
        self._runner = runner
        self._timeout = timeout
        self._background = BackgroundTasks(world, runner.device, timeout)
        self._groups: dict[str, UpdateGroup] = {}
        self._staging: Staging | None = None
        self._digests: dict[str, str] = {}  # on rank 0, of what was pushed over the checkpoint's weights
        self._snapshot: dict[str, torch.Tensor] | None = None
        self.begun = False

    # ------------------------------------------------------------------ groups

    def join(self, backend: str, address: str, port: int, rank_offset: int, world_size: int,
             name: str) -> Future[str]:
        """Joins a group with a trainer as rank ``rank_offset`` + this rank. Raises InvalidRequest, Conflict."""
        if name in self._groups:
            raise Conflict(f"The group {name} exists: send /destroy_weights_update_group first.", param="group_name")
        rank, size = rank_offset + self._world.rank, self._world.size
        if not 1 <= rank_offset <= world_size - size:
            raise InvalidRequest(f"rank_offset must be from 1 to world_size - {size}, because the server has {size} "
                                 "ranks.", param="rank_offset")
        if backend == "nccl" and self._runner.device.type != "cuda":
            raise InvalidRequest("The backend nccl needs GPUs, and this server runs on a CPU: give gloo.",
                                 param="backend")

        def task() -> str:
            self._groups[name] = join_update_group(backend, address, port, rank, world_size, name,
                                                   device=self._runner.device, timeout=self._timeout)
            return f"The group {name} has {world_size} members."

        return self._background.start(task, undo=lambda: self._drop(name))

    def leave(self, name: str) -> str:
        """Leaves a group. Raises InvalidRequest where there is none of this name."""
        self._group(name)
        self._drop(name)
        return f"The group {name} is gone."

    def _drop(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            group.close()

    def _group(self, name: str) -> UpdateGroup:
        if name not in self._groups:
            raise InvalidRequest(f"There is no group {name}: send /init_weights_update_group first.",
                                 param="group_name")
        return self._groups[name]

    # ------------------------------------------------------------------ tensors

    def receive(self, group_name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]],
                *, flattened: bool) -> Future[str]:
        """Stages tensors that rank 0 of a group broadcasts, in order, or all in one tensor of bytes (``flattened``).

        Raises InvalidRequest where they cannot be received. Those that do not fit the model are received all the same:
        the trainer has begun to send them, and would wait.
        """
        group = self._group(group_name)
        kinds = [dtype_of(name) for name in dtypes]
        if not names or not len(names) == len(kinds) == len(shapes):
            raise InvalidRequest("names, dtypes and shapes must have an entry for each tensor.", param="names")

        def tensors() -> Iterator[NamedTensor]:
            if flattened:
                total = sum(num_bytes(kind, shape) for kind, shape in zip(kinds, shapes))
                bucket = group.broadcast(torch.empty(total, dtype=torch.uint8, device=group.device))
                yield from split_bucket(bucket, names, kinds, shapes)
                return
            for name, kind, shape in zip(names, kinds, shapes):
                yield name, group.broadcast(torch.empty(tuple(shape), dtype=kind, device=group.device))

        return self.stage(tensors)

    def stage_contents(self, contents: Sequence[bytes], form: TensorForm, *, draft: bool,
                       loader: str | None = None) -> Future[str]:
        """Stages the tensors of a file or pickle, one for all ranks or one for each, which ``loader`` converts; see
        ``stage``."""
        if len(contents) not in (1, self._world.size):
            raise InvalidRequest(f"serialized_named_tensors has {len(contents)} entries: send one for all ranks, or "
                                 f"one for each of the {self._world.size}.", param="serialized_named_tensors")
        content = contents[self._world.rank if len(contents) > 1 else 0]

        def tensors() -> list[NamedTensor]:
            if form == "safetensors":
                return from_safetensors(content)
            if form == "handles":
                return map_tensors(content, self._runner.device)
            return unpickled(content, self._world.rank, flattened=form == "pickled_bucket")

        if loader is None:
            return self.stage(tensors, draft=draft, borrowed=form == "handles")
        convert = self._loaders[loader]
        return self.stage(lambda: load_by(loader, convert, tensors()), draft=draft)

    def stage(self, tensors: Callable[[], Iterable[NamedTensor]], *, draft: bool = True,
              borrowed: bool = False) -> Future[str]:
        """Stages whole tensors, which the background gets from ``tensors``; without ``draft`` for the model alone. All
        of them are dropped, on all ranks, where one does not fit. ``borrowed``: see Staging."""
        if not self.begun:
            self._staging = None
        before = self._staging
        self._runner.hold_experts(True)

        def task() -> str:
            staging, sent = Staging(self._runner.destinations(draft=draft), borrowed=borrowed), tensors()
            try:
                reasons = list(self._add_all(staging, sent))
            finally:
                if borrowed and self._runner.device.type == "cuda":
                    torch.cuda.current_stream(self._runner.device).synchronize()  # before they are unmapped
            if reasons:
                more = f" And {len(reasons) - _MAX_REASONS} more." if len(reasons) > _MAX_REASONS else ""
                raise InvalidRequest(" ".join(reasons[:_MAX_REASONS]) + more, param="names")
            self._staging = staging if before is None else before.merged(staging)
            return f"{len(staging.digests)} tensors are staged."

        def undo() -> None:
            self._staging = before

        return self._background.start(task, undo)

    def _add_all(self, staging: Staging, tensors: Iterable[NamedTensor]) -> Iterator[str]:
        """Stages tensors; yields why some do not fit."""
        device, leads = self._runner.device, self._world.rank == 0  # a CPU takes minutes for large models' digests
        for name, tensor in tensors:
            try:
                staging.add(name, tensor, tensor_digest(tensor, device) if leads else "")
            except InvalidRequest as error:
                yield error.message
        try:
            staging.close()
        except InvalidRequest as error:
            yield error.message

    # ------------------------------------------------------------------ the update

    def begin(self) -> None:
        """Begins an update of several parts: what is staged from now on is applied together. Raises Conflict where one
        has begun."""
        if self.begun:
            raise Conflict("A weight update has begun: send /end_weight_update first.")
        self._staging, self.begun = None, True

    def discard(self) -> int:
        """Drops what is staged, and ends the update; returns how many tensors were staged."""
        dropped = 0 if self._staging is None else len(self._staging.digests)
        self._staging, self.begun = None, False
        self._runner.hold_experts(False)
        return dropped

    def would_change(self) -> bool:
        """Returns whether the staged tensors differ from the weights, as far as that is known. Raises InvalidRequest
        where none are staged."""
        if self._staging is None:
            raise InvalidRequest("No weights are staged: send /update_weights_from_tensor or one of its kind first.")
        changed = any(self._digests.get(name) != digest for name, digest in self._staging.digests.items())
        return bool(self._world.broadcast_bytes(bytes([changed]) if self._world.rank == 0 else None)[0])

    @torch.no_grad()
    def apply(self) -> Applied:
        """Copies the staged tensors over the weights, and ends the update. No step is in flight."""
        began, staging = time.perf_counter(), self._staging
        assert staging is not None
        size = staging.num_bytes
        staging.apply()
        self._digests |= staging.digests
        self._tell_runner()
        self.discard()
        return Applied(len(staging.digests), size, time.perf_counter() - began)

    # ------------------------------------------------------------------ inspection

    def read(self, name: str, num_rows: int) -> Any:
        """Returns the first rows of a tensor, put together from all ranks, as nested lists; raises InvalidRequest."""
        return read_rows(self._slots(), name, num_rows, self._world).tolist()

    def take_snapshot(self) -> int:
        """Copies this rank's weights to host memory; returns the bytes."""
        self._snapshot = {name: slot.content().to("cpu", copy=True) for name, slot in stored_tensors(self._slots())}
        return sum(tensor.nbytes for tensor in self._snapshot.values())

    def differing(self) -> list[str]:
        """Returns names of tensors that differ from the snapshot on any rank; raises InvalidRequest without one."""
        if self._snapshot is None:
            raise InvalidRequest("There is no snapshot: send the action snapshot first.", param="action")
        here = [name for name, slot in stored_tensors(self._slots())
                if tensor_digest(slot.content()) != tensor_digest(self._snapshot[name])]
        return [] if self._world.all_true(not here) else here or ["tensors of another rank"]

    def checksums(self) -> tuple[str, list[str]]:
        """Returns a checksum of all ranks' weights, and those of each."""
        own = int(combined_digest(digests_of(self._slots()))[:15], 16)
        ranks = [f"{each:015x}" for each in self._world.gather_ints(np.array([own])).flatten().tolist()]
        return combined_digest(ranks), ranks

    @torch.no_grad()
    def reset(self) -> None:
        """Overwrites this rank's weights with random values."""
        slots = self._slots()
        for _, slot in stored_tensors(slots):
            if slot.memory is not None:
                slot.memory.bring()
            if slot.kind.dummy is None:
                slot.target.copy_(torch.randn(slot.target.shape, device=slot.target.device))
            else:  # indices, for one, have a range
                generator = torch.Generator(slot.target.device).manual_seed(secrets.randbits(32))
                slot.fill(slot.kind.dummy(slot.shape, generator))
        finish_loading(slots)
        self._digests = {"": secrets.token_hex(8)}
        self._tell_runner()

    def _slots(self) -> list[Slot]:
        return [slot for destination in self._runner.destinations() for slot in destination.slots()]

    def _tell_runner(self) -> None:
        digest = combined_digest(self._digests).encode() if self._world.rank == 0 else None
        self._runner.weights_pushed(self._world.broadcast_bytes(digest).decode())

    def forget(self) -> None:
        """Forgets what was pushed: the weights are a checkpoint's again."""
        self.discard()
        self._digests.clear()

    def close(self) -> None:
        """Leaves all groups."""
        for name in list(self._groups):
            self._drop(name)
