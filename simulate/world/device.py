"""An executor on the virtual clock: each step takes what the cost model says, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...common.request.step_input import StepInput
from ...common.request.step_output import StepOutput
from ..costs.model import StepCosts

TOKEN = 9
"""The token that every simulated step samples; it ends no request."""


@dataclass(slots=True)
class VirtualStep:
    """A step in flight, whose tokens are known at time ``end``. Implements the protocol ``Launched``."""

    device: VirtualDevice
    step: StepInput
    end: float

    def wait(self) -> StepOutput:
        device = self.device
        device.now = max(device.now, self.end)
        count = len(self.step.sample_index)
        return StepOutput(self.step.sample_index, [1] * count, [TOKEN] * count)


@dataclass
class Usage:
    """Use of a device: seconds of its steps by kind, their number, and rows."""

    prefill: float = 0.0
    decode: float = 0.0
    num_prefill: int = 0
    num_decode: int = 0
    prompt_tokens: int = 0
    rows: int = 0


class VirtualDevice:
    """The interface of an Executor that schedulers use. ``now`` is the time of the engine's host, in seconds, which
    runs ahead of the events' clock while the engine works; ``free`` the time at which the device has nothing to do."""

    asynchronous = True
    drafts_from_tokens = False

    def __init__(self, costs: StepCosts, layer_groups: int = 1):
        self.costs = costs
        self.now = 0.0
        self.free = 0.0
        self.usage = Usage()
        self._layer_groups = layer_groups

    def launch(self, step: StepInput, after_group: Callable[[int, Any], None] | None = None) -> VirtualStep:
        costs, usage = self.costs, self.usage
        seconds = self.seconds(step)
        if step.num_prefill:  # the device begins with the first of many launches
            begin = max(self.free, self.now)
            self.now += costs.host_prefill / 1e3
        else:
            self.now += costs.host_decode / 1e3
            begin = max(self.free, self.now)
        self.free = end = max(begin + seconds, self.now)
        if step.num_prefill:
            usage.prefill += seconds
            usage.num_prefill += 1
        else:
            usage.decode += seconds
            usage.num_decode += 1
        usage.rows += step.num_decode_rows
        if after_group is not None:
            for group in range(self._layer_groups):
                after_group(group, begin + (end - begin) * (group + 1) / self._layer_groups)
        return VirtualStep(self, step, end)

    def seconds(self, step: StepInput) -> float:
        """The time of a step."""
        first, costs = step.num_prefill, self.costs
        total = 0.0
        if first:
            q_lens, starts = step.q_lens[:first], step.starts[:first]
            tokens = int(q_lens.sum())
            self.usage.prompt_tokens += tokens
            total = costs.prefill(tokens, float((q_lens * (starts + q_lens / 2)).sum()))
        if rows := step.num_decode_rows:
            decode = costs.decode(rows, int(step.starts[first:].sum()) + rows)
            total = (total + decode) * costs.mixed if first else decode
        return total / 1e3

    def event(self) -> float:
        """The time at which all that was launched has run."""
        return self.free

    def run_idle_batch(self) -> None:
        """There are no other data-parallel ranks."""
