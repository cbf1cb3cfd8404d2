"""``bench_offline_throughput``: how much an engine in this process answers, without a server between."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict

from ..config.cli import parse
from ..config.command import INTERRUPTED
from ..config.server.sglang_flags import SGLANG_FLAGS
from .client.engine_sender import Engine, EngineSender
from .client.load import Load
from .command import reported, until_interrupted
from .offline_args import BenchOffline
from .report.figures import Figures, figures
from .report.progress import Progress
from .report.report import append_line, check_writable
from .report.table import table
from .report.tally import Tally
from .workloads.own_workload import own_workload
from .workloads.vocabulary import Vocabulary
from .workloads.workload import Conversation, num_requests, single

MakeEngine = Callable[[BenchOffline], AbstractContextManager[Engine]]


def main(make_engine: MakeEngine, argv: Sequence[str] | None = None) -> None:
    config = parse(BenchOffline, argv, foreign=SGLANG_FLAGS, prog="bench_offline_throughput", description=(
        "Measure the throughput of an engine in this process."))
    sys.exit(reported("bench_offline_throughput", lambda: run(config, make_engine)))


def run(config: BenchOffline, make_engine: MakeEngine) -> int:
    """Measure and report. Returns 1 where no request was answered, 130 after Ctrl-C."""
    args = config.offline
    check_writable(args.output_file, "--output-file")
    conversations = own_workload(config.dataset, config.model)
    total = num_requests(conversations)
    with make_engine(config) as engine:
        print(f"{config.model.model_path}, {'prefill and decode engine' if args.pair else 'one engine'}: {total:,} "
              f"requests of {config.dataset.dataset_name}, {config.most_open:,} at once at most", flush=True)
        load, interrupted = asyncio.run(_measure(config, engine, conversations))
    found = figures(load.answers, load.duration, interrupted=total - len(load.answers))
    errors = {answer.failure.kind: answer.failure.message for answer in load.answers if answer.failure is not None}
    print(table(found, notes=[f"{kind}: {message}" for kind, message in errors.items()]), flush=True)
    if args.output_file is not None:
        append_line(args.output_file, _record(config, found, interrupted))
    if interrupted:
        return INTERRUPTED
    return 0 if found.completed else 1


async def _measure(config: BenchOffline, engine: Engine, conversations: Sequence[Conversation]) -> tuple[Load, bool]:
    """The run, and whether Ctrl-C ended it."""
    clock = time.perf_counter
    sender = EngineSender(engine, ignore_eos=not config.offline.disable_ignore_eos, clock=clock)
    if not config.offline.skip_warmup:
        first = conversations[0].turns[0]
        warm_up = single(Vocabulary(100, None, as_ids=True).prompt(range(16)), min(first.output_len, 16))
        await Load(sender, clock).run([warm_up], [0.0])
    progress = Progress("requests", num_requests(conversations), disabled=config.offline.disable_progress)
    load = Load(sender, clock, max_concurrency=config.most_open, ended=Tally(progress).add)
    with _profiled(config, engine):
        interrupted = await until_interrupted(load.run(conversations, [0.0] * len(conversations)))
    progress.close()
    return load, interrupted


@contextlib.contextmanager
def _profiled(config: BenchOffline, engine: Engine) -> Iterator[None]:
    args = config.profile
    if not args.profile:
        yield
        return
    message = engine.start_profile(args.profile_output_dir, args.profile_num_steps, args.profile_activities)
    try:
        yield
    finally:
        if args.profile_num_steps is None:  # else it ends by itself
            message = engine.stop_profile()
        print(f"profile: {message}", flush=True)


def _record(config: BenchOffline, found: Figures, interrupted: bool) -> dict[str, object]:
    """SGLang's keys among them."""
    return {
        "tag": config.offline.tag, "backend": "engine", "model_path": config.model.model_path,
        "pair": config.offline.pair, "engine_flags": config.engine_flags, **asdict(config.dataset),
        "interrupted_by_user": interrupted, "successful_requests": found.completed, **found.keyed(),
    }
