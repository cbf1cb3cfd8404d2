"""``bench_serving``: throughput and latency of a server, over HTTP."""

from __future__ import annotations

import contextlib
import gc
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import uvloop

from ..api.errors import ConfigError
from ..config.cli import parse
from ..config.command import INTERRUPTED
from ..config.packages import install
from ..tokenizer.tokenizer import Tokenizer, load_tokenizer
from .client.answer import Answer
from .client.apis import APIS, RequestOptions
from .client.client import Client
from .client.control import Control
from .client.load import Load
from .client.server_sender import ServerSender
from .command import reported, until_interrupted
from .report.figures import Figures, figures
from .report.goodput import Slo
from .report.plot import draw
from .report.progress import Progress
from .report.report import append_line, check_writable, details, write_text
from .report.table import table
from .report.tally import Tally
from .served_tokenizer import tokenizer_name
from .serving_args import BenchServing
from .sglang_flags import BENCH_SERVING_FLAGS
from .workloads.arrivals import arrivals
from .workloads.dataset_args import DATASETS
from .workloads.datasets import make_workload
from .workloads.shared_prefix import shareable
from .workloads.vocabulary import Vocabulary
from .workloads.workload import Conversation, num_requests, single

BUSY = 0.9  # share of a core from which on the client's own delays show in what it measures
_WARMUP_OUTPUT = 32


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(BenchServing, argv, foreign=BENCH_SERVING_FLAGS, prog="bench_serving", description=(
        "Measure throughput and latency of a server over HTTP."))
    sys.exit(reported("bench_serving", lambda: run(config)))


def run(config: BenchServing) -> int:
    """Measure and report. Returns 1 where no request was answered, 130 after Ctrl-C."""
    check_writable(config.report.output_file, "--output-file")
    check_writable(config.report.plot, "--plot")
    _raise_file_limit()
    target = config.target
    control = Control(target.url, target.headers)
    control.wait_ready(target.ready_check_timeout_sec)
    vocabulary = make_vocabulary(config, control)
    conversations = make_workload(config.dataset, vocabulary)
    options = RequestOptions(target.model or control.model().get("id"), not target.disable_ignore_eos,
                             not target.disable_stream, target.extra, target.return_logprob)
    print(_heading(config, options, conversations), flush=True)
    measured = uvloop.run(_measure(config, control, options, conversations, vocabulary))
    _report(config, options, measured)
    if measured.interrupted:
        return INTERRUPTED
    return 0 if measured.figures.completed else 1


@dataclass(frozen=True)
class Measured:
    """``cpu``: the share of a core that the client took."""

    answers: Sequence[Answer]
    figures: Figures
    begin: float
    cpu: float
    interrupted: bool


def make_vocabulary(config: BenchServing, control: Control) -> Vocabulary:
    """The vocabulary of ``--tokenizer`` or of the server's model; without a tokenizer where any token ids will do.
    Raises ConfigError."""
    target = config.target
    ids_only = target.tokenize_prompt and DATASETS.has(config.dataset.dataset_name, "any_ids")
    if target.tokenizer is None and ids_only and (size := control.model_info().get("vocab_size")):
        return Vocabulary(size, None, as_ids=True)
    try:
        tokenizer: Tokenizer = load_tokenizer(tokenizer_name(target, control))
    except ImportError:
        raise ConfigError(f"Text takes a tokenizer, which needs transformers: {install('engine')}; or send token ids "
                          "with --dataset-name random-ids --tokenize-prompt.") from None
    return Vocabulary(tokenizer.size, tokenizer, as_ids=target.tokenize_prompt)


async def _measure(config: BenchServing, control: Control, options: RequestOptions,
                   conversations: Sequence[Conversation],
                   vocabulary: Vocabulary) -> Measured:
    clock = time.perf_counter
    client = Client(config.target.url, config.target.headers, config.target.request_timeout, clock)
    sender = ServerSender(client, APIS[config.target.backend], options)
    try:
        await _warm_up(config, sender, vocabulary)
        if config.load.flush_cache:
            control.flush_cache()
        total = num_requests(conversations)
        progress = Progress("requests", total, disabled=config.report.disable_progress)
        load = Load(sender, clock, max_concurrency=config.load.max_concurrency, ended=Tally(progress).add)
        due = arrivals(conversations, config.load.request_rate, random.Random(config.dataset.seed + 1))
        with _profiled(config, control), _without_garbage():
            begun = time.process_time()
            interrupted = await until_interrupted(load.run(conversations, due))
            cpu = (time.process_time() - begun) / max(load.duration, 1e-9)
        progress.close()
    finally:
        client.close()
    found = figures(load.answers, load.duration, interrupted=total - len(load.answers),
                    slo=Slo.parse(config.report.goodput), timed=due[-1] > 0)
    return Measured(load.answers, found, load.begin, cpu, interrupted)


