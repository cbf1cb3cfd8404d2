"""Settings of ``bench_deterministic``; names and defaults are those of SGLang's test of the same protocol."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from ..config.cli import flag
from ..config.rules import at_least


@dataclass(frozen=True)
class DeterministicArgs:
    base_url: str | None = flag(None, help="the server's or router's address, in place of --host and --port")
    host: str = flag("127.0.0.1", help="the server's host")
    port: int = flag(30000, help="the server's port")
    api_key: str | None = flag(None, help="key that the server asks for; the default is OPENAI_API_KEY's")
    test_mode: Literal["single", "prefix", "radix_cache"] = flag("single", help=(
        "single: one prompt in batches of growing size; prefix: prompts that begin alike, in random batches; "
        "radix_cache: tokens computed by decoding, as a prompt, and as a prompt of which a part is cached"))
    n_trials: int = flag(50, help="batches that are sent")
    n_start: int = flag(1, help="requests of the first batch; each further one has one more")
    max_new_tokens: int = flag(100, help="tokens of an answer")
    temperature: float = flag(0.0, help="of all requests")
    sampling_seed: int = flag(42, help="of all requests")
    frequency_penalty: float = flag(0.0, help="of all requests")
    presence_penalty: float = flag(0.0, help="of all requests")
    return_logprob: bool = flag(False, help="compare log-probabilities too, bit by bit")
    ready_check_timeout_sec: float = flag(60.0, help="seconds to wait for the server")
    request_timeout: float = flag(3600.0, help="seconds that a batch may take")

    def __post_init__(self) -> None:
        at_least(self, 1, "n_trials", "n_start", "max_new_tokens")

    @property
    def url(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        return {"Authorization": f"Bearer {key}"} if key else {}
