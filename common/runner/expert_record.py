"""Records of the experts that tokens chose, for the endpoints ``/start_expert_distribution_record`` and its like.

Files have the names and the content of SGLang's: a dict that ``torch.load(path, weights_only=True)`` reads. Layers are
all of the model's, those without experts with zeros.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..api.errors import InvalidRequest
from ..config.server import ParallelArgs
from ..forward.forward_batch import ForwardBatch
from ..layers.moe import MoE
from .eplb import ExpertCounts, StepCounts

_EXTEND, _DECODE, _MIXED = 1, 2, 3  # SGLang's numbers of a step's kind


class Recorded(NamedTuple):
    """What a rank recorded."""

    content: dict[str, Any] | None
    """Of this rank's file; None where another rank's has it."""
    message: str


class Recording(Protocol):
    """One way to record. Ranks call each method together."""

    def start(self) -> None:
        """Forgets what was recorded."""

    def count_step(self) -> None:
        """Counts a step, before its forward pass."""

    def recorded(self) -> Recorded:
        """Returns what was recorded since the start. Waits for the device."""


class ExpertRecord:
    """The expert distribution between ``start`` and ``stop``. Ranks call each method together."""

    def __init__(self, recording: Recording | None, rank: int = 0):
        """``recording``: None where the layers do not count."""
        self._recording = recording
        self._rank = rank
        self._running = False
        self._last: Recorded | None = None

    def start(self) -> str:
        self._checked().start()
        self._running, self._last = True, None
        return "Recording the tokens of every expert."

    def stop(self) -> str:
        """Ends the recording; raises InvalidRequest where none was started."""
        recording = self._checked()
        if not self._running:
            raise InvalidRequest("Nothing is being recorded; call /start_expert_distribution_record first.")
        self._last, self._running = recording.recorded(), False
        return self._last.message

    def dump(self, folder: str) -> str:
        """Writes the current or last recording into ``folder``, a file of each rank that has one; returns the path of
        this rank's."""
        recording = self._checked()
        found = recording.recorded() if self._running else self._last
        if found is None:
            raise InvalidRequest("Nothing was recorded; call /start_expert_distribution_record first.")
        each = "" if found.content is None or "records" not in found.content else f"_{self._rank}"
        file = Path(folder).expanduser() / f"expert_distribution_recorder_{time.time()}{each}.pt"
        if found.content is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(found.content, file)
            except (OSError, RuntimeError) as error:  # torch's writer raises the latter
                reason = error.strerror if isinstance(error, OSError) else error
                raise InvalidRequest(f"Cannot write {file}: {reason}.", param="output_dir") from None
        return str(file)

    def count_step(self) -> None:
        """Counts a step, before its forward pass."""
        if self._running and self._recording is not None:
            self._recording.count_step()

    @contextmanager
    def step(self, batch: ForwardBatch) -> Iterator[None]:
        """Records what is computed in the context, a step of ``batch``."""
        yield
        if self._running and isinstance(self._recording, TokenRecording):
            self._recording.add(batch)

    def _checked(self) -> Recording:
        if self._recording is None:
            raise InvalidRequest("The experts' tokens are not counted: start the server with "
                                 "--expert-distribution-recorder-mode stat.")
        return self._recording


def expert_record(args: ParallelArgs, counts: ExpertCounts | None, num_layers: int) -> ExpertRecord:
    """Returns the record that the flags ask for, of the layers ``counts`` of a model with ``num_layers``."""
    if counts is None:
        return ExpertRecord(None)
    size = None if args.expert_distribution_recorder_buffer_size < 0 else args.expert_distribution_recorder_buffer_size
    make: Callable[[ExpertCounts, int, int | None], Recording] = StatRecording
    if args.expert_distribution_recorder_mode == "per_pass":
        make = PassRecording
    elif args.expert_distribution_recorder_mode == "per_token":
        make = TokenRecording
    return ExpertRecord(make(counts, num_layers, size), counts.share.group.rank)


class StatRecording:
    """The tokens of each logical expert: of the last ``num_steps`` steps one by one, or of all as one. The first rank
    has the file."""

    def __init__(self, counts: ExpertCounts, num_layers: int, num_steps: int | None = None):
        self._counts = counts
        self._num_layers = num_layers
        self._steps = None if num_steps is None else StepCounts(counts, num_steps)
        self._begin: np.ndarray | None = None

    def start(self) -> None:
        if self._steps is not None:
            self._steps.start()
        else:
            self._begin = self._counts.totals()

    def count_step(self) -> None:
        if self._steps is not None:
            self._steps.add()

    def recorded(self) -> Recorded:
        if self._steps is not None:
            loads = self._steps.loads()
        else:
            assert self._begin is not None
            loads = (self._counts.totals() - self._begin)[None]
        logical = np.zeros((len(loads), self._num_layers, loads.shape[2]), np.int64)
        logical[:, list(self._counts.layers)] = loads
        content = {"rank": 0, "logical_count": torch.from_numpy(logical),
                   "average_utilization_rate_over_window": None}
        return Recorded(content if self._counts.share.group.rank == 0 else None,
                        f"Recorded {int(loads.sum())} choices of experts.")