async def _warm_up(config: BenchServing, sender: ServerSender, vocabulary: Vocabulary) -> None:
    """Send prompts that the run does not have, so that they add no prefix cache hits. Raises ConfigError where none is
    answered."""
    count, rng = config.load.warmup_requests, random.Random(f"{config.dataset.seed}-warm-up")
    if not count:
        return
    made = [single(vocabulary.prompt(vocabulary.draw(rng, 64, words=vocabulary.has_words)), _WARMUP_OUTPUT)
            for _ in range(count)]
    load = Load(sender, time.perf_counter)
    await load.run(made, [0.0] * count)
    failures = [answer.failure for answer in load.answers if answer.failure is not None]
    if len(failures) == count:
        raise ConfigError(f"The server does not answer: {failures[0].kind}: {failures[0].message}")


@contextlib.contextmanager
def _profiled(config: BenchServing, control: Control) -> Iterator[None]:
    args = config.profile
    if not args.profile:
        yield
        return
    message = control.start_profile({"output_dir": args.profile_output_dir, "num_steps": args.profile_num_steps,
                                  "activities": list(args.profile_activities)})
    try:
        yield
    finally:
        if args.profile_num_steps is None:  # else it ends by itself
            message = control.stop_profile()
        where = args.profile_output_dir or "the servers' temporary folders"
        print(f"profile: {message or f'the traces are in {where}'}", flush=True)


@contextlib.contextmanager
def _without_garbage() -> Iterator[None]:
    """A collection over all prompts would take as long as several tokens."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _heading(config: BenchServing, options: RequestOptions, conversations: Sequence[Conversation]) -> str:
    total, load, data = num_requests(conversations), config.load, config.dataset
    timed = conversations[0].at is not None and load.request_rate is None
    rate = f"trace times {data.trace_scale:g}" if timed else f"{load.shown_rate} req/s"
    shared = f" ({shareable(data):.0%} shared)" if data.dataset_name == "generated-shared-prefix" else ""
    most = "" if load.max_concurrency is None else f", {load.max_concurrency} at once at most"
    return (f"{config.target.backend} at {config.target.url}, {options.model or 'its model'}: {total:,} requests of "
            f"{data.dataset_name}{shared}, {rate}{most}")


def notes(answers: Sequence[Answer], cpu: float) -> list[str]:
    """The first error of each kind, and a warning where the client took too much of a core to be believed."""
    errors: dict[str, str] = {}
    for answer in answers:
        if answer.failure is not None:
            errors.setdefault(answer.failure.kind, answer.failure.message)
    lines = [f"first {kind}: {message}" for kind, message in errors.items()]
    if cpu > BUSY:
        lines.append(f"WARNING: this client took {cpu:.0%} of a core: its own delays are in these times. Load the "
                    "server from several clients, each with a part of the rate.")
    return lines


def _report(config: BenchServing, options: RequestOptions, measured: Measured) -> None:
    report, slo = config.report, Slo.parse(config.report.goodput)
    print(table(measured.figures, slo, notes=notes(measured.answers, measured.cpu)), flush=True)
    if report.output_file is not None:
        record = {
            "tag": report.tag, "backend": config.target.backend, "base_url": config.target.url, "model": options.model,
            **asdict(config.dataset), "request_rate": config.load.shown_rate,
            "max_concurrency": config.load.max_concurrency, "goodput": list(report.goodput),
            "interrupted_by_user": measured.interrupted, "client_cpu": measured.cpu, **measured.figures.keyed(),
        }
        append_line(report.output_file, record | (details(measured.answers) if report.output_details else {}))
    if report.plot is not None:
        title = f"{config.target.backend} {options.model or ''}: {measured.figures.completed} requests"
        write_text(report.plot, draw(title, measured.answers, measured.begin, measured.figures.duration), "--plot")


def _raise_file_limit() -> None:
    """A connection takes a file descriptor, and a thousand is a usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
