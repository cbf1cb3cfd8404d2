"""Flags of the initial workers and of health checks."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ...common.api.errors import ConfigError
from ...common.config.cli import flag
from .checks import at_least_one, not_negative, positive
from .endpoint import Endpoint


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """A worker named at start: ``bootstrap_port`` is an int, None (send null) or "ask" (ask the worker)."""

    url: str
    role: Literal["regular", "prefill", "decode"]
    bootstrap_port: int | None | Literal["ask"] = "ask"


@dataclasses.dataclass(frozen=True)
class WorkerArgs:
    worker_urls: tuple[str, ...] = flag((), metavar="URL", help="URLs of whole workers; more may join by /add_worker")
    pd_disaggregation: bool = flag(False, help="route to pairs of prefill and decode workers")
    prefill: tuple[tuple[str, ...], ...] = flag(
        (), repeat=True, metavar="URL [PORT|none]",
        help="prefill workers, each with its bootstrap port (default: asked from the worker, else 8998); repeatable")
    decode: tuple[tuple[str, ...], ...] = flag((), repeat=True, metavar="URL", help="decode workers; repeatable")

    dp_aware: bool = flag(False, help=(
        "place requests on the data-parallel ranks of each server (its dp_size), not on the server; it receives the "
        "rank as data_parallel_rank"))

    model_alias: tuple[str, ...] = flag(
        (), metavar="ALIAS=NAME", help="further names of models: a request for ALIAS is sent as one for NAME, and "
                                       "/v1/models shows both")
    enable_igw: bool = flag(False, help=(
        "check model names also while all workers serve the same ones: 404 for others (without it, a router of one "
        "model accepts any name)"))

    def __post_init__(self) -> None:
        self.aliases  # noqa: B018 - raises what is wrong with them
        if self.pd_disaggregation and self.worker_urls:
            raise ConfigError("--worker-urls names whole workers; with --pd-disaggregation use --prefill and --decode.")
        if not self.pd_disaggregation and (self.prefill or self.decode):
            raise ConfigError("--prefill and --decode need --pd-disaggregation.")
        urls = [spec.url for spec in self.specs]
        if len(set(urls)) < len(urls):
            raise ConfigError(f"Worker {next(url for url in urls if urls.count(url) > 1)} is named more than once.")

    @property
    def aliases(self) -> dict[str, str]:
        """Real names by alias; raises ConfigError."""
        aliases: dict[str, str] = {}
        for entry in self.model_alias:
            alias, _, name = entry.partition("=")
            if not alias or not name:
                raise ConfigError(f"--model-alias takes ALIAS=NAME, not {entry!r}.")
            if aliases.setdefault(alias, name) != name:
                raise ConfigError(f"--model-alias names {alias} more than once.")
        return aliases

    @property
    def specs(self) -> tuple[WorkerSpec, ...]:
        """The workers named at start, URLs normalized; raises ConfigError for one that is malformed."""
        try:
            return (
                *(WorkerSpec(Endpoint.parse(url).url, "regular") for url in self.worker_urls),
                *(spec for values in self.prefill for spec in _prefill_specs(values)),
                *(WorkerSpec(Endpoint.parse(url).url, "decode") for values in self.decode for url in values),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class HealthArgs:
    connect_timeout_secs: float = flag(5.0, help="longest wait for a TCP connection to a worker")
    worker_startup_timeout_secs: float = flag(
        1800.0, help="log an error when a new worker is not healthy after this time")
    worker_startup_check_interval: float = flag(
        0.5, names=("--worker-startup-check-interval-secs",),
        help="time in seconds between health checks of a worker that was never healthy")
    disable_health_check: bool = flag(
        False, help="treat workers as healthy without asking them; only the circuit breaker takes one out")
    health_check_interval_secs: float = flag(1.0, help="time between health checks of a healthy worker")
    health_check_endpoint: str = flag("/health", help="path that workers are asked for; 2xx means healthy")
    health_check_timeout_secs: float = flag(1.5, help="longest wait for the answer to a health check")
    health_failure_threshold: int = flag(
        2, help="failed checks in a row that take a worker out (of refused connections: one)")
    health_success_threshold: int = flag(2, help="passed checks in a row that bring a failed worker back")

    def __post_init__(self) -> None:
        positive(self, "connect_timeout_secs", "health_check_interval_secs", "health_check_timeout_secs",
                 "worker_startup_check_interval")
        if not self.health_check_endpoint.startswith("/"):
            raise ConfigError("--health-check-endpoint must begin with a slash.")
        at_least_one(self, "health_failure_threshold", "health_success_threshold")
        not_negative(self, "worker_startup_timeout_secs")


def _prefill_specs(values: tuple[str, ...]) -> list[WorkerSpec]:
    """Returns the workers of one ``--prefill``: URLs, each of which a bootstrap port may follow."""
    specs: list[WorkerSpec] = []
    for index, value in enumerate(values):
        if "/" in value or not index:
            specs.append(WorkerSpec(Endpoint.parse(value).url, "prefill"))
        elif "/" in values[index - 1]:
            specs[-1] = dataclasses.replace(specs[-1], bootstrap_port=parse_bootstrap_port(value))
        else:
            raise ConfigError(f"--prefill takes URLs, each with a bootstrap port, not {' '.join(values)!r}.")
    return specs


def parse_bootstrap_port(value: str) -> int | None:
    """``"none"`` or ``"null"`` -> None, digits -> int; raises ValueError otherwise."""
    if value.lower() in ("none", "null"):
        return None
    if not value.isdecimal() or not 0 < int(value) < 65536:
        raise ValueError(f"A bootstrap port is a number from 1 to 65535 or 'none', not {value!r}.")
    return int(value)
