"""The Helm chart, rendered by ``helm`` with several sets of values."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.common.config.cli import parse
from baton.common.config.server import ServerConfig
from baton.common.serving import host
from baton.router.config import RouterConfig
from baton.router.config.discovery import split

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/baton"
BESIDE = Path(sys.executable).parent / "helm"
HELM = str(BESIDE) if BESIDE.exists() else shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm (tests/deploy/fetch_tools.py)")
MODES = {"launch_server": "null", "launch_prefill": "prefill", "launch_decode": "decode"}

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "unified": {"mode": "unified", "pools": {"unified": {"replicas": 3, "autoscaling": {"kind": "hpa"}}}},
    "no_gpu": {"model": "tinychat", "images": {"engine": "baton-engine:cpu"}, "networkPolicy": {"enabled": False},
               "poolDefaults": {"gpuResource": "", "extraArgs": ["--device=cpu"], "tolerations": [],
                                "models": {"size": ""}}},
    "several_hosts": {
        "podMonitor": {"enabled": True},
        "poolDefaults": {"rdma": {"resource": "rdma/hca", "count": 4}, "autoscaling": {"kind": "keda"},
                         "models": {"existingClaim": "checkpoints"}},
        "pools": {"prefill": {"tpSize": 16, "nodes": 2, "env": [{"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}]},
                  "decode": {"tpSize": 8}}},
    "everything": {
        "fullnameOverride": "llm", "servedModelName": "me", "httpRoute": {"enabled": True, "hostnames": ["llm.lan"]},
        "secrets": {"create": True, "apiKey": "a", "adminApiKey": "b", "workerApiKey": "c", "clusterSecret": "d"},
        "images": {"pullSecrets": ["registry"]}, "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "router": {"extraArgs": ["--max-concurrent-requests=64"], "nodeSelector": {"pool": "cpu"},
                   "tolerations": [{"operator": "Exists"}], "podAnnotations": {"a": "b"},
                   "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
                   "serviceAccountAnnotations": {"a": "b"}},
        "poolDefaults": {"autoscaling": {"kind": "hpa"}, "priorityClassName": "high", "nodeSelector": {"gpu": "h200"},
                         "affinity": {"podAntiAffinity": {}}, "podAnnotations": {"a": "b"},
                         "resources": {"limits": {"memory": "64Gi"}}, "models": {"storageClass": "fast"}}},
}

Objects = dict[tuple[str, str], dict[str, Any]]


def helm(folder: Path, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    (folder / "values.json").write_text(json.dumps(values))
    assert HELM is not None
    return subprocess.run([HELM, "template", "blue", str(CHART), "-n", "llms", "-f", str(folder / "values.json")],
                          capture_output=True, text=True)


@pytest.fixture(scope="module", params=CASES)
def case(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def objects(case, tmp_path_factory) -> Objects:
    done = helm(tmp_path_factory.mktemp(case), CASES[case])
    assert done.returncode == 0, done.stderr
    found = [document for document in yaml.safe_load_all(done.stdout) if document]
    named = {(document["kind"], document["metadata"]["name"]): document for document in found}
    assert len(named) == len(found)
    return named


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    """Pod templates by their component."""
    templates = []
    for (kind, _), document in objects.items():
        if kind in ("Deployment", "StatefulSet"):
            templates.append(document["spec"]["template"])
        if kind == "LeaderWorkerSet":
            template = document["spec"]["leaderWorkerTemplate"]
            templates += [template["leaderTemplate"], template["workerTemplate"]]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in templates}


def box_of(template: dict[str, Any]) -> dict[str, Any]:
    (box,) = template["spec"]["containers"]
    return box


def command_of(template: dict[str, Any]) -> RouterConfig | ServerConfig:
    """What our parser makes of the pod's command; a reference to a variable that the pod lacks stays, and fails."""
    box = box_of(template)
    # LeaderWorkerSet's controller adds the address of the leader.
    known = {"LWS_LEADER_ADDRESS": "blue-prefill-0.blue-prefill.llms"}
    known |= {entry["name"]: "1" if entry["name"] == "NODE_RANK" else "x" for entry in box["env"]}
    (name,) = box["command"]
    argv = [re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], "--lacks"), arg) for arg in box["args"]]
    if name == "launch_router":
        return parse(RouterConfig, argv, prog=name, description="")
    return parse(ServerConfig, argv, prog=name, description="", defaults={"disaggregation_mode": MODES[name]})


