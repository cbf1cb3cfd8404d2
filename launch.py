"""``launch_server`` and ``launch_cluster``: the one module above all folders."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from .common.api.errors import ConfigError
from .common.cluster import ClusterProcess, ask, run_parts, say
from .common.config.addresses import check_free, find_free_ports
from .common.config.cli import build, flag, nested, parse, read_values, to_argv
from .common.config.command import command
from .common.config.logs import LogArgs
from .common.config.packages import check_engine
from .common.config.roles import ROLES
from .common.config.server import ServerConfig, ServerSections, SpeculativeArgs, StorageArgs
from .common.config.server.sglang_flags import SGLANG_FLAGS
from .common.obs.logging import check_folder, setup_logging
from .router.config import RouterConfig
from .router.sglang_flags import co_launched


@command("launch_server")
def launch_server(argv: Sequence[str] | None = None) -> None:
    """Console script: a unified, prefill or decode server, by ``--disaggregation-mode``; with ``--dp-size`` alone
    several whole servers behind a router, as in SGLang."""
    values = read_values(ServerConfig, argv, prog="launch_server", description="Start a server.", foreign=SGLANG_FLAGS)
    if (copies := copies_of(values)) is not None:
        print(f"launch_server: --dp-size {copies.cluster.dp_size} starts as many whole servers behind a router.",
              file=sys.stderr, flush=True)
        if "dist_init_addr" in values:
            print(f"launch_server: --dist-init-addr is not needed: {DECIDED_BY_CLUSTER['dist_init_addr']}.",
                  file=sys.stderr, flush=True)
        _start_cluster(copies, router_tls(values))
    config = build(ServerConfig, values)
    sys.exit(importlib.import_module(config.role.launcher).run(config))


DECIDED_BY_CLUSTER = {
    "disaggregation_mode": "--prefill, --decode and --dp-size say which servers there are",
    "disaggregation_bootstrap_port": "each prefill server gets a port after those of all servers",
    "host": "--host is the router's; the servers listen on 127.0.0.1",
    "port": "--port is the router's; the servers take the ports after it",
    "dp_size": "--dp-size counts whole servers, and attention groups with --enable-dp-attention",
    "dist_init_addr": "all servers run on this host, and the ranks of each meet by themselves",
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_cert_reqs",
                     "enable_ssl_refresh"),
                    "TLS ends at the router; give it --router-ssl-certfile and --router-ssl-keyfile"),
    **dict.fromkeys(("nnodes", "node_rank"),
                    "all servers run on this host; for several hosts use launch_prefill and launch_decode"),
}
"""Flags of a server that launch_cluster does not hand on, by field name, with the reason."""

DEFAULTS = {"model_path": "tinychat", "disaggregation_transfer_backend": "auto"}


@dataclass(frozen=True)
class ClusterArgs:
    prefill: int = flag(1, help="prefill servers")
    decode: int = flag(1, help="decode servers")
    dp_size: int = flag(0, names=("--data-parallel-size", "--dp"), help=(
        "start this many whole servers, in place of prefill and decode servers; with --enable-dp-attention: attention "
        "groups of each prefill and decode server"))
    host: str = flag("127.0.0.1", help="address that the router listens on")
    port: int = flag(30000, help="the router's port; the servers take the ports after it")
    worker_base_port: int = flag(0, names=("--router-dp-worker-base-port",),
                                 help="the first server's port, if not the one after the router's")
    policy: str = flag("cache_aware", help="the router's policy; cache_exact turns the servers' KV events on")
    question: str | None = flag(None, names=("--ask",), help="ask this once all is ready, print the answer and stop")

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1 or self.dp_size < 0:
            raise ConfigError("--prefill and --decode must be 1 or more, --dp-size must not be negative.")

    @property
    def first_port(self) -> int:
        return self.worker_base_port or self.port + 1

    def url(self, scheme: str) -> str:
        return f"{scheme}://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"


@dataclass(frozen=True)
class ClusterConfig:
    cluster: ClusterArgs
    servers: ServerSections = nested(omit=DECIDED_BY_CLUSTER)

    @property
    def roles(self) -> list[str]:
        """The role of each server, in the order of their ports; "null" is a whole server."""
        args = self.cluster
        if args.dp_size and not self.servers.data_parallel.enable_dp_attention:
            return ["null"] * args.dp_size
        return ["prefill"] * args.prefill + ["decode"] * args.decode


_BALANCING = {"round_robin": "round_robin", "shortest_queue": "least_loaded", "minimum_tokens": "least_loaded"}
"""Policies of the router by ``--load-balance-method``."""


def copies_of(values: Mapping[str, Any]) -> ClusterConfig | None:
    """The cluster that a server's flags ask for by ``--dp-size`` without ``--enable-dp-attention``: whole servers
    behind a router at the server's address. None where they ask for one server. Raises ConfigError."""
    if values.get("dp_size", 1) <= 1 or values.get("enable_dp_attention") or not ROLES.get(
            values.get("disaggregation_mode", "null")).serves_alone or values.get("nnodes", 1) > 1:
        return None
    config = {key: value for key, value in values.items() if key not in (*DECIDED_BY_CLUSTER, "load_balance_method")}
    if (method := values.get("load_balance_method")) is not None:
        config["policy"] = _BALANCING[method]
    return build(ClusterConfig,
                 {**config, **{key: values[key] for key in ("host", "port", "dp_size") if key in values}})


