"""A server as it is, which notes its steps (step_trace.py) where the environment asks for it.

    STEP_TRACE=FOLDER python -m baton.tests.bench.traced_server --model-path ... [any flags of a server]
"""

from __future__ import annotations

import dataclasses
import sys

from ...common.config.cli import parse
from ...common.config.server import ServerConfig
from ...common.engine.rank_spec import RankSpec
from ...common.engine_client.rank_processes import RankTarget
from ...common.serving.server import run_server
from .step_trace import FrontTrace, folder


def run(rank_main: RankTarget, name: str) -> int:
    """A server whose front is traced where the environment asks for it; its exit code."""
    config = parse(ServerConfig, prog=name, description=f"See tests/bench/{name}.py.")
    into = folder()
    if into is None:
        return run_server(config, rank_main)
    trace = FrontTrace()
    trace.watch()
    code = run_server(config, rank_main)
    trace.save(into)
    return code


def rank_main(spec: RankSpec) -> None:
    from ...common.engine.rank import EngineParts, run_rank, unified_scheduler
    from .host_parts import PARTS, watch, watch_classes
    from .step_trace import EngineTrace

    def traced(parts: EngineParts):  # type: ignore[no-untyped-def]
        into = folder()
        if into is None:
            return unified_scheduler(parts)
        trace = EngineTrace(into, PARTS)
        scheduler = unified_scheduler(dataclasses.replace(parts, executor=trace.executor(parts.executor)))
        watch_classes()
        watch(scheduler, parts)  # type: ignore[arg-type]
        trace.watch(scheduler, parts.tracker)
        return scheduler

    run_rank(spec, traced)


if __name__ == "__main__":
    sys.exit(run(rank_main, "traced_server"))
