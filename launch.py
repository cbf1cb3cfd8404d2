"""``launch_server`` and ``launch_cluster``: the one module above all folders."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .common.api.errors import ConfigError
from .common.cluster import ClusterProcess, ask, run_parts, say
from .common.config.addresses import check_free
from .common.config.cli import flag, parse, to_argv
from .common.config.command import command
from .common.config.logs import LogArgs
from .common.config.packages import check_engine
from .common.config.server import (
    AnswerArgs,
    CacheArgs,
    ChatArgs,
    GrammarArgs,
    KernelArgs,
    ModelArgs,
    ParallelArgs,
    ScheduleArgs,
    ServerConfig,
    StorageArgs,
)
from .common.obs.logging import check_folder, setup_logging
from .router.config import RouterConfig
from .router.sglang_flags import co_launched


@command("launch_server")
def launch_server(argv: Sequence[str] | None = None) -> None:
    """Console script: a unified, prefill or decode server, by ``--disaggregation-mode``."""
    config = parse(ServerConfig, argv, prog="launch_server", description="Start a server.")
    if config.mode == "prefill":
        from .prefill.launch import run
    elif config.mode == "decode":
        from .decode.launch import run
    else:
        from .common.serving.unified_server import run
    sys.exit(run(config))


@dataclass(frozen=True)
class ClusterArgs:
    prefill: int = flag(1, help="prefill servers")
    decode: int = flag(1, help="decode servers")
    dp_size: int = flag(0, help="start this many whole servers, in place of prefill and decode servers")
    host: str = flag("127.0.0.1", help="address that the router listens on")
    port: int = flag(30000, help="the router's port; the servers take the ports after it")
    worker_base_port: int = flag(0, names=("--router-dp-worker-base-port",),
                                 help="the first server's port, if not the one after the router's")
    policy: str = flag("cache_aware", help="the router's policy")
    question: str | None = flag(None, names=("--ask",), help="ask this once all is ready, print the answer and stop")

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1 or self.dp_size < 0:
            raise ConfigError("--prefill and --decode must be 1 or more, --dp-size must not be negative.")


@dataclass(frozen=True)
class ClusterConfig:
    cluster: ClusterArgs
    model: ModelArgs
    cache: CacheArgs
    schedule: ScheduleArgs
    parallel: ParallelArgs
    kernels: KernelArgs
    chat: ChatArgs = ChatArgs()
    grammar: GrammarArgs = GrammarArgs()
    answers: AnswerArgs = AnswerArgs()
    storage: StorageArgs = StorageArgs()
    logs: LogArgs = LogArgs()


@command("launch_cluster")
def launch_cluster(argv: Sequence[str] | None = None) -> None:
    """Console script: router, prefill and decode servers on this host, the shipped chat model by default."""
    own, of_router = co_launched(sys.argv[1:] if argv is None else argv)
    config = parse(ClusterConfig, own, prog="launch_cluster", defaults={"model_path": "tinychat"},
                   description="Start a router with prefill and decode servers on this host. --router-FLAG gives "
                               "launch_router its --FLAG.")
    check_engine()
    _check_ports(config.cluster)
    if config.logs.log_dir is not None:
        sys.exit(_run(config, check_folder(config.logs.log_dir), of_router))
    folder = Path(tempfile.mkdtemp(prefix="baton-logs-"))
    code = None
    try:
        code = _run(config, folder, of_router)
    finally:
        if code == 0 or not any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


def _check_ports(args: ClusterArgs) -> None:
    """Raises ConfigError where one of them is taken, before anything is started for it."""
    check_free(args.host, args.port, "--port")
    flag = "--router-dp-worker-base-port" if args.worker_base_port else "--port, which those of the servers follow"
    first, count = args.worker_base_port or args.port + 1, args.dp_size or args.prefill + args.decode
    for port in range(first, first + (count if args.dp_size else count + args.prefill)):  # the last: bootstrap servers
        check_free("127.0.0.1", port, flag)


def _run(config: ClusterConfig, folder: Path, of_router: Sequence[str]) -> int:
    """Run the cluster, whose parts' output goes to ``folder``; returns the exit code."""
    parts = plan_cluster(dataclasses.replace(config, logs=dataclasses.replace(config.logs, log_dir=str(folder))),
                         _count_gpus(config.model.device), of_router)
    flags = parts[-1].argv[parts[-1].argv.index("baton.router.launch") + 1:]
    parse(RouterConfig, flags, prog="launch_cluster", description="")  # before the servers load their weights
    setup_logging(dataclasses.replace(config.logs, log_dir=None), "cluster")
    kept = "" if config.logs.log_dir else ", until they end without a failure"
    say(f"The logs of all parts are in {folder}{kept}.", config.logs)
    return run_parts(parts, lambda: _greet(config), config.logs)


