"""Role of a server, and the transfer of KV caches between prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...api.errors import ConfigError
from ...registry import Choices, Registry
from ..cli import flag
from ..roles import ROLES, Role, all_duties
from ..rules import Rule, ServerRule, check_own_rules

TransferOverlap = Literal["layers", "chunk", "prompt"]
TRANSFER_BACKENDS: Registry[Callable[[Any], Any]] = Registry("transfer backend", "baton.kvtransfer.backends")
"""Functions that make a ``Backend`` from ``BackendSettings``; both types are in kvtransfer/backends/base.py. Trait
"maps_host_memory": pools in host memory are mapped by peers, so that they are allocated as shared memory."""


@dataclass(frozen=True)
class DisaggregationArgs:
    disaggregation_mode: str = flag("null", choices=Choices.of(ROLES), help=(
        "role of this server: both phases in one engine, or one of them"))
    enable_pd_role_switch: bool = flag(False, help=(
        "let /switch_role change this server's role between prefill, decode and both phases while it runs; memory, "
        "CUDA graphs and connections are made for all of them"))
    disaggregation_transfer_backend: str = flag("nixl", choices=Choices.of(TRANSFER_BACKENDS), help=(
        "how KV pages travel; ipc copies them between GPUs (or processes) of one host at the speed of their link, auto "
        "is ipc within a host and nixl between hosts"))
    disaggregation_ib_device: str | None = flag(None, help=(
        "RDMA devices of the mooncake backend, with commas between them; without it mooncake uses TCP"))
    disaggregation_bootstrap_port: int = flag(8998, help="port of a prefill server's bootstrap server")
    disaggregation_bootstrap_timeout: float = flag(30.0, help=(
        "seconds that prefill or decode waits for the other side of a request before the request fails"))
    kv_transfer_timeout: float = flag(120.0, help="seconds a reserved request may wait for its KV cache")
    kv_transfer_overlap: TransferOverlap = flag("layers", help=(
        "when a prompt's pages are sent: after the layers of their group, so that they travel while other layers "
        "compute, after the whole chunk, or after the whole prompt, to measure what overlap is worth"))
    peer_timeout: float = flag(3.0, help="seconds of silence after which a prefill or decode peer counts as dead")
    kv_retain_seconds: float = flag(5.0, help=(
        "seconds that a prefill server retains a computed prompt whose first token decode has not acknowledged, so "
        "that another attempt needs no forward pass (0: not at all); other requests may take its memory sooner"))
    kv_checksum: Literal["auto", "sampled", "full", "off"] = flag("auto", help=(
        "how much of each page that arrives a decode server compares with what prefill sent; auto is sampled for "
        "pages in host memory and off on GPUs"))
    cluster_secret: str | None = flag(None, help=(
        "secret that prefill and decode servers share: they refuse messages that are not authenticated with it; better "
        "given in a --config file than on the command line, where other users see it"))

    @property
    def role(self) -> Role:
        return ROLES.get(self.disaggregation_mode)

    @property
    def duties(self) -> Role:
        """The facts of the role, or with --enable-pd-role-switch of all roles that the server may take."""
        return all_duties() if self.enable_pd_role_switch else self.role

    @property
    def shares_memory(self) -> bool:
        """True where peers on this host map the KV pool."""
        backend = self.disaggregation_transfer_backend
        return self.duties.transfers_kv and TRANSFER_BACKENDS.has(backend, "maps_host_memory")

    own_flag_rules: ClassVar[tuple[Rule[DisaggregationArgs], ...]] = (
        Rule(lambda c: c.disaggregation_ib_device is not None and c.disaggregation_transfer_backend != "mooncake",
             "--disaggregation-ib-device is for --disaggregation-transfer-backend mooncake; NIXL takes its devices "
             "from the UCX_NET_DEVICES variable of the environment."),
    )

    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.disaggregation.enable_pd_role_switch and c.parallel.pp_size > 1,
             "--enable-pd-role-switch does not work across the stages of --pp-size: leave one of them out."),
        Rule(lambda c: c.disaggregation.enable_pd_role_switch and c.speculative.speculative_algorithm is not None,
             "--enable-pd-role-switch does not work with drafts, whose state differs between the roles: leave "
             "--speculative-algorithm out."),
        Rule(lambda c: c.disaggregation.enable_pd_role_switch and c.model.is_embedding,
             "--enable-pd-role-switch is for servers that generate: leave it or --is-embedding out."),
        Rule(lambda c: c.disaggregation.enable_pd_role_switch and c.http.tokenizer_worker_num > 1,
             "--enable-pd-role-switch needs the API server in one process: leave --tokenizer-worker-num at 1."),
    )

    def __post_init__(self) -> None:
        check_own_rules(self)
        waits = {"--disaggregation-bootstrap-timeout": self.disaggregation_bootstrap_timeout,
                 "--kv-transfer-timeout": self.kv_transfer_timeout, "--peer-timeout": self.peer_timeout}
        for name, seconds in waits.items():
            if not seconds > 0:
                raise ConfigError(f"{name} must be above 0, not {seconds:g}.")
        least = 1 if self.duties.sends_kv else 0
        if not least <= self.disaggregation_bootstrap_port < 65536:
            raise ConfigError(f"--disaggregation-bootstrap-port must be between {least} and 65535, not "
                              f"{self.disaggregation_bootstrap_port}.")
        if self.kv_retain_seconds < 0:
            raise ConfigError(f"--kv-retain-seconds must be 0 or more, not {self.kv_retain_seconds:g}.")
        if self.cluster_secret == "":
            raise ConfigError("--cluster-secret must not be empty; leave the flag out to go without.")


@dataclass(frozen=True)
class EventsArgs:
    kv_events_port: int = flag(0, help=(
        "port on which prefix-cache changes are published for routers (0: none); replays take the port above it"))

    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.events.kv_events_port and c.cache.disable_radix_cache,
             "--kv-events-port publishes the prefix cache; drop --disable-radix-cache."),
        Rule(lambda c: c.events.kv_events_port and c.data_parallel.dp_size > 1,
             "--kv-events-port publishes one prefix cache, and every attention group of --enable-dp-attention has its "
             "own: leave it out."),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.kv_events_port < 65535:
            raise ConfigError(f"--kv-events-port must be between 0 and 65534, not {self.kv_events_port}.")
