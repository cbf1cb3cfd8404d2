"""``bench_one_batch_server``: latency and throughput of single batches that are sent at once to a server."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from ..api.errors import ConfigError
from ..config.cli import parse, to_argv
from ..config.server.sglang_flags import SGLANG_FLAGS
from .client.apis import APIS, RequestOptions
from .client.client import Client
from .client.control import Control
from .client.load import Load
from .client.server_sender import ServerSender
from .command import reported
from .one_batch_server_args import BenchOneBatchServer
from .report.figures import Figures, figures
from .report.report import append_line, check_writable
from .workloads.vocabulary import Vocabulary
from .workloads.workload import single

_WARMUP = (16, 1024, 16)  # the largest, as SGLang's
_VOCABULARY = 16_384  # tokens of a model whose server does not tell
_STOP_SECONDS = 60.0
_REQUEST_SECONDS = 3600.0


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(BenchOneBatchServer, argv, foreign=SGLANG_FLAGS, prog="bench_one_batch_server", description=(
        "Measure single batches that are sent at once to a server."))
    sys.exit(reported("bench_one_batch_server", lambda: run(config)))


@dataclass(frozen=True)
class Address:
    """A server's, with the headers that it asks for."""

    url: str
    headers: dict[str, str]


@dataclass(frozen=True)
class BatchFigure:
    """One case; seconds from sending. ``prefilled``: until the last request's first token; ``latency``: until the last
    answer's end."""

    batch: int
    input_len: int
    output_len: int
    prefilled: float
    latency: float
    figures: Figures

    @property
    def input_rate(self) -> float:
        return self.batch * self.input_len / self.prefilled

    @property
    def output_rate(self) -> float:
        """Tokens a second after the last prompt; of answers of one token those of the whole time."""
        seconds = self.latency - self.prefilled
        return self.batch * self.output_len / (seconds if seconds > 0 else self.latency)

    @property
    def overall_rate(self) -> float:
        return self.batch * (self.input_len + self.output_len) / self.latency


def run(config: BenchOneBatchServer) -> int:
    """Measure and report. Raises ConfigError where a server does not start or refuses a request."""
    args = config.batches
    check_writable(args.output_file, "--output-file")
    with _server(config) as server:
        size = Control(server.url, server.headers).model_info().get("vocab_size") or _VOCABULARY
        vocabulary = Vocabulary(int(size), None, as_ids=True)
        print(f"{'batch':>6}{'input':>8}{'output':>8}{'latency s':>11}{'last TTFT s':>13}{'in tok/s':>11}"
              f"{'out tok/s':>11}{'all tok/s':>11}", flush=True)
        rng = random.Random(0)
        cases = [*([] if config.requests.skip_warmup else [_warmup(args.cases)]), *args.cases]
        for number, case in enumerate(cases):
            figure = uvloop.run(measure(config, server, case, vocabulary, rng))
            if number == 0 and not config.requests.skip_warmup:
                continue
            print(_row(figure), flush=True)
            if args.output_file is not None:
                append_line(args.output_file, record(config, figure))
    return 0


def _warmup(cases: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    batch, input_len, output_len = (min(most, max(column)) for most, column in zip(_WARMUP, zip(*cases)))
    return batch, input_len, output_len


@contextlib.contextmanager
def _server(config: BenchOneBatchServer) -> Iterator[Address]:
    """The server of ``--base-url``, or one that runs while this is open. Raises ConfigError where it does not start."""
    http, seconds = config.server.http, config.requests.ready_seconds
    headers = {} if http.api_key is None else {"Authorization": f"Bearer {http.api_key}"}
    if config.requests.url is not None:
        Control(config.requests.url, headers).wait_ready(seconds)
        yield Address(config.requests.url, headers)
        return
    host = "127.0.0.1" if http.host in ("0.0.0.0", "::", "") else http.host
    process = subprocess.Popen([sys.executable, "-m", "baton.launch_server", *to_argv(config.server)])
    try:
        url = f"{config.server.tls.scheme}://{host}:{http.port}"
        Control(url, headers).wait_ready(seconds, lambda: _check_alive(process))
        yield Address(url, headers)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check_alive(process: subprocess.Popen[bytes]) -> None:
    if (status := process.poll()) is not None:
        raise ConfigError(f"The server did not start (exit status {status}): see its output above.")


async def measure(config: BenchOneBatchServer, server: Address, case: tuple[int, int, int], vocabulary: Vocabulary,
                  rng: random.Random) -> BatchFigure:
    """Raises ConfigError where a request of the batch fails."""
    batch, input_len, output_len = case
    args, clock = config.requests, time.perf_counter
    options = RequestOptions(extra={"sampling_params": {"temperature": args.temperature}}, logprobs=args.return_logprob)
    made = [single(vocabulary.prompt(vocabulary.draw(rng, input_len, words=False)), output_len) for _ in range(batch)]
    client = Client(server.url, server.headers, _REQUEST_SECONDS, clock)
    try:
        load = Load(ServerSender(client, APIS["baton"], options), clock)
        await load.run(made, [0.0] * batch)
    finally:
        client.close()
    for answer in load.answers:
        if answer.failure is not None:
            raise ConfigError(f"The server does not answer {input_len} + {output_len} tokens: {answer.failure.kind}: "
                              f"{answer.failure.message}")
    prefilled = max(answer.first or answer.sent for answer in load.answers) - load.begin
    return BatchFigure(*case, prefilled, load.duration, figures(load.answers, load.duration))


def _row(figure: BatchFigure) -> str:
    drafted = "" if figure.figures.drafted is None else f"\n{'':6}drafts: {figure.figures.drafted}"
    return (f"{figure.batch:>6}{figure.input_len:>8}{figure.output_len:>8}{figure.latency:>11.3f}"
            f"{figure.prefilled:>13.3f}{figure.input_rate:>11,.0f}{figure.output_rate:>11,.0f}"
            f"{figure.overall_rate:>11,.0f}{drafted}")


def record(config: BenchOneBatchServer, figure: BatchFigure) -> dict[str, Any]:
    """SGLang's keys, then those of ``bench_serving``."""
    drafted = figure.figures.drafted
    return {
        "run_name": config.batches.tag or "default", "batch_size": figure.batch, "input_len": figure.input_len,
        "output_len": figure.output_len, "latency": figure.latency, "input_throughput": figure.input_rate,
        "output_throughput": figure.output_rate, "overall_throughput": figure.overall_rate,
        "last_ttft": figure.prefilled, **({} if drafted is None else drafted.keyed()),
        **figure.figures.itl.keyed("itl_ms"), "cache_hit_rate": figure.figures.hit_rate}