def router_tls(values: Mapping[str, Any]) -> list[str]:
    """Returns the router's flags for a server's of TLS. Raises ConfigError for those that the router does not have."""
    given = {name: value for name, value in values.items() if "ssl_" in name and value}
    if others := given.keys() - {"ssl_certfile", "ssl_keyfile"}:
        raise ConfigError(f"--{sorted(others)[0].replace('_', '-')} is not for the router that --dp-size starts: leave "
                          "it out, or start the servers and their router one by one.")
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]


@dataclass(frozen=True)
class ClusterPlan:
    """The configurations of a cluster's processes, servers by name."""

    servers: dict[str, ServerConfig]
    router: RouterConfig

    def url(self, args: ClusterArgs) -> str:
        """The router's address."""
        return args.url("http" if self.router.security.ssl_certfile is None else "https")

    def check_ports(self, args: ClusterArgs) -> None:
        """Raises ConfigError where a port is taken, before any process is started."""
        check_free(args.host, args.port, "--port")
        flag = "--router-dp-worker-base-port" if args.worker_base_port else "--port, which those of the servers follow"
        for server in self.servers.values():
            check_free("127.0.0.1", server.http.port, flag)
            if server.role.sends_kv:
                check_free("127.0.0.1", server.disaggregation.disaggregation_bootstrap_port, flag)

    def processes(self, args: ClusterArgs, folder: Path) -> list[ClusterProcess]:
        """The processes, which log to ``folder``; the router is the last."""
        parts = []
        for name, server in self.servers.items():
            parts.append(ClusterProcess(name, [sys.executable, "-m", *server.role.argv, *to_argv(server)],
                                        f"http://127.0.0.1:{server.http.port}", folder / f"{name}.log"))
        argv = [sys.executable, "-m", "baton.router.launch", *to_argv(self.router)]
        return [*parts, ClusterProcess("router", argv, self.url(args), folder / "router.log", "/readiness",
                                      is_last=True)]


