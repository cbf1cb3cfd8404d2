"""The commands and Helm values that start a planned cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ...common.config.cli import to_argv
from .candidates import Candidate


def server_flags(candidate: Candidate, *, decodes: bool) -> list[str]:
    """The scheduler's flags that are not at their default."""
    schedule = candidate.spec.schedule
    return to_argv(schedule if decodes else schedule.without_decoding)


def router_flags(candidate: Candidate) -> list[str]:
    return to_argv(candidate.spec.policy)


def commands(candidate: Candidate, model: str) -> str:
    """One line for each kind of server, and the router's."""
    spec = candidate.spec

    def server(command: str, gpus: int, decodes: bool, *more: str) -> str:
        tp = ["--tp-size", str(gpus)] if gpus > 1 else []
        return " ".join([command, "--model-path", model, *tp, *server_flags(candidate, decodes=decodes), *more])

    if spec.unified:
        lines = [f"# {spec.unified} unified servers" if spec.unified > 1 else "# 1 unified server",
                 server("launch_server", spec.costs.gpus, True, "--host", "HOST", "--port", "30001")]
        if spec.unified > 1:
            urls = [f"http://HOST-{i + 1}:30001" for i in range(spec.unified)]
            lines += ["# the router", " ".join(["launch_router", *router_flags(candidate), "--worker-urls", *urls])]
        return "\n".join(lines)
    prefills = [part for i in range(spec.prefill) for part in ("--prefill", f"http://PREFILL-{i + 1}:30001", "8998")]
    decodes = [part for i in range(spec.decode) for part in ("--decode", f"http://DECODE-{i + 1}:30002")]
    return "\n".join([
        f"# {spec.prefill} prefill servers" if spec.prefill > 1 else "# 1 prefill server",
        server("launch_prefill", spec.costs_of_prefill.gpus, False, "--host", "HOST", "--port", "30001",
               "--disaggregation-bootstrap-port", "8998"),
        f"# {spec.decode} decode servers" if spec.decode > 1 else "# 1 decode server",
        server("launch_decode", spec.costs.gpus, True, "--host", "HOST", "--port", "30002"),
        "# the router",
        " ".join(["launch_router", "--pd-disaggregation", *router_flags(candidate), *prefills, *decodes])])


def helm_values(candidate: Candidate, model: str) -> str:
    """Values of the chart deploy/helm/baton, as YAML."""
    spec = candidate.spec

    def pool(replicas: int, gpus: int, decodes: bool) -> dict[str, Any]:
        return {"replicas": replicas, "tpSize": gpus, "extraArgs": _joined(server_flags(candidate, decodes=decodes))}

    pools: Mapping[str, Any] = {"unified": pool(spec.unified, spec.costs.gpus, True)} if spec.unified else {
        "prefill": pool(spec.prefill, spec.costs_of_prefill.gpus, False),
        "decode": pool(spec.decode, spec.costs.gpus, True)}
    policy = spec.policy
    values = {"mode": "unified" if spec.unified else "disaggregated", "model": model,
              "router": {"policy": policy.policy, "extraArgs": [each for each in _joined(router_flags(candidate))
                                                                if not each.startswith("--policy=")]},
              "pools": pools}
    text: str = yaml.safe_dump(values, sort_keys=False)
    return text


def _joined(argv: list[str]) -> list[str]:
    """Flags as single items: ``--name=value``."""
    items: list[str] = []
    for word in argv:
        if word.startswith("--") or not items:
            items.append(word)
        else:
            items[-1] += f"={word}"
    return items
