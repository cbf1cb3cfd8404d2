"""A server of any role whose device takes the time of a cost table: processes, sockets, schedulers and transfers are
real, and no model is computed, so that a CPU serves with a GPU's step times.

    PACE=4 python -m baton.tests.helpers.paced_server --model-path tinychat --device cpu [any flags of a server]

``PACE`` (environment) multiplies the table's times, for a machine with fewer cores than the server's processes.
``PACE_COSTS`` names the table.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any, cast

from baton.common.config.cli import parse
from baton.common.config.server import ServerConfig
from baton.common.engine.rank_spec import RankSpec
from baton.common.request.step_input import StepInput
from baton.common.request.step_output import StepOutput
from baton.simulate.costs.model import StepCosts, load
from baton.simulate.world.device import VirtualDevice

TOKEN = 7


class PacedEvent:
    """A CUDA event that happens at a time."""

    def __init__(self, time: float):
        self._time = time

    def query(self) -> bool:
        return time.perf_counter() >= self._time


class PacedStep:
    def __init__(self, step: StepInput, end: float):
        self.step = step
        self._end = end

    def wait(self) -> StepOutput:
        if (rest := self._end - time.perf_counter()) > 0:
            time.sleep(rest)
        count = len(self.step.sample_index)
        return StepOutput(self.step.sample_index, [1] * count, [TOKEN] * count)


class PacedExecutor:
    """An Executor whose steps run one after the other on a device that takes what the table says."""

    asynchronous = True
    drafts_from_tokens = False

    def __init__(self, costs: StepCosts, layer_groups: int):
        self._seconds = VirtualDevice(costs).seconds
        self._layer_groups = layer_groups
        self._free = 0.0

    def launch(self, step: StepInput, after_group: Any = None) -> PacedStep:
        begin = max(self._free, time.perf_counter())
        self._free = end = begin + self._seconds(step)
        for group in range(self._layer_groups if after_group is not None else 0):
            after_group(group, PacedEvent(begin + (end - begin) * (group + 1) / self._layer_groups))
        return PacedStep(step, end)

    def event(self) -> PacedEvent:
        return PacedEvent(self._free)

    def run_idle_batch(self) -> None:
        """There are no other data-parallel ranks."""


def rank_main(spec: RankSpec) -> None:
    import torch

    from baton.common.engine.rank import EngineParts, run_rank, unified_scheduler
    from baton.decode import rank as decode
    from baton.prefill import rank as prefill

    make = {"null": unified_scheduler, "prefill": prefill._make_scheduler, "decode": decode._make_scheduler}
    costs = load(os.environ.get("PACE_COSTS", "llama-3-8b-h200")).steps.scaled(float(os.environ.get("PACE", "1")))

    def paced(parts: EngineParts) -> Any:
        torch.set_num_threads(1)
        executor = PacedExecutor(costs, sum(len(pool.layout.groups) for pool in parts.runner.pools))
        return make[spec.config.disaggregation.disaggregation_mode](replace(parts, executor=cast(Any, executor)))

    run_rank(spec, paced)


def main() -> int:
    from baton.common.serving.server import run_server
    from baton.kvtransfer.bootstrap import BootstrapServer

    config = parse(ServerConfig, prog="paced_server", description=__doc__)
    args = config.disaggregation
    address = config.http.host, args.disaggregation_bootstrap_port
    services = [lambda: BootstrapServer(*address, secret=args.cluster_secret)]
    return run_server(config, rank_main, services if args.disaggregation_mode == "prefill" else ())


if __name__ == "__main__":
    sys.exit(main())
