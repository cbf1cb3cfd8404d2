"""``bench_one_batch``: prefill and decode steps of one batch, without a server."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..api.errors import ConfigError
from ..config.cli import parse
from ..config.server.sglang_flags import SGLANG_FLAGS
from ..engine.rank_spec import RankSpec
from ..garbage_collector import freeze_collector
from ..models.registry import load_model_spec
from .client.stepped_engine import SteppedEngine
from .client.stepped_ranks import stepped_engine, stepped_ranks
from .command import reported
from .correctness import answered, tokenizer_of
from .one_batch_args import BenchOneBatch
from .report.draft_figures import DraftFigures
from .report.progress import Progress
from .report.report import append_line, check_writable
from .report.spread import Spread
from .step_parts import milliseconds, recorder

_RECORDED_STEPS = 10  # decode steps of a trace


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(BenchOneBatch, argv, foreign=SGLANG_FLAGS, prog="bench_one_batch", description=(
        "Measure prefill and decode steps of one batch, without a server."))
    sys.exit(reported("bench_one_batch", lambda: run(config)))


@dataclass(frozen=True)
class Figure:
    """One case; times of the median run. ``decode``: milliseconds of its steps after the first, of all runs.

    ``host_ms``: of a decode step, what the host spends outside of waiting for the device (on a CPU, outside of the
    model and the sampler; None where parts were not asked for). ``parts``: a step's milliseconds by part.
    With drafts, ``draft_parts`` has those of drafting, verifying and accepting, and a request gets ``tokens_a_step``.
    """

    batch: int
    input_len: int
    output_len: int
    prefill_ms: float
    decode: Spread
    total_s: float
    host_ms: float | None
    prefill_parts: dict[str, float]
    decode_parts: dict[str, float]
    drafted: DraftFigures | None = None
    draft_parts: dict[str, float] = field(default_factory=dict)
    tokens_a_step: float = 1.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return 1e3 * self.batch * self.input_len / self.prefill_ms

    @property
    def decode_rate(self) -> float:
        """Output tokens a second."""
        return 1e3 * self.tokens_a_step * self.batch / self.decode.p50

    @property
    def overall_rate(self) -> float:
        return self.batch * (self.input_len + self.output_len) / self.total_s


@dataclass(frozen=True)
class Run:
    """Times of a case in seconds: ``steps`` of decode, and for how long in each the host ``waits`` for the device."""

    prefill: float
    steps: list[float]
    waits: list[float]
    tokens: int = 0
    """Tokens of the steps."""

    @property
    def host(self) -> list[float]:
        """The host's time of each step, without its waiting."""
        return [step - wait for step, wait in zip(self.steps, self.waits)]

    @property
    def total(self) -> float:
        return self.prefill + sum(self.steps)


def run(config: BenchOneBatch) -> int:
    args = config.batches
    check_writable(args.output_file, "--output-file")
    _check_lengths(config)
    with stepped_ranks(config.server, follow, config) as engine:
        freeze_collector()
        if args.correctness_test:
            tokenizer = tokenizer_of(config.model)
            for each in answered(engine, tokenizer, max(args.output_len)):
                print(each.shown(tokenizer), flush=True)
            return 0
        ranks = f", {config.parallel.tp_size} ranks" if config.parallel.tp_size > 1 else ""
        print(f"{config.model.model_path} on {engine.device}{ranks}, {engine.dtype}, {args.repeat} runs a case")
        print(f"{'batch':>6}{'input':>8}{'output':>8}{'prefill ms':>13}{'tok/s':>11}{'step p50 ms':>14}{'p99 ms':>9}"
              f"{'host ms':>9}{'tok/s':>11}", flush=True)
        progress = Progress("runs", len(args.cases) * (args.repeat + 1), disabled=args.disable_progress)
        for case in args.cases:
            figure = measure(engine, case, config, progress.advance)
            progress.close()
            print(_row(figure), flush=True)
            if args.output_file is not None:
                append_line(args.output_file, _record(config, engine, figure))
    return 0


