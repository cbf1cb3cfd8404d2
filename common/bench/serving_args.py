"""Settings of ``bench_serving``; names and defaults are SGLang's where the thing is the same."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

from ..api.errors import ConfigError
from ..config.cli import flag
from .profile_args import ProfileArgs
from .report.goodput import Slo
from .workloads.dataset_args import DatasetArgs

Backend = Literal["baton", "sglang", "vllm", "openai", "openai-chat", "sglang-oai", "sglang-oai-chat", "vllm-chat"]


@dataclass(frozen=True)
class TargetArgs:
    backend: Backend = flag("baton", help=(
        "API to speak: baton and sglang are /generate, vllm and openai completions, those with chat chats"))
    base_url: str | None = flag(None, help="the server's or router's address, in place of --host and --port")
    host: str = flag("127.0.0.1", help="the server's host")
    port: int = flag(30000, help="the server's port")
    model: str | None = flag(None, names=("--model-path", "--served-model-name"), help=(
        "model to ask for; the default is the first that is served"))
    tokenizer: str | None = flag(None, help=(
        "tokenizer folder or hub id that prompts are made with; the default is the one that the server names"))
    tokenize_prompt: bool = flag(False, help="send token ids in place of text (not in chats)")
    api_key: str | None = flag(None, help="key that the server asks for; the default is OPENAI_API_KEY's")
    header: tuple[tuple[str, ...], ...] = flag((), repeat=True, metavar="NAME=VALUE", help="further header of requests")
    extra_request_body: str | None = flag(None, help="JSON object whose fields go into every request")
    disable_ignore_eos: bool = flag(False, help="let answers end where the model ends them")
    return_logprob: bool = flag(False, help="ask for the log-probability of each output token")
    disable_stream: bool = flag(False, help="take each answer in one piece")
    ready_check_timeout_sec: float = flag(60.0, help="seconds to wait for the server")
    request_timeout: float = flag(3600.0, help="seconds that a request may take")

    @property
    def url(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        """Raises ConfigError."""
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        found = {"Authorization": f"Bearer {key}"} if key else {}
        for pair in (word for words in self.header for word in words):
            name, equals, value = pair.partition("=")
            if not equals or not name or "\n" in pair or "\r" in pair:
                raise ConfigError(f"--header takes NAME=VALUE, not {pair!r}.")
            found[name] = value
        return found

    @property
    def extra(self) -> dict[str, Any]:
        """Raises ConfigError."""
        try:
            found = json.loads(self.extra_request_body or "{}")
        except ValueError as error:
            raise ConfigError(f"--extra-request-body is not JSON: {error}.") from None
        if not isinstance(found, dict):
            raise ConfigError("--extra-request-body must be a JSON object.")
        return found


@dataclass(frozen=True)
class LoadArgs:
    request_rate: float | None = flag(None, help=(
        "requests a second, at random times (a Poisson process); the default is inf, all at once, and a trace's own "
        "times"))
    max_concurrency: int | None = flag(None, help="requests (of multi-turn, chats) that are open together at most")
    warmup_requests: int = flag(1, help="requests before the run, which are not counted")
    flush_cache: bool = flag(False, help="drop the server's prefix cache before the run")

    def __post_init__(self) -> None:
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"--request-rate must be above 0 (inf sends all at once), not {self.request_rate}.")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be 1 or more, not {self.max_concurrency}.")
        if self.warmup_requests < 0:
            raise ConfigError(f"--warmup-requests must not be negative, it is {self.warmup_requests}.")

    @property
    def shown_rate(self) -> float | str:
        """For a record: a number, or ``inf``."""
        return "inf" if self.request_rate is None or math.isinf(self.request_rate) else self.request_rate


@dataclass(frozen=True)
class ReportArgs:
    output_file: str | None = flag(None, help="append settings and figures to this file, a JSON object a line")
    output_details: bool = flag(False, help="with them, each request's lengths, times and error")
    plot: str | None = flag(None, help="draw the figures into this SVG file")
    goodput: tuple[str, ...] = flag((), help="count requests within these milliseconds: ttft:200 tpot:20 e2e:5000")
    tag: str | None = flag(None, help="a name for the run in --output-file")
    disable_progress: bool = flag(False, names=("--disable-tqdm",), help="show no progress")

    def __post_init__(self) -> None:
        if self.output_details and self.output_file is None:
            raise ConfigError("--output-details needs --output-file.")
        Slo.parse(self.goodput)


@dataclass(frozen=True)
class BenchServing:
    target: TargetArgs
    dataset: DatasetArgs
    load: LoadArgs
    profile: ProfileArgs
    report: ReportArgs

    def __post_init__(self) -> None:
        assert self.target.headers is not None and self.target.extra is not None  # raise ConfigError where unreadable
