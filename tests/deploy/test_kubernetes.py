"""The Kubernetes manifests, rendered: by a small stand-in for kustomize, and by ``kubectl`` where there is one."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.common.config.cli import parse
from baton.router.config import RouterConfig
from baton.router.config.discovery import split

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.rglob("kustomization.yaml"))
BESIDE = Path(sys.executable).parent / "kubectl"
KUBECTL = str(BESIDE) if BESIDE.exists() else shutil.which("kubectl")
CLUSTER_WIDE = ("Namespace", "ClusterRole", "ClusterRoleBinding")

Objects = dict[tuple[str, str], dict[str, Any]]


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found is not None]


def by_name(found: list[dict[str, Any]]) -> Objects:
    objects = {(document["kind"], document["metadata"]["name"]): document for document in found}
    assert len(objects) == len(found)
    return objects


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge: mappings by key (null deletes), lists of named things by name, all else replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        result = {**base, **{key: merged(base.get(key), value) for key, value in patch.items()}}
        return {key: value for key, value in result.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(item, dict) for item in base + patch):
        theirs = {item["name"]: item for item in patch}
        known = [merged(item, theirs.pop(item["name"])) if item["name"] in theirs else item for item in base]
        return [*theirs.values(), *known]
    return patch


def render(folder: Path) -> Objects:
    """What ``kubectl apply -k`` would send, but for labels and image names."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects: Objects = {}
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        objects |= render(path) if path.is_dir() else by_name(documents(path))
    objects = copy.deepcopy(objects)
    for patch in kustomization.get("patches", []):
        for document in documents(folder / patch["path"]):
            key = (document["kind"], document["metadata"]["name"])
            objects[key] = merged(objects[key], document)
    for (kind, _), document in objects.items():
        if kind not in CLUSTER_WIDE:
            document["metadata"]["namespace"] = kustomization["namespace"]
        for subject in document.get("subjects", []):
            subject["namespace"] = kustomization["namespace"]
    return objects


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["template"]["spec"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_render(overlay):
    objects = render(KUBERNETES / overlay)
    assert {key for key in objects if key[0] in ("Deployment", "StatefulSet")} == {
        ("Deployment", "router"), ("StatefulSet", "prefill"), ("StatefulSet", "decode")}
    for (kind, name), document in objects.items():
        if kind in ("Deployment", "StatefulSet"):
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()
            volumes = {volume["name"] for volume in (*pod_of(document).get("volumes", []), *(
                claim["metadata"] for claim in document["spec"].get("volumeClaimTemplates", [])))}
            mounted = {mount["name"] for box in pod_of(document)["containers"] for mount in box.get("volumeMounts", [])}
            assert mounted <= volumes, name


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl (tests/deploy/fetch_tools.py)")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_renders_the_same(overlay):
    assert KUBECTL is not None
    command = [KUBECTL, "kustomize", str(KUBERNETES / overlay)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs, ours = by_name(list(yaml.safe_load_all(told))), render(KUBERNETES / overlay)
    assert theirs.keys() == ours.keys()
    for key, document in theirs.items():
        for changed in (document, ours[key]):
            changed["metadata"].pop("labels", None)
            for box in changed.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
                box["image"] = box["image"].partition(":")[0]
        assert document == ours[key], key


def test_only_the_router_that_discovers_may_ask_the_cluster():
    for overlay in OVERLAYS:
        for (kind, name), document in render(KUBERNETES / overlay).items():
            if kind in ("Deployment", "StatefulSet"):
                asks = overlay == "discovery" and name == "router"
                assert pod_of(document)["automountServiceAccountToken"] is asks
                assert pod_of(document).get("serviceAccountName") == ("router" if asks else None)


def test_the_router_has_the_rights_that_discovery_takes_and_no_others():
    objects = render(KUBERNETES / "discovery")
    account, role, binding = (objects[kind, "router"] for kind in ("ServiceAccount", "Role", "RoleBinding"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", role["metadata"]["name"])
    (subject,) = binding["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "baton"}
    deployment = objects["Deployment", "router"]
    assert pod_of(deployment)["serviceAccountName"] == account["metadata"]["name"]
    assert {found["metadata"]["namespace"] for found in (account, role, binding, deployment)} == {"baton"}


def test_the_router_s_selectors_find_the_servers():
    objects = render(KUBERNETES / "discovery")
    (box,) = pod_of(objects["Deployment", "router"])["containers"]
    assert box["command"] == ["launch_router"]
    found = parse(RouterConfig, box["args"], prog="launch_router", description="").discovery
    assert (found.service_discovery, found.service_discovery_namespace) == (True, "baton")
    for role, selector in (("prefill", found.prefill_selector), ("decode", found.decode_selector)):
        wanted = dict(item.split("=") for item in split(selector))
        template = {name: document["spec"]["template"] for (kind, name), document in objects.items()
                    if kind in ("Deployment", "StatefulSet")
                    and wanted.items() <= document["spec"]["template"]["metadata"]["labels"].items()}
        assert list(template) == [role]
        ports = {port["name"]: port["containerPort"] for port in template[role]["spec"]["containers"][0]["ports"]}
        assert ports["http"] == found.service_discovery_port


def test_the_router_s_image_can_discover():
    image = (KUBERNETES.parent / "Dockerfile.router").read_text()
    assert "ARG EXTRAS=k8s" in image and "[$EXTRAS]" in image


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_keys_come_from_a_secret(overlay):
    """Each flag of a key is one of the Secret's, and what one side shows the other asks for."""
    keys: dict[str, dict[str, str]] = {}
    for (kind, name), document in render(KUBERNETES / overlay).items():
        assert kind != "Secret", "a key in a file is no secret"
        if kind in ("Deployment", "StatefulSet"):
            (box,) = pod_of(document)["containers"]
            given = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in box["env"]}
            flags = dict(arg.split("=", 1) for arg in box["args"] if "=$(" in arg)
            named = {flag: given[value.removeprefix("$(").removesuffix(")")] for flag, value in flags.items()}
            assert all(found["name"] == "keys" and not found.get("optional") for found in named.values())
            keys[name] = {flag: found["key"] for flag, found in named.items()}
    server = {"--api-key": "worker-api-key", "--cluster-secret": "cluster-secret"}
    assert keys == {"prefill": server, "decode": server, "router": {
        "--api-key": "api-key", "--admin-api-key": "admin-api-key", "--worker-api-key": "worker-api-key"}}
    told = (KUBERNETES.parent / "README.md").read_text()
    assert all(key in told for of in keys.values() for key in of.values())


def allowed(objects: Objects, source: str | None, target: str) -> set[str] | None:
    """Ports of ``target``'s pods that policies open to those of ``source``, a name of this namespace or (None) anybody;
    None for all ports."""
    ports: set[str] = set()
    for (kind, _), document in objects.items():
        if kind != "NetworkPolicy" or not chosen(document["spec"]["podSelector"], target):
            continue
        for rule in document["spec"].get("ingress", []):
            peers = rule.get("from")
            if peers is None or any("podSelector" in peer and source and chosen(peer["podSelector"], source)
                                    for peer in peers):
                if "ports" not in rule:
                    return None
                ports |= {port["port"] for port in rule["ports"]}
    return ports


def chosen(selector: dict[str, Any], name: str) -> bool:
    names = [*selector.get("matchLabels", {}).values(),
             *(value for found in selector.get("matchExpressions", []) for value in found["values"])]
    return not selector or name in names


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_clients_reach_the_router_alone(overlay):
    objects = render(KUBERNETES / overlay)
    everybody = [document["spec"] for (kind, _), document in objects.items()
                 if kind == "NetworkPolicy" and document["spec"]["podSelector"] == {}]
    assert everybody == [{"podSelector": {}, "policyTypes": ["Ingress"]}], "what no policy names is closed"
    assert allowed(objects, None, "router") == {"http"}
    for server, peer in (("prefill", "decode"), ("decode", "prefill")):
        assert allowed(objects, None, server) == set()
        assert allowed(objects, "router", server) == {"http"}
        assert allowed(objects, peer, server) is None