class _Records:
    """A record of each of the last steps, in the files of ranks that count tokens of their own, or of the first."""

    def __init__(self, counts: ExpertCounts, num_layers: int, num_steps: int | None):
        share = counts.share
        self._layers = counts.layers
        self._num_layers = num_layers
        self._rank = share.group.rank
        self._has_file = share.uses_all_to_all or share.group.rank == 0
        self._records: deque[dict[str, Any]] = deque(maxlen=num_steps)
        self._num_steps = 0

    @property
    def num_physical(self) -> int:
        placement = self._first.placement
        return len(self._logical_of(self._first)) if placement is None else placement.physical_to_logical.size

    @property
    def _first(self) -> MoE:
        return next(iter(self._layers.values()))

    def clear(self) -> None:
        self._records.clear()
        self._num_steps = 0

    def add(self, content: dict[str, Any]) -> None:
        """Adds the next step's."""
        self._records.append({"forward_pass_id": self._num_steps, "rank": self._rank, "gatherer_key": "primary",
                              **content})
        self._num_steps += 1

    def all_layers(self, values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Returns ``values`` [layers with experts, ...] with rows for the other layers, on the host in int32."""
        found = torch.full((self._num_layers, *values.shape[1:]), fill, dtype=torch.int32)
        found[list(self._layers)] = values.to("cpu", torch.int32)
        return found

    def recorded(self) -> Recorded:
        map_ = torch.arange(self.num_physical).repeat(self._num_layers, 1) % len(self._logical_of(self._first))
        for index, layer in self._layers.items():
            map_[index] = torch.from_numpy(self._logical_of(layer))
        content = {"records": list(self._records), "last_physical_to_logical_map": map_}
        return Recorded(content if self._has_file else None, f"Recorded {len(self._records)} steps.")

    @staticmethod
    def _logical_of(layer: MoE) -> np.ndarray:
        """The logical expert of each physical one."""
        if layer.placement is not None:
            return layer.placement.physical_to_logical.ravel()
        assert layer.counts is not None
        return np.arange(len(layer.counts))


class PassRecording:
    """The tokens of each physical expert in each step. The sum over the files is that of all tokens."""

    def __init__(self, counts: ExpertCounts, num_layers: int, num_steps: int | None = None):
        self._layers = counts.layers
        self._records = _Records(counts, num_layers, num_steps)
        self._before: torch.Tensor | None = None  # the counts before the step that is not recorded yet
        for layer in self._layers.values():
            assert layer.counts is not None
            layer.physical_counts = layer.counts.new_zeros(self._records.num_physical)

    def start(self) -> None:
        self._records.clear()
        self._before = None

    def count_step(self) -> None:
        self._end_step()
        self._before = self._counted()

    def recorded(self) -> Recorded:
        self._end_step()
        return self._records.recorded()

    def _end_step(self) -> None:
        if self._before is not None:
            counted = self._counted() - self._before
            self._records.add({"global_physical_count": self._records.all_layers(counted)})
            self._before = None

    def _counted(self) -> torch.Tensor:
        return torch.stack([layer.physical_counts for layer in self._layers.values()
                            if layer.physical_counts is not None])


class TokenRecording:
    """The physical experts of each token in each step, with its id and position. Kernels are launched one by one."""

    def __init__(self, counts: ExpertCounts, num_layers: int, num_steps: int | None = None):
        self._layers = counts.layers
        self._records = _Records(counts, num_layers, num_steps)
        for layer in self._layers.values():
            layer.keeps_chosen = True

    def start(self) -> None:
        self._records.clear()

    def count_step(self) -> None:
        pass

    def recorded(self) -> Recorded:
        return self._records.recorded()

    def add(self, batch: ForwardBatch) -> None:
        """Records a step that was computed. Waits for the device."""
        rows = batch.num_tokens
        lens = np.diff(batch.qo_indptr_cpu)
        chosen = torch.stack([layer.chosen[:rows] for layer in self._layers.values() if layer.chosen is not None])
        counted = torch.zeros(len(chosen), self._records.num_physical, dtype=torch.int64, device=chosen.device)
        flat = chosen.flatten(1)
        counted.scatter_add_(1, flat, torch.ones_like(flat))
        self._records.add({
            "input_ids": batch.input_ids.tolist(), "positions": batch.positions.tolist(),
            "extend_seq_lens": None if batch.is_decode else lens.tolist(),
            "forward_mode": _DECODE if batch.is_decode else _MIXED if (lens == 1).any() else _EXTEND,
            "topk_ids_of_layer": self._records.all_layers(chosen, -1), "misc_objects": [],
            "global_physical_count": self._records.all_layers(counted)})
