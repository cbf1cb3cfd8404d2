"""What ``deploy/`` says is true: its flags parse, its metrics exist, its files are there, its waits are long enough.

Nothing here needs Docker or Kubernetes; images and manifests are read as text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml

from baton.common.api.messages import State
from baton.common.config.cli import parse
from baton.common.config.server import HttpArgs, ObserveArgs, ServerConfig
from baton.common.distributed.tp import TPGroup
from baton.common.kvcache.cache_group import CacheGroup, SlidingWindow
from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.state_group import StateGroup
from baton.common.kvcache.storage.storage import StorageCounters
from baton.common.obs.buckets import Buckets
from baton.common.obs.metrics import ServerMetrics
from baton.common.scheduler.draft_stats import DraftStats
from baton.common.scheduler.request_tracker import RequestTracker
from baton.common.scheduler.tier_prefetch import Prefetches
from baton.common.serving import host
from baton.kvtransfer.receiver.receiver_core import ReceiverCore
from baton.kvtransfer.sender.sender_core import SenderCore
from baton.prefill.scheduler import PrefillScheduler
from baton.router.config import RouterConfig
from baton.router.obs.metrics import Metrics
from baton.router.workers.registry import Registry
from baton.tests.helpers.layers import imports_of
from baton.tests.helpers.tier_simulation import SimulatedRank

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
YAML_FILES = sorted(path for path in (*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")) if "templates" not in path.parts)
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
SERVER_COMMANDS = {"launch_server": "null", "launch_prefill": "prefill", "launch_decode": "decode"}


class Command(NamedTuple):
    where: str
    words: list[str]

    def parse(self) -> RouterConfig | ServerConfig:
        name, *argv = self.words
        if name == "launch_router":
            return parse(RouterConfig, argv, prog=name, description="")
        return parse(ServerConfig, argv, prog=name, description="",
                     defaults={"disaggregation_mode": SERVER_COMMANDS[name]})


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found is not None]


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document.get("spec", {}).get("template", {}).get("spec", {}) if isinstance(document, dict) else {}
    return spec.get("containers", [])


def compose() -> dict[str, Any]:
    text = (DEPLOY / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def instructions(path: Path) -> list[tuple[str, str]]:
    """``(instruction, rest)`` of a Dockerfile, continuation lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def commands() -> list[Command]:
    found = []
    for name, service in compose()["services"].items():
        if service["image"].startswith("baton-"):
            entry = ["launch_router"] if service["image"] == "baton-router" else []
            found.append(Command(f"compose.yaml: {name}", [*entry, *service["command"]]))
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml")):
        for document in documents(path):
            for container in containers(document):  # An overlay's patch names no command: the base's stays.
                start = container.get("command", [f"launch_{container['name']}"])
                found.append(Command(str(path.relative_to(DEPLOY)), [*start, *container["args"]]))
    for path in DOCKERFILES:
        last = dict(instructions(path))
        found.append(Command(path.name, [*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]))
    return found


COMMANDS = commands()


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yaml_parses(path):
    assert documents(path)


def test_every_role_is_started_by_compose_and_manifests():
    for prefix in ("compose.yaml", "kubernetes/base", "kubernetes/tinychat"):
        started = {command.words[0] for command in COMMANDS if command.where.startswith(prefix)}
        assert started >= {"launch_prefill", "launch_decode"}, prefix
    assert sum(command.words[0] == "launch_router" for command in COMMANDS) == 4  # compose, manifests, image


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.where)
def test_command_line_is_accepted(command):
    config = command.parse()
    if isinstance(config, ServerConfig):
        assert (config.http.host, config.http.port) == ("0.0.0.0", 30000)
        assert config.mode == SERVER_COMMANDS[command.words[0]]
    else:
        assert (config.http.host, config.http.port) == ("0.0.0.0", 30000)


def test_wrong_flag_would_be_found():
    with pytest.raises(SystemExit):
        Command("", ["launch_router", "--no-such-flag"]).parse()


def test_router_of_compose_names_services_that_exist():
    services = compose()["services"]
    aliases = {alias for service in services.values()
               for alias in service.get("networks", {}).get("default", {}).get("aliases", [])} | set(services)
    assert {host_of(worker.url) for worker in router_config("compose.yaml").workers.specs} <= aliases
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert {name for job in scraped for sd in job["dns_sd_configs"] for name in sd["names"]} <= aliases


def test_router_of_manifests_names_every_pod():
    pods = set()
    base = [document for path in sorted((DEPLOY / "kubernetes/base").glob("*.yaml")) for document in documents(path)]
    headless = {d["metadata"]["name"] for d in base if d["kind"] == "Service" and d["spec"].get("clusterIP") == "None"}
    for document in base:
        if document["kind"] == "StatefulSet":
            assert document["spec"]["serviceName"] in headless
            name = document["metadata"]["name"]
            pods |= {f"{name}-{i}.{document['spec']['serviceName']}" for i in range(document["spec"]["replicas"])}
    assert {host_of(worker.url) for worker in router_config("kubernetes/base").workers.specs} == pods


