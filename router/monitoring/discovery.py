"""Workers that are Kubernetes pods: they join and leave as their pods do.

The official client is blocking, so each selector is listed and watched in a thread; what it sees is
applied on the event loop. A pod is a worker from the moment it runs (health checks then decide when
it takes requests) until it is being deleted. Every watch begins with a list, which also shows what happened
while the API server was unavailable.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from typing import Any, Protocol

from ...common.api.errors import ConfigError, Conflict
from ...common.config.packages import install
from ..config.discovery import DiscoveryArgs, split
from ..config.endpoint import Endpoint
from ..config.workers import parse_bootstrap_port
from ..workers.registry import Registry, Role, Worker

logger = logging.getLogger("baton.router")

BOOTSTRAP_PORT_ANNOTATION = "sglang.ai/bootstrap-port"
_WATCH_SECONDS = 60
_PAUSE_SECONDS = 1.0

Pod = dict[str, Any]


class Membership(Protocol):
    """The workers of a router, as discovery changes them."""

    registry: Registry

    def add_worker(self, worker: Worker) -> None:
        """Raises Conflict when its URL is taken."""
    def remove_worker(self, url: str) -> list[Worker]: ...


class Discovery:
    """Makes a router's workers follow the pods that its selectors match; touches no other worker."""

    def __init__(self, router: Membership, args: DiscoveryArgs):
        self._router = router
        self._args = args
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._workers: dict[str, Worker] = {}  # by pod uid
        core = _connect()
        for role, labels in self._selectors():
            threading.Thread(target=self._watch, args=(core, role, labels), name=f"pods-{role}", daemon=True).start()

    def stop(self) -> None:
        """Applies nothing more. The threads end with their current watch, or with the process."""
        self._stopping.set()

    def _selectors(self) -> list[tuple[Role, str]]:
        args = self._args
        by_role: list[tuple[Role, tuple[str, ...]]] = [
            ("regular", args.selector), ("prefill", args.prefill_selector), ("decode", args.decode_selector)]
        return [(role, ",".join(split(labels))) for role, labels in by_role if labels]

    # ------------------------------------------------------------------ in a thread

    def _watch(self, core: Any, role: Role, labels: str) -> None:
        from kubernetes.watch import Watch

        while not self._stopping.is_set():
            try:
                method, options = self._listing(core, labels)
                listed = json.loads(method(**options, _preload_content=False, _request_timeout=30).data)
                self._call_on_loop(self._reconcile, role, listed.get("items") or [])
                version = listed["metadata"]["resourceVersion"]
                for event in Watch().stream(method, **options, resource_version=version,
                                            timeout_seconds=_WATCH_SECONDS, _request_timeout=_WATCH_SECONDS + 10):
                    if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                        self._call_on_loop(self._apply, role, event["raw_object"], event["type"] == "DELETED")
                    if self._stopping.is_set():
                        return
            except Exception as error:  # noqa: BLE001 - whatever the client raises, watching continues
                if self._stopping.is_set():
                    return
                logger.warning("Watching Kubernetes pods (%s) failed: %s.", labels, " ".join(str(error).split())[:300])
            self._stopping.wait(_PAUSE_SECONDS)

    def _listing(self, core: Any, labels: str) -> tuple[Any, dict[str, Any]]:
        if self._args.service_discovery_namespace is None:
            return core.list_pod_for_all_namespaces, {"label_selector": labels}
        return core.list_namespaced_pod, {"namespace": self._args.service_discovery_namespace, "label_selector": labels}

    def _call_on_loop(self, function: Any, *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # The loop is closed: the router is gone.
            self._stopping.set()

    # ------------------------------------------------------------------ on the event loop

    def _reconcile(self, role: Role, pods: list[Pod]) -> None:
        """Applies a complete list: pods that are not in it were deleted."""
        for pod in pods:
            self._apply(role, pod, False)
        present = {pod["metadata"]["uid"] for pod in pods}
        for uid, worker in list(self._workers.items()):
            if worker.role == role and uid not in present:
                self._remove(uid)

    def _apply(self, role: Role, pod: Pod, deleted: bool) -> None:
        if self._stopping.is_set():
            return
        uid = pod["metadata"]["uid"]
        address = pod.get("status", {}).get("podIP")
        runs = pod.get("status", {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
        known = self._workers.get(uid)
        if deleted or not runs or not address:
            if known is not None:
                self._remove(uid)
        elif known is None:
            self._add(uid, role, pod, address)

    def _add(self, uid: str, role: Role, pod: Pod, address: str) -> None:
        host = f"[{address}]" if ":" in address else address
        endpoint = Endpoint.parse(f"http://{host}:{self._args.service_discovery_port}")
        worker = Worker(endpoint, role, bootstrap_port=_bootstrap_port(pod))
        try:
            self._router.add_worker(worker)
        except Conflict:
            return  # Added at the start or by /add_worker, or its old pod is still leaving: the next list tries again.
        self._workers[uid] = worker
        logger.info("Pod %s joins as %s worker %s.", pod["metadata"].get("name", uid), role, worker.url)

    def _remove(self, uid: str) -> None:
        worker = self._workers.pop(uid)
        if any(known.root is worker for known in self._router.registry):
            self._router.remove_worker(worker.endpoint.url)


def _bootstrap_port(pod: Pod) -> Any:
    """Reads the port from the pod's annotation; "ask" when there is none that is valid."""
    annotation = (pod["metadata"].get("annotations") or {}).get(BOOTSTRAP_PORT_ANNOTATION)
    try:
        return parse_bootstrap_port(annotation) if annotation else "ask"
    except ValueError:
        logger.error("Annotation %s=%s is no port.", BOOTSTRAP_PORT_ANNOTATION, annotation)
        return "ask"


def _connect() -> Any:
    """Returns the API client of the cluster that we run in, else of $KUBECONFIG; raises ConfigError."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise ConfigError(f"--service-discovery needs Kubernetes' client: {install('k8s')}.") from None
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
        except (config.ConfigException, OSError) as error:
            raise ConfigError(f"--service-discovery finds no Kubernetes: {error}.") from None
    return client.CoreV1Api()
