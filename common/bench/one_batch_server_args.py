"""Settings of ``bench_one_batch_server``; names are SGLang's."""

from __future__ import annotations

from dataclasses import dataclass

from ..api.errors import ConfigError
from ..config.cli import flag, nested
from ..config.server import ServerConfig
from .one_batch_args import BatchArgs

_ONE_RUN = "each case is sent once"


@dataclass(frozen=True)
class BatchServerArgs:
    base_url: str | None = flag(None, help="a server that runs already; without it the command starts one")
    skip_warmup: bool = flag(False, help="do not send a batch before the first case")
    temperature: float = flag(0.0, help="sampling temperature of the requests")
    return_logprob: bool = flag(False, help="ask for the log-probability of each output token")
    ready_seconds: float = flag(600.0, help="seconds to wait for the server")

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"--temperature must not be negative, it is {self.temperature:g}.")

    @property
    def url(self) -> str | None:
        return None if self.base_url is None else self.base_url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class BenchOneBatchServer:
    """The server's flags are those of ``launch_server``, for the server that the command starts."""

    requests: BatchServerArgs
    server: ServerConfig
    batches: BatchArgs = nested(omit={"repeat": _ONE_RUN, "parts": "a server does not tell the parts of its steps",
                                      "disable_progress": "it shows none",
                                      "correctness_test": "bench_one_batch has it"})