# ---------------------------------------------------------------------- schemas


def misfits(value: dict[str, Any], kind: str) -> list[str]:
    """``FIELD: why`` of each field that ``kind``, a type of the client, lacks, needs or has of another type."""
    from kubernetes import client
    from pydantic import ValidationError

    try:
        getattr(client, kind).model_validate(value)
    except ValidationError as error:
        return [f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()]
    return []


CUSTOM = {"LeaderWorkerSet": {"replicas", "startupPolicy", "leaderWorkerTemplate"},
          "ScaledObject": {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"},
          "PodMonitor": {"selector", "podTargetLabels", "podMetricsEndpoints"},
          "HTTPRoute": {"parentRefs", "hostnames", "rules"}}


@needs_helm
def test_objects_fit_kubernetes_schemas(objects):
    kinds = {"Deployment": "V1Deployment", "StatefulSet": "V1StatefulSet", "Service": "V1Service", "Role": "V1Role",
             "RoleBinding": "V1RoleBinding", "ServiceAccount": "V1ServiceAccount", "Secret": "V1Secret",
             "NetworkPolicy": "V1NetworkPolicy", "PodDisruptionBudget": "V1PodDisruptionBudget",
             "HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler"}
    for (kind, name), document in objects.items():
        assert document["metadata"]["namespace"] == "llms"
        if kind in CUSTOM:
            assert set(document["spec"]) <= CUSTOM[kind], f"{kind} {name}"
        else:
            assert misfits(document, kinds[kind]) == [], f"{kind} {name}"
    for template in pods(objects).values():
        assert misfits(template, "V1PodTemplateSpec") == []


def test_a_misfit_would_be_found():
    pod = {"spec": {"containers": [{"name": "a", "imagePolicy": "x"}], "nodeSelector": []}}
    assert [found.partition(":")[0] for found in misfits(pod, "V1PodTemplateSpec")] == [
        "spec.containers.0.imagePolicy", "spec.nodeSelector"]


# ---------------------------------------------------------------------- what the objects say


@needs_helm
def test_commands_are_accepted(case, objects):
    values = CASES[case]
    for component, template in pods(objects).items():
        config = command_of(template)
        assert config.http.port == 30000
        if isinstance(config, ServerConfig):
            role = component.removesuffix("-host")
            assert config.mode == {"unified": "null"}.get(role, role)
            assert config.parallel.tp_size == values.get("pools", {}).get(role, {}).get("tpSize", 1)
            assert config.nodes.nnodes == (2 if case == "several_hosts" and role == "prefill" else 1)
            assert config.nodes.node_rank == config.nodes.nnodes - 1  # NODE_RANK is 1 above.
            if config.nodes.nnodes > 1:
                assert config.nodes.dist_init_addr == "blue-prefill-0.blue-prefill.llms:5000"
    assert {name for name in pods(objects) if not name.endswith("-host")} == (
        {"router", "unified"} if values.get("mode") == "unified" else {"router", "prefill", "decode"})


@needs_helm
def test_the_router_finds_leaders_alone(objects):
    config = command_of(pods(objects)["router"])
    assert isinstance(config, RouterConfig)
    found = config.discovery
    assert found.service_discovery and found.service_discovery_namespace == "llms"
    for role, selector in (("prefill", found.prefill_selector), ("decode", found.decode_selector),
                           ("unified", found.selector)):
        wanted = dict(item.split("=") for item in split(selector))
        matching = [component for component, template in pods(objects).items()
                    if wanted and wanted.items() <= template["metadata"]["labels"].items()]
        assert matching == ([role] if role in pods(objects) else [])
    account = pods(objects)["router"]["spec"]["serviceAccountName"]
    assert objects["Role", account]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    (subject,) = objects["RoleBinding", account]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": account, "namespace": "llms"}
    assert all(("ServiceAccount", template["spec"]["serviceAccountName"]) in objects
               for template in pods(objects).values())
    assert [name for name, template in pods(objects).items() if template["spec"]["automountServiceAccountToken"]] == [
        "router"]


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        rule["operator"] == "In" and labels.get(rule["key"]) in rule["values"]
        for rule in selector.get("matchExpressions", []))