def plan_cluster(config: ClusterConfig, num_gpus: int, router_flags: Sequence[str] = ()) -> ClusterPlan:
    """Configures the processes of a cluster: servers share the GPUs evenly, each memory share shrinking where they
    overlap. ``router_flags`` win over what the router gets by itself. Raises ConfigError."""
    if config.servers.model.delete_ckpt_after_loading and len(config.roles) > 1:
        raise ConfigError("--delete-ckpt-after-loading would remove weights that another server of the cluster still "
                          "loads: leave it out.")
    router = _plan_router(config, router_flags)
    events_ports = _events_ports(config, router)
    count = len(config.roles)
    width = config.servers.parallel.world_size * config.servers.model.gpu_id_step
    slots = max(1, num_gpus // width)
    sharing = -(-count // slots) if num_gpus else 1
    servers: dict[str, ServerConfig] = {}
    for index, role in enumerate(config.roles):
        servers[f"{ROLES.get(role).component}-{config.roles[:index].count(role)}"] = _plan_server(
            config, index, gpu=index % slots * width, sharing=sharing, events_port=events_ports[index])
    return ClusterPlan(servers, router)


def _plan_router(config: ClusterConfig, router_flags: Sequence[str]) -> RouterConfig:
    args, roles, http = config.cluster, config.roles, config.servers.http
    urls = [f"http://127.0.0.1:{args.first_port + index}" for index in range(len(roles))]
    by_role = {role: [url for url, of in zip(urls, roles) if of == role] for role in ("null", "prefill", "decode")}
    logs = dataclasses.replace(config.servers.logs, log_dir=None, log_max_mb=LogArgs.log_max_mb)
    flags = ["--policy", args.policy, *router_flags]
    return parse(RouterConfig, flags, prog="launch_cluster", description="", defaults={
        **vars(logs), "host": args.host, "port": args.port,
        "pd_disaggregation": not by_role["null"], "worker_urls": tuple(by_role["null"]),
        "prefill": tuple((url, str(_bootstrap_port(config, i))) for i, url in enumerate(by_role["prefill"])),
        "decode": tuple((url,) for url in by_role["decode"]),
        "api_key": http.api_key, "admin_api_key": http.admin_api_key,
        "worker_api_key": http.admin_api_key or http.api_key})  # the administrator's key opens everything


def _plan_server(config: ClusterConfig, index: int, *, gpu: int, sharing: int, events_port: int) -> ServerConfig:
    args, sections, mode = config.cluster, config.servers, config.roles[index]
    replace = dataclasses.replace
    disaggregation = replace(sections.disaggregation, disaggregation_mode=mode)
    role = disaggregation.duties
    data_parallel = sections.data_parallel
    if data_parallel.enable_dp_attention:
        data_parallel = replace(data_parallel, dp_size=args.dp_size or 1)
    changed = {
        "model": replace(sections.model, base_gpu_id=sections.model.base_gpu_id + gpu),
        "cache": replace(sections.cache, mem_fraction_static=sections.cache.mem_fraction_static / sharing),
        "schedule": sections.schedule if role.decodes else sections.schedule.without_decoding,
        "speculative": sections.speculative if role.decodes or sections.speculative.is_device else SpeculativeArgs(),
        "parallel": sections.parallel if role.computes_prompts else sections.parallel.without_stages,
        "data_parallel": data_parallel,
        "disaggregation": replace(
            disaggregation, disaggregation_bootstrap_port=_bootstrap_port(config, index if role.sends_kv else 0)),
        "http": replace(sections.http, port=args.first_port + index),
        "events": replace(sections.events, kv_events_port=events_port),
        "storage": sections.storage if role.answers_clients else StorageArgs(),
        "logs": replace(sections.logs, log_dir=None, log_max_mb=LogArgs.log_max_mb),
    }
    return ServerConfig(**{**vars(sections), **changed})


def _bootstrap_port(config: ClusterConfig, index: int) -> int:
    return config.cluster.first_port + len(config.roles) + index


def _events_ports(config: ClusterConfig, router: RouterConfig) -> list[int]:
    """Ports of the servers' KV events, 0 for none: two for each server from --kv-events-port on, or free ones where
    the router's policy needs them and the servers can publish any."""
    sections, policy, count = config.servers, router.policy, len(config.roles)
    if first := sections.events.kv_events_port:
        return [first + 2 * index for index in range(count)]
    needed = "cache_exact" in (policy.policy, policy.prefill_policy, policy.decode_policy)
    if not needed or sections.cache.disable_radix_cache or sections.data_parallel.enable_dp_attention:
        return [0] * count
    return find_free_ports("127.0.0.1", config.cluster.first_port + 2 * count, count, width=2)


@command("launch_cluster")
def launch_cluster(argv: Sequence[str] | None = None) -> None:
    """Console script: router, prefill and decode servers on this host, the shipped chat model by default."""
    own, router_flags = co_launched(sys.argv[1:] if argv is None else argv)
    config = parse(ClusterConfig, own, prog="launch_cluster", defaults=DEFAULTS, foreign=SGLANG_FLAGS,
                   description="Start a router with prefill and decode servers on this host. --router-FLAG gives "
                   "launch_router its --FLAG.")
    _start_cluster(config, router_flags)


def _start_cluster(config: ClusterConfig, router_flags: Sequence[str]) -> NoReturn:
    check_engine()
    plan = plan_cluster(config, _count_gpus(config.servers.model.device), router_flags)
    plan.check_ports(config.cluster)
    if (log_dir := config.servers.logs.log_dir) is not None:
        sys.exit(_run(config, plan, check_folder(log_dir)))
    folder = Path(tempfile.mkdtemp(prefix="baton-logs-"))
    code = None
    try:
        code = _run(config, plan, folder)
    finally:
        if code == 0 or not any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


def _run(config: ClusterConfig, plan: ClusterPlan, folder: Path) -> int:
    """Runs the cluster, whose processes log to ``folder``; returns the exit code."""
    logs = config.servers.logs
    setup_logging(dataclasses.replace(logs, log_dir=None), "cluster")
    until = "" if logs.log_dir else ", until they end without a failure"
    say(f"The logs of all parts are in {folder}{until}.", logs)
    return run_parts(plan.processes(config.cluster, folder), partial(_greet, config, plan), logs)


def _count_gpus(device: str) -> int:
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _greet(config: ClusterConfig, plan: ClusterPlan) -> bool:
    """Prints the cluster's address; with ``--ask`` also an answer. Returns whether the cluster is to stay up."""
    url, question, logs = plan.url(config.cluster), config.cluster.question, config.servers.logs
    name = config.servers.model.served_model_name or config.servers.model.model_path
    key = next(iter(plan.router.security.client_keys), None)
    header = "" if key is None else " -H 'Authorization: Bearer KEY'"
    say(f"\nReady at {url}. Try:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\\n"
        f"    -d '{{\"model\": \"{name}\", \"messages\": [{{\"role\": \"user\", "
        f"\"content\": \"What is the capital of France?\"}}]}}'\n", logs)
    if question is None:
        say("Ctrl-C stops all parts.", logs)
        return True
    try:
        answer = ask(url, name, question, key=key)
    except OSError as error:
        sys.exit(f"launch_cluster: the question was not answered: {error}.")
    say(f"Question: {question}\nAnswer:   {answer}", logs)
    return False


if __name__ == "__main__":  # python -m baton.launch server|cluster ..., where console scripts are not installed
    commands = {"server": launch_server, "cluster": launch_cluster}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit("Say python -m baton.launch server ... or python -m baton.launch cluster ...")
    commands[sys.argv[1]](sys.argv[2:])