def test_routers_know_the_bootstrap_port_of_their_prefill_servers():
    for place in ("compose.yaml", "kubernetes"):
        configs = [command.parse() for command in COMMANDS if command.where.startswith(place)]
        known = {worker.bootstrap_port for config in configs if isinstance(config, RouterConfig)
                 for worker in config.workers.specs if worker.role == "prefill"}
        ports = {config.disaggregation.disaggregation_bootstrap_port for config in configs
                 if isinstance(config, ServerConfig) and config.mode == "prefill"}
        assert known == ports == {8998}


def test_kustomizations_name_files_that_exist():
    for path in (DEPLOY / "kubernetes").rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text())
        files = [*kustomization["resources"], *(patch["path"] for patch in kustomization.get("patches", []))]
        assert all((path.parent / name).exists() for name in files)
    base = yaml.safe_load((DEPLOY / "kubernetes/base/kustomization.yaml").read_text())
    assert {"kustomization.yaml", *base["resources"]} == {p.name for p in (DEPLOY / "kubernetes/base").iterdir()}


def test_probes_ask_for_paths_that_exist():
    paths = {"launch_router": {"/liveness", "/readiness"}}
    for document in (d for path in sorted((DEPLOY / "kubernetes/base").glob("*.yaml")) for d in documents(path)):
        for container in containers(document):
            probes = [probe for key, probe in container.items() if key.endswith("Probe")]
            assert len(probes) >= 2
            assert {probe["httpGet"]["path"] for probe in probes} <= paths.get(container["command"][0], {"/health"})


def test_stops_wait_for_the_drain():
    drain = HttpArgs().shutdown_grace_secs + host._RANK_GRACE_SECONDS
    for name, service in compose()["services"].items():
        if service["image"].startswith("baton-"):
            needed = router_config("compose.yaml").http.shutdown_grace_secs if name == "router" else drain
            assert float(service["stop_grace_period"].removesuffix("s")) > needed
    for document in (d for path in sorted((DEPLOY / "kubernetes/base").glob("*.yaml")) for d in documents(path)):
        for container in containers(document):
            grace, needed = document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], drain
            if container["name"] == "router":
                pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
                needed = pause + router_config("kubernetes/base").http.shutdown_grace_secs
            assert grace > needed, container["name"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile(path):
    steps = instructions(path)
    copied = [word for name, rest in steps if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    found = {source: {path.name for path in ROOT.glob(source)} for source in copied}
    assert all(found.values())
    lacking = needed_by_the_package() - set().union(*found.values())
    assert not lacking, "baton.Engine, the commands or the benches lack a part"
    assert [rest for name, rest in steps if name == "USER"] == ["10001"]
    project = (ROOT / "pyproject.toml").read_text()
    for extras in (rest.partition("=")[2] for name, rest in steps if name == "ARG" and rest.startswith("EXTRAS=")):
        assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))


def needed_by_the_package() -> set[str]:
    """Names at the root that building and importing the package takes: its modules, what these import, the folders that
    setup.py packs, and the files that the metadata names."""
    setup = (ROOT / "setup.py").read_text()
    packed = re.search(r"FOLDERS = \((.+?)\)", setup)
    assert packed is not None
    folders = set(re.findall(r'"(\w+)"', packed[1]))
    modules = {path.name for path in ROOT.glob("*.py")}
    for path in [ROOT / name for name in modules] + [path for name in folders for path in (ROOT / name).rglob("*.py")]:
        for name in filter(None, (each.target for each in imports_of(path))):
            known = name[0] in folders or f"{name[0]}.py" in modules or name[0] in ("Engine", "__version__")
            assert known, f"{path.relative_to(ROOT)} imports {'.'.join(name)}, which no wheel holds"
    project = (ROOT / "pyproject.toml").read_text()
    metadata = {*re.findall(r'^readme = "(.+?)"', project, re.MULTILINE),
                *re.findall(r'"(.+?)"', re.search(r"^license-files = \[(.+?)\]", project, re.MULTILINE)[1])}  # type: ignore
    root_data = re.search(r'package_data=\{"baton": \[(.+?)\]', setup)
    assert root_data is not None
    return modules | folders | metadata | set(re.findall(r'"(.+?)"', root_data[1])) | {"pyproject.toml"}


def router_config(place: str) -> RouterConfig:
    command = next(c for c in COMMANDS if c.where.startswith(place) and c.words[0] == "launch_router")
    config = command.parse()
    assert isinstance(config, RouterConfig)
    return config


def host_of(url: str) -> str:
    return url.split("://")[1].split(":")[0]


# ---------------------------------------------------------------------- metrics