def follow(config: BenchOneBatch, spec: RankSpec) -> None:
    """Runs the steps on another rank, which reports nothing but its traces."""
    engine = stepped_engine(spec)
    freeze_collector()
    try:
        if config.batches.correctness_test:
            answered(engine, tokenizer_of(config.model), max(config.batches.output_len))
            return
        for case in config.batches.cases:
            measure(engine, case, config)
    finally:
        engine.close()


def _check_lengths(config: BenchOneBatch) -> None:
    """Raises ConfigError, before a pool for such lengths is allocated."""
    allowed = load_model_spec(config.model).context_length
    longest = max(given + made for _, given, made in config.batches.cases)
    if longest > allowed:
        raise ConfigError(f"{longest} tokens of input and output are more than the model's context of {allowed}; "
                          "shorten them, or set --context-length.")


def measure(engine: SteppedEngine, case: tuple[int, int, int], config: BenchOneBatch,
            ran: Callable[[], None] = lambda: None) -> Figure:
    """``ran()`` is called after each run. Raises ConfigError where the case does not fit."""
    runs = []
    for _ in range(config.batches.repeat + 1):
        runs.append(once(engine, *case))
        ran()
    del runs[0]
    middle = sorted(runs, key=lambda run: run.total)[len(runs) // 2]
    # With overlap the first call launches a step and waits for none.
    decode = Spread.of([1e3 * step for run in runs for step in (run.steps[1:] or run.steps)])
    prefill_ms = 1e3 * statistics.median(run.prefill for run in runs)
    prefill_parts: dict[str, float] = {}
    decode_parts: dict[str, float] = {}
    if config.batches.parts or config.profile.profile:
        prefill_parts, decode_parts = _record_parts(engine, case, config, prefill_ms, decode.p50)
    host = decode_parts.get("host")
    if engine.asynchronous and middle.steps:
        host = 1e3 * statistics.mean(middle.host)
    figure = Figure(*case, prefill_ms, decode, middle.total, host, prefill_parts, decode_parts)
    return figure if engine.drafted is None else _with_drafts(engine, figure, runs)


def _with_drafts(engine: SteppedEngine, figure: Figure, runs: Sequence[Run]) -> Figure:
    """Adds the acceptance of all runs, and the parts of a step by one more run."""
    num_steps = sum(len(run.steps) for run in runs)
    engine.start(figure.batch, figure.input_len, figure.output_len)
    _prefill(engine)
    engine.synchronize()
    steps = 0
    with engine.draft_times() as timer:
        while engine.step():
            steps += 1
    engine.finish()
    parts = {part: 1e3 * seconds / max(steps, 1) for part, seconds in timer.seconds.items()}
    per_request = sum(run.tokens for run in runs) / max(num_steps, 1) / figure.batch
    return replace(figure, drafted=engine.drafted, draft_parts=parts, tokens_a_step=per_request)


def once(engine: SteppedEngine, batch: int, input_len: int, output_len: int) -> Run:
    """Raises ConfigError where the batch cannot run together."""
    engine.start(batch, input_len, output_len)
    engine.synchronize()
    begin = time.perf_counter()
    _prefill(engine)
    engine.synchronize()
    prefill = time.perf_counter() - begin
    steps, waits, generated = [], [], engine.num_generated
    if output_len > 1 and engine.num_decoding < batch:
        raise ConfigError(f"The KV pool has no room for a batch of {batch}: raise --max-total-tokens.")
    while True:
        begin, waited = time.perf_counter(), engine.waited
        if not engine.step():
            break
        steps.append(time.perf_counter() - begin)
        waits.append(engine.waited - waited)
    engine.finish()
    return Run(prefill, steps, waits, engine.num_generated - generated)


def _prefill(engine: SteppedEngine) -> None:
    while engine.prefilling:
        engine.step()


def _record_parts(engine: SteppedEngine, case: tuple[int, int, int], config: BenchOneBatch, prefill_ms: float,
                  decode_ms: float) -> tuple[dict[str, float], dict[str, float]]:
    """Record a prefill and decode steps for their parts; writes traces where asked for."""
    batch, input_len, output_len = case
    profile = config.profile
    steps = min(output_len - 1, profile.profile_num_steps or _RECORDED_STEPS)
    activities = profile.profile_activities if profile.profile else None
    engine.start(batch, input_len, output_len)
    with recorder(engine.device, activities) as recorded:
        _prefill(engine)
        engine.synchronize()
    prefill = milliseconds(recorded, engine.device, prefill_ms, 1)
    ranked = f"{batch}x{input_len}+{output_len}" + (f"-rank{engine.rank}" if config.parallel.tp_size > 1 else "")
    _write_trace(config, recorded, f"{ranked}-prefill")
    decode: dict[str, float] = {}
    if steps > 0:
        with recorder(engine.device, activities) as recorded:
            for _ in range(steps):
                engine.step()
            engine.synchronize()
        decode = milliseconds(recorded, engine.device, decode_ms, steps)
        _write_trace(config, recorded, f"{ranked}-decode")
    engine.finish()
    return (prefill, decode) if config.batches.parts else ({}, {})


def _write_trace(config: BenchOneBatch, recorded: Any, name: str) -> None:
    if not config.profile.profile:
        return
    folder = Path(config.profile.profile_output_dir or tempfile.gettempdir())
    target = folder / f"bench_one_batch-{time.strftime('%Y%m%d-%H%M%S')}-{name}.trace.json.gz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(target))
    except OSError as error:
        raise ConfigError(f"Cannot write the trace {target}: {error.strerror}.") from None
    print(f"profile: {target}", flush=True)


def _row(figure: Figure) -> str:
    host = "-" if figure.host_ms is None else f"{figure.host_ms:.3f}"
    decode = f"{'-':>14}{'-':>9}{'-':>9}{'-':>11}"
    if figure.decode.count:
        decode = f"{figure.decode.p50:>14.3f}{figure.decode.p99:>9.3f}{host:>9}{figure.decode_rate:>11,.0f}"
    lines = [f"{figure.batch:>6}{figure.input_len:>8}{figure.output_len:>8}{figure.prefill_ms:>13.2f}"
             f"{figure.prefill_rate:>11,.0f}{decode}"]
    for name, parts in (("prefill", figure.prefill_parts), ("decode", figure.decode_parts)):
        if parts:
            total = sum(parts.values()) or 1.0
            shares = ", ".join(f"{part} {ms:.2f} ({ms / total:.0%})" for part, ms in parts.items())
            lines.append(f"{'':6}{name:<8} ms: {shares}")
    if figure.drafted is not None:
        shares = ", ".join(f"{part} {ms:.2f}" for part, ms in figure.draft_parts.items())
        lines.append(f"{'':6}drafts     : {figure.drafted}; ms a step, one after the other: {shares}")
    return "\n".join(lines)


def _record(config: BenchOneBatch, engine: SteppedEngine, figure: Figure) -> dict[str, Any]:
    """SGLang's keys (seconds, tokens a second), then ours."""
    return {
        "run_name": config.batches.tag, "model_path": config.model.model_path, "device": str(engine.device),
        "dtype": engine.dtype, "batch_size": figure.batch, "input_len": figure.input_len,
        "output_len": figure.output_len, "prefill_latency": figure.prefill_ms / 1e3,
        "prefill_throughput": figure.prefill_rate,
        "median_decode_latency": figure.decode.p50 / 1e3, "median_decode_throughput": figure.decode_rate,
        "total_latency": figure.total_s, "overall_throughput": figure.overall_rate,
        "decode_step_ms": asdict(figure.decode), "host_ms": figure.host_ms,
        "prefill_parts_ms": figure.prefill_parts, "decode_parts_ms": figure.decode_parts,
        **({} if figure.drafted is None else {
            **figure.drafted.keyed(), "draft_parts_ms": figure.draft_parts, "tokens_a_step": figure.tokens_a_step}),
    }


if __name__ == "__main__":
    main()