@needs_helm
def test_selectors_match_the_pods_that_they_mean(objects):
    labels = {component: template["metadata"]["labels"] for component, template in pods(objects).items()}
    for (kind, name), document in objects.items():
        spec = document.get("spec", {})
        component = name.rpartition("-")[2]
        if kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            assert [found for found in labels if matches(spec["selector"], labels[found])] == [component]
        if kind == "Service":
            assert [found for found in labels if spec["selector"].items() <= labels[found].items()] == [component]
        if kind == "PodMonitor":
            assert [found for found in labels if matches(spec["selector"], labels[found])] == [
                found for found in labels if not found.endswith("-host")]


@needs_helm
def test_clients_reach_the_router_alone(case, objects):
    policies = [document["spec"] for (kind, _), document in objects.items() if kind == "NetworkPolicy"]
    assert bool(policies) == (case != "no_gpu")
    for component, template in pods(objects).items() if policies else ():
        (policy,) = (found for found in policies if matches(found["podSelector"], template["metadata"]["labels"]))
        if component == "router":
            assert policy["ingress"] == [{"ports": [{"port": "http"}]}]
            continue
        peers, http = policy["ingress"]
        others = {name for name, other in pods(objects).items()
                  if matches(peers["from"][0]["podSelector"], other["metadata"]["labels"])}
        assert others == {*pods(objects)} - {"router"} and "ports" not in peers
        assert http["ports"] == [{"port": "http"}]
        assert matches(http["from"][0]["podSelector"], pods(objects)["router"]["metadata"]["labels"])


@needs_helm
def test_keys_come_from_the_secret(case, objects):
    for component, template in pods(objects).items():
        box = box_of(template)
        given = {entry["name"]: entry["valueFrom"]["secretKeyRef"]["key"] for entry in box["env"]
                 if "secretKeyRef" in entry.get("valueFrom", {})}
        flags = dict(arg.split("=", 1) for arg in box["args"] if re.search(r"(key|secret)=\$\(", arg))
        server = {"--api-key": "worker-api-key", "--cluster-secret": "cluster-secret"}
        if component == "unified":
            del server["--cluster-secret"]
        assert {flag: given[value[2:-1]] for flag, value in flags.items()} == (server if component != "router" else {
            "--api-key": "api-key", "--admin-api-key": "admin-api-key", "--worker-api-key": "worker-api-key"})
    secrets = [document["stringData"] for (kind, _), document in objects.items() if kind == "Secret"]
    assert secrets == ([{"api-key": "a", "admin-api-key": "b", "worker-api-key": "c", "cluster-secret": "d"}]
                       if case == "everything" else [])