def server_families() -> dict[str, set[str]]:
    """The servers' metrics with their labels: a server of any role has a part of them."""
    tracker = RequestTracker(lambda message: None, eos_ids=frozenset(), vocab_size=9, max_request_tokens=1,
                             max_requests=1, timeout=1.0)
    info: Any = SimpleNamespace(layouts=(), further_layouts=())
    cores: list[Any] = [ReceiverCore(info, None, 1), SenderCore(info, None)]  # type: ignore[arg-type]
    counters = {name: 1.0 for part in (tracker, *cores) for name in part.counters}
    counters["kv_transfers_failed_kv_transfer_failed"] = 1.0  # by the error's code, once there is one
    counters["kv_transfers_broken_silent"] = 1.0
    sender: Any = SimpleNamespace(counters={}, writes_waiting=(0, 0))
    tiered = SimulatedRank(TPGroup(), 0).batcher
    assert tiered.rates is not None
    tiered.rates.prefill = tiered.rates.storage = 1
    storage: Any = SimpleNamespace(counters=StorageCounters(), num_queued_writes=0, healthy=True)
    prefetches = Prefetches(tiered.cache, None, storage, None, tiered.rates)  # type: ignore[arg-type]
    counters |= prefetches.storage_counters
    prefill = PrefillScheduler(tiered, None, None, sender, None, [1], register=None,  # type: ignore
                               overlap=False, kv_retain_seconds=0.0)
    drafts = DraftStats(3, 3)
    counters |= {**prefill.counters, **drafts.counters}
    windowed = KVCacheManager(1, 16, groups=[CacheGroup(SlidingWindow(8), 3, 16), StateGroup(3, 16)])
    metrics = ServerMetrics("m", "decode", speculates=True, tiered=True,
                            buckets=Buckets.of_flags(ObserveArgs(collect_tokens_histogram=True)))
    metrics.count_outcome("stop")
    metrics.count_objective("ttft", met=True)
    metrics.engine.states = [State(
        seq=0, total_pages=1, free_pages=1, held_pages=0, cached_pages=0, page_size=1, num_running=0, num_waiting=0,
        num_transferring=0, counters={**counters, "retracted_requests": 1.0},
        gauges={"token_usage": 0.0, "expert_utilization": 1.0, **windowed.group_gauges, **prefill.gauges,
                **drafts.gauges, **prefetches.storage_gauges})]
    return families(metrics.registry.collect())


def router_families() -> dict[str, set[str]]:
    metrics = Metrics(Registry(failure_threshold=1, success_threshold=1))
    metrics.requests["/v1/completions", 200] += 1
    metrics.durations["/v1/completions"].observe(1.0)
    metrics.first_tokens["/v1/completions"].observe(1.0)
    metrics.retries["connect"] += 1
    metrics.decisions["decode", "only"] += 1
    found = families(metrics.families())
    for name in ("baton_router_worker_inflight_requests", "baton_router_worker_healthy"):
        assert name in found
        found[name] = {"worker", "role"}  # No worker is registered here, so they have no sample.
    return found


def families(collected: Any) -> dict[str, set[str]]:
    """Sample names as a scrape shows them, with their labels; a histogram's by its family's name too."""
    found: dict[str, set[str]] = {}
    for family in collected:
        whole = found.setdefault(family.name + ("_total" if family.type == "counter" else ""), set())
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, set()).update(sample.labels)
                whole |= set(sample.labels) - {"le"}
    return found


METRIC = re.compile(r"\bbaton[:_][a-z0-9_]+")


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    return {**server_families(), **router_families()}


def dashboard_queries() -> list[str]:
    board = json.loads((DEPLOY / "grafana/baton.json").read_text())
    variables = [variable["query"] for variable in board["templating"]["list"]]
    return variables + [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def alert_queries() -> list[str]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("queries", [dashboard_queries, alert_queries])
def test_queries_use_metrics_that_exist(known, queries):
    names = {name for query in queries() for name in METRIC.findall(query)}
    assert len(names) > 15
    assert names - set(known) == set()


@pytest.mark.parametrize("queries", [dashboard_queries, alert_queries])
def test_queries_use_labels_that_exist(known, queries):
    added_by_prometheus = {"instance", "job"}
    for query in queries():
        labels = set().union(*(known[name] for name in METRIC.findall(query))) | added_by_prometheus
        used = set(re.findall(r"(\w+)!?=~?\"", query))
        for group in re.findall(r"(?:by|on) \(([^)]*)\)", query):
            used |= {label.strip() for label in group.split(",")} - {""}
        assert used <= labels, query


def test_dashboard_panels_do_not_overlap():
    board = json.loads((DEPLOY / "grafana/baton.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_docs_list_every_metric(known):
    listed = set(METRIC.findall((ROOT / "docs/metrics.md").read_text()))
    samples = {name for name in known if not name.endswith(("_bucket", "_count", "_sum"))}
    assert samples - listed == set()
    assert listed - samples == {"baton_build_info"}  # of every process, not of one kind
