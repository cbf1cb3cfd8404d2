"""``bench_eval``: the share of right answers to MMLU, GSM8K or HellaSwag, over HTTP."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import uvloop

from ..api.errors import ConfigError, InvalidRequest
from ..config.cli import parse
from ..tokenizer.tokenizer import load_tokenizer
from .client.client import Client
from .client.control import Control
from .client.examinee import Examinee, Outcome
from .command import reported
from .eval_args import BenchEval
from .exams.exam import EXAMS, Asked
from .report.progress import Progress
from .report.report import append_line, check_writable
from .served_tokenizer import tokenizer_name


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(BenchEval, argv, prog="bench_eval", description=(
        "Measure the share of right answers to a public exam over HTTP."))
    sys.exit(reported("bench_eval", lambda: run(config)))


def run(config: BenchEval) -> int:
    """Ask and report. Returns 1 where no question was answered or fewer than ``--threshold`` were right."""
    check_writable(config.report.output_file, "--output-file")
    exam = chosen(config)
    control = Control(config.target.url, config.target.headers)
    control.wait_ready(config.target.ready_check_timeout_sec)
    tokenizer = load_tokenizer(tokenizer_name(config.target, control))
    model = config.target.model or control.model().get("id")
    print(f"{config.exam.task} at {config.target.url}, {model or 'its model'}: {len(exam)} questions, "
          f"{len(exam[0].shots)} examples each", flush=True)
    begin = time.perf_counter()
    try:
        outcomes = uvloop.run(_ask(config, exam, tokenizer))
    except InvalidRequest as error:
        raise ConfigError(f"--apply-chat-template: {error}") from None
    seconds = time.perf_counter() - begin
    print(table(outcomes, seconds), flush=True)
    if config.report.output_file is not None:
        append_line(config.report.output_file, record(config, model, outcomes, seconds))
    if all(outcome.failure is not None for outcome in outcomes) or accuracy(outcomes) < config.exam.threshold:
        return 1
    return 0


def chosen(config: BenchEval) -> list[Asked]:
    """The questions to ask; of fewer than all, the groups take turns. Raises ConfigError."""
    args, exam = config.exam, EXAMS.get(config.exam.task)()
    num_shots = exam.num_shots if args.num_shots is None else args.num_shots
    every = exam.read(args.data_path, args.shots_path, num_shots, cloze=args.cloze)
    if args.num_questions is None:
        return every
    groups: dict[str, list[Asked]] = {}
    for asked in every:
        groups.setdefault(asked.question.group, []).append(asked)
    turns = (asked for each in itertools.zip_longest(*groups.values()) for asked in each if asked is not None)
    return list(itertools.islice(turns, args.num_questions))


async def _ask(config: BenchEval, exam: Sequence[Asked], tokenizer: Any) -> list[Outcome]:
    target, args = config.target, config.exam
    client = Client(target.url, target.headers, target.request_timeout, time.perf_counter)
    progress = Progress("questions", len(exam), disabled=config.report.disable_progress)
    examinee = Examinee(client, tokenizer, chat=args.apply_chat_template, max_new_tokens=args.max_new_tokens)
    try:
        return await examinee.ask_all(exam, args.parallel, progress.advance)
    finally:
        progress.close()
        client.close()


def accuracy(outcomes: Sequence[Outcome]) -> float:
    """The share of right answers; a failed request is none."""
    return sum(outcome.right for outcome in outcomes) / len(outcomes)


def by_group(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.asked.question.group, []).append(outcome)
    return groups


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """A row for each group where there are several, then all; the first error of each kind last."""
    groups = by_group(outcomes)
    rows = [*(groups.items() if len(groups) > 1 else ()), ("all", outcomes)]
    width = max(5, *(len(name) for name, _ in rows))
    lines = [f"{'group':<{width}} {'right':>13} {'accuracy':>9}"]
    for name, found in rows:
        right = f"{sum(outcome.right for outcome in found)} / {len(found)}"
        lines.append(f"{name:<{width}} {right:>13} {accuracy(found):>9.2%}")
    share = accuracy(outcomes)
    lines[-1] += f" +- {math.sqrt(share * (1 - share) / len(outcomes)):.2%} in {seconds:.1f} s"
    failures = {outcome.failure.kind: outcome.failure for outcome in reversed(outcomes) if outcome.failure is not None}
    count = sum(outcome.failure is not None for outcome in outcomes)
    return "\n".join([*lines, *([f"{count} requests failed"] if count else []),
                      *(f"first {kind}: {failure.message}" for kind, failure in failures.items())])


def record(config: BenchEval, model: str | None, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """SGLang's keys, then ours."""
    tokens = sum(outcome.num_tokens for outcome in outcomes)
    found: dict[str, Any] = {
        "task": config.exam.task, "backend": "baton", "latency": seconds, "accuracy": accuracy(outcomes),
        "num_requests": len(outcomes), "output_throughput": tokens / seconds,
        "invalid": sum(outcome.answer is None for outcome in outcomes) / len(outcomes),
        "other": {"num_questions": len(outcomes), "parallel": config.exam.parallel,
                  "num_shots": len(outcomes[0].asked.shots)},
        "tag": config.report.tag, "model": model, "base_url": config.target.url, **asdict(config.exam),
        "failed": sum(outcome.failure is not None for outcome in outcomes),
        "groups": {name: {"accuracy": accuracy(each), "num_questions": len(each)}
                   for name, each in by_group(outcomes).items()}}
    if config.report.output_details:
        found["answers"] = [{
            "question": outcome.asked.question.asked, "right": outcome.asked.question.right, "answer": outcome.answer,
            "text": outcome.text, "error": "" if outcome.failure is None else str(outcome.failure)}
            for outcome in outcomes]
    return found