def plan_cluster(config: ClusterConfig, num_gpus: int, router_flags: Sequence[str] = ()) -> list[ClusterProcess]:
    """The processes of a cluster: servers share the GPUs evenly, each memory share shrinking where they overlap."""
    args = config.cluster
    logs = Path(config.logs.log_dir or ".")
    of_log = to_argv(dataclasses.replace(config.logs, log_dir=None, log_max_mb=LogArgs.log_max_mb))
    count = args.dp_size or args.prefill + args.decode
    slots = max(1, num_gpus // config.parallel.world_size)
    sharing = -(-count // slots) if num_gpus else 1
    first = args.worker_base_port or args.port + 1
    parts, router = [], ["--host", args.host, "--port", str(args.port), "--policy", args.policy]
    router += ["--worker-urls"] if args.dp_size else ["--pd-disaggregation"]
    for index in range(count):
        role = "server" if args.dp_size else "prefill" if index < args.prefill else "decode"
        port, bootstrap = first + index, first + count + index
        model = dataclasses.replace(
            config.model, base_gpu_id=config.model.base_gpu_id + index % slots * config.parallel.world_size)
        cache = dataclasses.replace(config.cache, mem_fraction_static=config.cache.mem_fraction_static / sharing)
        schedule = config.schedule.for_prefill if role == "prefill" else config.schedule
        parallel = config.parallel.for_decode if role == "decode" else config.parallel
        sections = (model, cache, schedule, parallel, config.kernels, config.chat, config.grammar,
                    config.answers, *([] if role == "prefill" else [config.storage]))
        flags = [word for section in sections for word in to_argv(section)]
        flags += ["--port", str(port), *of_log]
        if role != "server":
            flags += ["--disaggregation-bootstrap-port", str(bootstrap)]
        url = f"http://127.0.0.1:{port}"
        name = f"{role}-{index - args.prefill if role == 'decode' else index}"
        module = ["baton.launch", "server"] if role == "server" else [f"baton.{role}.launch"]
        parts.append(ClusterProcess(name, [sys.executable, "-m", *module, *flags], url, logs / f"{name}.log"))
        router += {"server": [url], "prefill": ["--prefill", url, str(bootstrap)], "decode": ["--decode", url]}[role]
    front = f"http://{'127.0.0.1' if args.host == '0.0.0.0' else args.host}:{args.port}"
    parts.append(ClusterProcess("router",
                                [sys.executable, "-m", "baton.router.launch", *router, *of_log, *router_flags], front,
                                logs / "router.log", "/readiness"))
    return parts


def _count_gpus(device: str) -> int:
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _greet(config: ClusterConfig) -> bool:
    """Say where the cluster is, and whether it should stay up: with ``--ask`` it answers and stops."""
    args = config.cluster
    name = config.model.served_model_name or config.model.model_path
    url = f"http://{'127.0.0.1' if args.host == '0.0.0.0' else args.host}:{args.port}"
    say(f"\nReady at {url}. Try:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{{\"model\": \"{name}\", \"messages\": [{{\"role\": \"user\", "
        f"\"content\": \"What is the capital of France?\"}}]}}'\n", config.logs)
    if args.question is None:
        say("Ctrl-C stops all parts.", config.logs)
        return True
    try:
        answer = ask(url, name, args.question)
    except OSError as error:
        sys.exit(f"launch_cluster: the question was not answered: {error}.")
    say(f"Question: {args.question}\nAnswer:   {answer}", config.logs)
    return False


if __name__ == "__main__":  # python -m baton.launch server|cluster ..., where console scripts are not installed
    commands = {"server": launch_server, "cluster": launch_cluster}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit("Say python -m baton.launch server ... or python -m baton.launch cluster ...")
    commands[sys.argv[1]](sys.argv[2:])
