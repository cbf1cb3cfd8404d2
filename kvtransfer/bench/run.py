"""``bench_kvtransfer``: measures KV transfers between processes of this host, and plain copies for comparison.

A sender and a receiver, each rank a real process with the real protocol, move prompts of several sizes in pages of
several sizes. Every case is checked: the pages that arrived must have the checksums of those that were sent.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ...common.api.errors import ConfigError
from ...common.bench.report.report import check_writable, write_text
from ...common.config.cli import parse
from ...common.kvcache.layout import KVLayout
from .args import BenchArgs, sizes_of
from .plot import Figure, draw
from .worker import Worker, WorkerRank, serve


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(BenchArgs, argv, prog="bench_kvtransfer", description=(
        "Measure KV transfers between processes of this host."))
    try:
        sys.exit(run(args))
    except ConfigError as error:
        print(f"bench_kvtransfer: error: {error}", file=sys.stderr)
        sys.exit(2)


def run(args: BenchArgs) -> int:
    """Measures and reports; returns 1 where pages arrived wrong. Raises ConfigError."""
    check_writable(args.output, "--output")
    check_writable(args.plot, "--plot")
    figures: list[Figure] = []
    ceiling: dict[str, Any] = {}
    for case in args.tp:
        with _Fleet(args, case) as fleet:
            if not ceiling:
                ceiling = fleet.senders[0].call("ceiling")
                _print_header(args, ceiling)
            for layout in args.layouts():
                set_up = fleet.open(layout)
                for tokens in args.prompt_tokens:
                    for order in args.orders:
                        figures.append(fleet.measure(layout, tokens, order))
                        print(_format_row(figures[-1]), flush=True)
                fleet.close_layout()
                print(f"{'':12}set-up {set_up:.2f} s", flush=True)
    if args.output is not None:
        record = {"settings": asdict(args), "copy_ceiling_gb_s": ceiling, "figures": [asdict(f) for f in figures]}
        write_text(args.output, json.dumps(record, indent=1) + "\n", "--output")
    if args.plot is not None:
        write_text(args.plot, draw(figures, ceiling), "--plot")
    return 0 if all(figure.right for figure in figures) else 1


def _print_header(args: BenchArgs, ceiling: dict[str, Any]) -> None:
    print(f"{args.backend} on {ceiling.pop('where')}, {args.repeat} transfers a case")
    rates = ", ".join(f"{name} {value:.1f} GB/s" for name, value in ceiling.items())
    print(f"copy ceiling of this machine: {rates}")
    print(f"{'tp':>5}{'page':>6}{'descriptor':>12}{'tokens':>8}{'MiB':>8}  {'pages':<11}{'GB/s':>8}{'best':>8}"
          f"{'p50 ms':>10}{'p99 ms':>10}  content")


def _format_row(figure: Figure) -> str:
    return (f"{figure.tp:>5}{figure.page_size:>6}"
            f"{figure.descriptor_kib:>8g} KiB{figure.prompt_tokens:>8}{figure.mib:>8g}  {figure.order:<11}"
            f"{figure.gb_s:>8.2f}{figure.best_gb_s:>8.2f}{figure.p50_ms:>10.2f}{figure.p99_ms:>10.2f}  "
            f"{'right' if figure.right else 'WRONG'}")


class _WorkerProcess:
    """One worker process, called over a pipe."""

    def __init__(self, place: WorkerRank, args: BenchArgs):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(Worker, place, args, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def answer(self) -> Any:
        """Returns the answer of a call. Raises ConfigError with the worker's error, or where the worker has ended."""
        try:
            error, value = self._pipe.recv()
        except EOFError:
            raise ConfigError("a worker process ended early; its output says why.") from None
        if error is not None:
            raise ConfigError(error)
        return value

    def call(self, name: str, *arguments: Any) -> Any:
        self.start(name, *arguments)
        return self.answer()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


class _Fleet:
    """Worker processes of a sender's and a receiver's ranks."""

    def __init__(self, args: BenchArgs, case: str):
        self._args = args
        self._case = case
        self._room = 0

    def __enter__(self) -> _Fleet:
        p, d = sizes_of(self._case)
        first = _WorkerProcess(WorkerRank("sender", 0, p, 0), self._args)
        port = first.call("bootstrap_port")
        self.senders = [first, *(_WorkerProcess(WorkerRank("sender", rank, p, port), self._args)
                                 for rank in range(1, p))]
        self.receivers = [_WorkerProcess(WorkerRank("receiver", rank, d, port), self._args) for rank in range(d)]
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in (*self.senders, *self.receivers):
            worker.close()

    def open(self, layout: KVLayout) -> float:
        """Allocates and registers all pools; returns seconds."""
        return float(sum(self._call_all((*self.senders, *self.receivers), "open", layout)))

    def close_layout(self) -> None:
        self._call_all(self.receivers, "close")
        self._call_all(self.senders, "close")

    def measure(self, layout: KVLayout, tokens: int, order: str) -> Figure:
        seconds = []
        for _ in range(self._args.repeat + 1):
            self._room += 1
            for receiver in self.receivers:
                receiver.start("receive", self._room, tokens, order)
            began = min(self._call_all(self.senders, "send", self._room, tokens, order))
            seconds.append(max(receiver.answer() for receiver in self.receivers) - began)
        right = self._digest(self.senders) == self._digest(self.receivers)
        num_bytes = layout.pages_for(tokens) * layout.page_bytes
        p50, p99 = np.percentile(seconds[1:], [50, 99])
        return Figure(self._case.replace(":", "->"), layout.page_size, round(layout.group_page_bytes(0) / 1024, 2),
                      tokens, round(num_bytes / 2**20, 2), order, num_bytes / p50 / 1e9,
                      num_bytes / min(seconds[1:]) / 1e9, p50 * 1e3, p99 * 1e3, right)

    def _call_all(self, workers: Sequence[_WorkerProcess], name: str, *arguments: Any) -> list[Any]:
        for worker in workers:
            worker.start(name, *arguments)
        return [worker.answer() for worker in workers]

    def _digest(self, workers: Sequence[_WorkerProcess]) -> list[list[list[int]]]:
        """Returns ``[layer groups][pages][heads]`` for any number of ranks."""
        ranks = self._call_all(workers, "digest")
        return [np.concatenate(groups, axis=1).tolist() for groups in zip(*ranks)]


if __name__ == "__main__":
    main()