@needs_helm
def test_pods_have_their_time_and_devices(case, objects):
    for component, template in pods(objects).items():
        box, config = box_of(template), command_of(template)
        grace = template["spec"]["terminationGracePeriodSeconds"]
        if component == "router":
            pause = float(box["lifecycle"]["preStop"]["exec"]["command"][1])
            assert grace > pause + config.http.shutdown_grace_secs
            continue
        assert isinstance(config, ServerConfig)
        assert grace > config.http.shutdown_grace_secs + host._RANK_GRACE_SECONDS
        assert ("startupProbe" in box) is (not component.endswith("-host")), "further hosts serve no HTTP"
        if "startupProbe" in box:
            assert box["startupProbe"]["periodSeconds"] * box["startupProbe"]["failureThreshold"] == 1800
        limits = box["resources"].get("limits", {})
        gpus = {} if case == "no_gpu" else {"nvidia.com/gpu": str(config.parallel.tp_size // config.nodes.nnodes)}
        rdma = {"rdma/hca": "4"} if case == "several_hosts" else {}
        assert {name: count for name, count in limits.items() if "/" in name} == gpus | rdma
        assert box["securityContext"]["capabilities"].get("add", []) == (["IPC_LOCK"] if rdma else [])


@needs_helm
def test_every_mount_has_a_volume(objects):
    for (kind, _), document in objects.items():
        claims = [claim["metadata"]["name"] for claim in document.get("spec", {}).get("volumeClaimTemplates", [])]
        for template in pods({(kind, "x"): document}).values() if kind != "Deployment" else ():
            volumes = [*claims, *(volume["name"] for volume in template["spec"]["volumes"])]
            assert sorted(volumes) == sorted(mount["name"] for mount in box_of(template)["volumeMounts"])


@needs_helm
def test_autoscalers_follow_metrics_that_exist(case, objects):
    known = (ROOT / "docs/metrics.md").read_text()
    scaled = {}
    for (kind, name), document in objects.items():
        spec = document.get("spec", {})
        if kind in ("ScaledObject", "HorizontalPodAutoscaler"):
            target = objects[spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]]
            assert spec["scaleTargetRef"]["apiVersion"] == target["apiVersion"]
            assert "replicas" not in target["spec"], "an upgrade would undo the autoscaler's count"
            metric = (spec["metrics"][0]["pods"]["metric"]["name"] if kind == "HorizontalPodAutoscaler"
                      else spec["triggers"][0]["metadata"]["query"].removeprefix("sum(").partition("{")[0])
            assert f"| `{metric}` | gauge |" in known
            scaled[name] = kind, metric
        if kind == "ScaledObject":
            labels = pods(objects)[name.rpartition("-")[2]]["metadata"]["labels"]
            query = spec["triggers"][0]["metadata"]["query"]
            scraped = {re.sub(r"[./]", "_", label) for (kind, _), found in objects.items() if kind == "PodMonitor"
                       for label in found["spec"]["podTargetLabels"]} | {"namespace"}
            used = dict(re.findall(r'(\w+)="([^"]+)"', query))
            assert used.keys() <= scraped
            assert used == {"namespace": "llms", **{re.sub(r"[./]", "_", name): value for name, value in labels.items()
                                                    if re.sub(r"[./]", "_", name) in used}}
    kind = {"unified": "HorizontalPodAutoscaler", "everything": "HorizontalPodAutoscaler",
            "several_hosts": "ScaledObject"}.get(case)
    pool = {"baton:num_requests_waiting", "baton:token_usage"} if case != "unified" else {"baton:num_requests_waiting"}
    assert set(scaled.values()) == ({(kind, metric) for metric in pool} if kind else set())


@needs_helm
@pytest.mark.parametrize("values,sentence", [
    ({"pools": {"decode": {"tpSize": 3, "nodes": 2}}}, "pools.decode: tpSize 3 must be a multiple of nodes 2."),
    ({"secrets": {"create": True}}, "secrets.create needs secrets.apiKey."),
    ({"pools": {"decode": {"tp": 3}}}, "additional properties 'tp' not allowed"),
    ({"mode": "both"}, "/mode"),
    ({"poolDefaults": {"extraArgs": ["device=cpu"]}}, "does not match pattern"),
])
def test_bad_values_are_refused(values, sentence, tmp_path):
    done = helm(tmp_path, values)
    assert done.returncode != 0 and sentence in done.stderr


# ---------------------------------------------------------------------- values


def test_every_value_is_in_the_schema_and_documented():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(value: Any, described: dict[str, Any], where: str) -> None:
        described = schema["definitions"]["pool"] if "$ref" in described else described
        if "properties" in described:
            assert described["additionalProperties"] is False, where
            lacking = set(described["properties"]) - set(value) - {"global"}
            assert not lacking or where.startswith("values.pools.") or where.endswith("resources"), (where, lacking)
            assert set(value) <= set(described["properties"])
            for name, inner in value.items():
                compare(inner, described["properties"][name], f"{where}.{name}")

    compare(values, schema, "values")
    blocks = re.findall(r"^(#.*\n)?(\w+):", (CHART / "values.yaml").read_text(), re.MULTILINE)
    assert len(blocks) == len(values)
