"""Settings of a benchmark's prompts; names and defaults are SGLang's where the thing is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from ...api.errors import ConfigError
from ...config.cli import flag
from ...registry import Choices, Registry

if TYPE_CHECKING:
    from .workload import DatasetFactory

DATASETS: Registry[DatasetFactory] = Registry("data set", "baton.common.bench.workloads")
"""Traits: "file", it needs --dataset-path; "any_ids", its prompts may be any token ids, without a tokenizer; "times",
its file says when requests are due; "questions", its prompts are messages of users."""


@dataclass(frozen=True)
class DatasetArgs:
    dataset_name: str = flag("random", choices=Choices.of(DATASETS), help=(
        "random: words; random-ids: any tokens; generated-shared-prefix: groups of prompts that begin alike; "
        "multi-turn: chats; sharegpt, trace (mooncake is the same): files"))
    dataset_path: str | None = flag(None, help=(
        "file of sharegpt (JSON) or of a trace (JSONL in Mooncake's form); with random, a ShareGPT file to take the "
        "text from; a folder with --mooncake-workload"))
    num_prompts: int = flag(1000, help="requests in all: of a file its first ones")
    random_input_len: int = flag(1024, names=("--random-input",), help=(
        "prompt tokens of random and random-ids, of each message of multi-turn"))
    random_output_len: int = flag(1024, names=("--random-output",), help="output tokens, likewise")
    random_range_ratio: float = flag(0.0, help=(
        "lengths are drawn between this share of the length and the length: 1 makes them all equal"))
    sharegpt_output_len: int | None = flag(None, help="output tokens, in place of the file's answers' lengths")
    sharegpt_context_len: int | None = flag(None, help="leave out what is longer with its answer")
    apply_chat_template: bool = flag(False, help="send sharegpt's questions in the tokenizer's chat template")
    prompt_suffix: str = flag("", help="text after each of sharegpt's questions")
    gsp_num_groups: int = flag(64, help="groups of generated-shared-prefix")
    gsp_prompts_per_group: int = flag(16, help="its prompts of a group; --num-prompts is not used")
    gsp_system_prompt_len: int = flag(2048, help="tokens that a group's prompts share")
    gsp_question_len: int = flag(128, help="tokens of its own of each")
    gsp_output_len: int = flag(256, help="output tokens of each")
    num_turns: int = flag(4, help="turns of each chat of multi-turn")
    trace_scale: float = flag(1.0, names=("--mooncake-slowdown-factor",), help=(
        "seconds in which a second of the trace is replayed; 0.5 is twice as fast"))
    mooncake_workload: Literal["mooncake", "conversation", "agent", "synthetic"] | None = flag(None, help=(
        "trace to read in the folder --dataset-path, by the file's name there: conversation_trace.jsonl, agent's is "
        "toolagent_trace.jsonl"))
    mooncake_num_rounds: int = flag(1, help=(
        "turns of the chat that each line of a trace becomes; later ones ask the first again"))
    seed: int = flag(1, help="of prompts, lengths and arrivals")

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in (
            "num_prompts", "random_input_len", "random_output_len", "gsp_num_groups", "gsp_prompts_per_group",
            "gsp_system_prompt_len", "gsp_question_len", "gsp_output_len", "num_turns", "mooncake_num_rounds")}
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {value}.")
        if not 0 <= self.random_range_ratio <= 1:
            raise ConfigError(f"--random-range-ratio must be between 0 and 1, not {self.random_range_ratio}.")
        if self.trace_scale < 0:
            raise ConfigError(f"--trace-scale must not be negative, it is {self.trace_scale}.")
        self._check_options()
        if DATASETS.has(self.dataset_name, "file") and self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} needs its file: give --dataset-path.")
        if self.dataset_path is not None and self.dataset_name != "random-ids":
            with dataset_file(self.file):  # now, not when the server has been waited for
                pass

    def _check_options(self) -> None:
        """Raises ConfigError for options of other data sets."""
        if (self.apply_chat_template or self.prompt_suffix) and not DATASETS.has(self.dataset_name, "questions"):
            raise ConfigError("--apply-chat-template and --prompt-suffix are for --dataset-name sharegpt.")
        if (self.mooncake_workload is not None or self.mooncake_num_rounds != 1) and not DATASETS.has(
                self.dataset_name, "times"):
            raise ConfigError("--mooncake-workload and --mooncake-num-rounds are for --dataset-name mooncake.")
        if self.mooncake_workload is not None and not Path(self.dataset_path or "").is_dir():
            raise ConfigError("--mooncake-workload chooses a file of the folder --dataset-path, which must be one: "
                              "download the traces of https://github.com/kvcache-ai/Mooncake, or leave the flag out.")

    @property
    def file(self) -> str:
        """The path of the data set's file."""
        assert self.dataset_path is not None
        if self.mooncake_workload is None:
            return self.dataset_path
        name = "toolagent" if self.mooncake_workload == "agent" else self.mooncake_workload
        return str(Path(self.dataset_path) / f"{name}_trace.jsonl")


@contextmanager
def dataset_file(path: str) -> Iterator[BinaryIO]:
    """The file, to be read; raises ConfigError where it cannot be."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"Cannot read --dataset-path {path}: {error.strerror}.") from None
