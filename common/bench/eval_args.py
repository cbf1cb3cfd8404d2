"""Settings of ``bench_eval``; names are those of SGLang's benchmarks of MMLU, GSM8K and HellaSwag."""

from __future__ import annotations

from dataclasses import dataclass

from ..api.errors import ConfigError
from ..config.cli import flag, nested
from ..registry import Choices
from .exams.exam import EXAMS
from .serving_args import TargetArgs

_FIXED = "its requests are those of the task"


@dataclass(frozen=True)
class ExamArgs:
    task: str = flag(choices=Choices.of(EXAMS), required=True, help="the format of --data-path")
    data_path: str = flag(required=True, names=("--data-dir",), help=(
        "mmlu: folder with test/ and dev/, or a CSV file; gsm8k, hellaswag: JSONL file"))
    shots_path: str | None = flag(None, help=(
        "file with examples in the same format; the default is mmlu's dev/, else the first questions, which are not "
        "asked"))
    num_shots: int | None = flag(None, names=("--ntrain",), help=(
        "examples in each prompt; the default is 5, of hellaswag 10"))
    num_questions: int | None = flag(None, names=("--num-examples",), help="ask only this many, of all groups in turn")
    cloze: bool = flag(False, help="mmlu: compare the choices' texts after the question, in place of their letters")
    apply_chat_template: bool = flag(False, help="ask in the tokenizer's chat template, each example a turn")
    max_new_tokens: int = flag(512, names=("--max-tokens",), help="longest generated answer of gsm8k")
    parallel: int = flag(64, names=("--num-threads",), help="questions that are asked at the same time")
    threshold: float = flag(0.0, help="exit with status 1 where less than this share is right")

    def __post_init__(self) -> None:
        if self.num_shots is not None and self.num_shots < 0:
            raise ConfigError(f"--num-shots must not be negative, it is {self.num_shots}.")
        for name in ("num_questions", "max_new_tokens", "parallel"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(self, name)}.")
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"--threshold must be between 0 and 1, not {self.threshold}.")


@dataclass(frozen=True)
class EvalReportArgs:
    output_file: str | None = flag(None, names=("--result-file",), help=(
        "append settings and figures to this file, a JSON object a run"))
    output_details: bool = flag(False, help="with them, each question's answer")
    tag: str | None = flag(None, help="a name for the run in --output-file")
    disable_progress: bool = flag(False, names=("--disable-tqdm",), help="show no progress")

    def __post_init__(self) -> None:
        if self.output_details and self.output_file is None:
            raise ConfigError("--output-details needs --output-file.")


@dataclass(frozen=True)
class BenchEval:
    exam: ExamArgs
    report: EvalReportArgs
    target: TargetArgs = nested(omit={
        "backend": "it speaks /generate, whose log-probabilities it needs", "tokenize_prompt": _FIXED,
        "extra_request_body": _FIXED, "disable_ignore_eos": "answers end where the model ends them",
        "disable_stream": "it takes each answer in one piece", "return_logprob": _FIXED})

    def __post_init__(self) -> None:
        assert self.target.headers is not None  # raises ConfigError where unreadable
