"""Settings of a benchmark's prompts; names and defaults are SGLang's where the thing is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from ...api.errors import ConfigError
from ...config.cli import flag
from ...registry import Choices, Registry

if TYPE_CHECKING:
    from .workload import DatasetFactory

DATASETS: Registry[DatasetFactory] = Registry("data set", "baton.common.bench.workloads")
"""Traits: "file", it needs --dataset-path; "any_ids", its prompts may be any token ids, without a tokenizer."""


@dataclass(frozen=True)
class DatasetArgs:
    dataset_name: str = flag("random", choices=Choices.of(DATASETS), help=(
        "random: words; random-ids: any tokens; generated-shared-prefix: groups of prompts that begin alike; "
        "multi-turn: chats; sharegpt, trace (mooncake is the same): files"))
    dataset_path: str | None = flag(None, help=(
        "file of sharegpt (JSON) or of a trace (JSONL in Mooncake's form); with random, a ShareGPT file to take the "
        "text from"))
    num_prompts: int = flag(1000, help="requests in all: of a file its first ones")
    random_input_len: int = flag(1024, names=("--random-input",), help=(
        "prompt tokens of random and random-ids, of each message of multi-turn"))
    random_output_len: int = flag(1024, names=("--random-output",), help="output tokens, likewise")
    random_range_ratio: float = flag(0.0, help=(
        "lengths are drawn between this share of the length and the length: 1 makes them all equal"))
    sharegpt_output_len: int | None = flag(None, help="output tokens, in place of the file's answers' lengths")
    sharegpt_context_len: int | None = flag(None, help="leave out what is longer with its answer")
    gsp_num_groups: int = flag(64, help="groups of generated-shared-prefix")
    gsp_prompts_per_group: int = flag(16, help="its prompts of a group; --num-prompts is not used")
    gsp_system_prompt_len: int = flag(2048, help="tokens that a group's prompts share")
    gsp_question_len: int = flag(128, help="tokens of its own of each")
    gsp_output_len: int = flag(256, help="output tokens of each")
    num_turns: int = flag(4, help="turns of each chat of multi-turn")
    trace_scale: float = flag(1.0, names=("--mooncake-slowdown-factor",), help=(
        "seconds in which a second of the trace is replayed; 0.5 is twice as fast"))
    seed: int = flag(1, help="of prompts, lengths and arrivals")

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in (
            "num_prompts", "random_input_len", "random_output_len", "gsp_num_groups", "gsp_prompts_per_group",
            "gsp_system_prompt_len", "gsp_question_len", "gsp_output_len", "num_turns")}
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {value}.")
        if not 0 <= self.random_range_ratio <= 1:
            raise ConfigError(f"--random-range-ratio must be between 0 and 1, not {self.random_range_ratio}.")
        if self.trace_scale < 0:
            raise ConfigError(f"--trace-scale must not be negative, it is {self.trace_scale}.")
        if DATASETS.has(self.dataset_name, "file") and self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} needs its file: give --dataset-path.")
        if self.dataset_path is not None and self.dataset_name != "random-ids":
            with dataset_file(self.dataset_path):  # now, not when the server has been waited for
                pass


@contextmanager
def dataset_file(path: str) -> Iterator[BinaryIO]:
    """The file, to be read; raises ConfigError where it cannot be."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"Cannot read --dataset-path {path}: {error.strerror}.") from None
