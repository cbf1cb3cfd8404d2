"""Measures servers under workloads that the simulator replays: calibrates them, then saves what clients saw.

    python -m baton.tests.bench.simulator_validation --out FOLDER                      # paced servers, on any CPU
    python -m baton.tests.bench.simulator_validation --out FOLDER --gpus 0 1           # an 8B shape in dummy weights

Servers start side by side, as many of each kind as a cluster of ``--clusters`` has (on GPUs: unified and prefill
servers share the first ones, decode servers have the others), and the clusters are loaded one after the other.
``FOLDER/costs.json`` is the calibration, ``FOLDER/CLUSTER-WORKLOAD.json`` a run in the form that
``simulate/validation/`` reads. Nothing of the workloads is used for the fit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baton.simulate.workload.request import SimRequest
from baton.simulate.workload.synthetic import Lengths, synthetic
from baton.tests.helpers.harness import Server
from baton.tests.helpers.ports import free_ports

from .relay import LLAMA_8B

PACED_COSTS = Path(__file__).parents[1] / "helpers" / "paced_costs.json"
POOL_TOKENS = 60_000


def workloads(seconds: float, *, paced: bool, prefills: int = 1) -> dict[str, list[SimRequest]]:
    """By name, at rates for so many servers that compute prompts. Paced devices are slower, and their prompts shorter:
    a CPU copies their pages."""
    if paced:
        shapes = {"poisson": (3.0, Lengths(300, 0.6, 1500), Lengths(40, 0.5, 160), 1.0),
                  "bursty": (1.8, Lengths(500, 0.8, 2500), Lengths(30, 0.6, 120), 2.0)}
    else:
        shapes = {"poisson": (8.0, Lengths(1024, 0.6, 4000), Lengths(128, 0.5, 512), 1.0),
                  "bursty": (5.0, Lengths(2500, 0.8, 8000), Lengths(96, 0.6, 384), 2.0)}
    return {name: synthetic(rate * prefills, int(rate * prefills * seconds), inputs, outputs, cv=cv, seed=11)
            for name, (rate, inputs, outputs, cv) in shapes.items()}


class Servers:
    """The most servers of each kind that a cluster takes; clusters share them, one after the other."""

    def __init__(self, specs: Sequence[str], gpus: Sequence[int], model: list[str], logs: Path):
        self._model, self._logs = model, logs
        counts = {letter: max(counts_of(spec).get(letter, 0) for spec in specs) for letter in "UPD"}
        # Unified and prefill servers share GPUs, decode servers have the GPUs after them.
        first = {"U": 0, "P": 0, "D": max(1, counts["P"]) if len(gpus) > 1 else 0}
        self.of = {letter: [self._start(letter, gpus[(first[letter] + i) % len(gpus)] if gpus else None)
                            for i in range(count)] for letter, count in counts.items()}

    def _start(self, letter: str, gpu: int | None) -> tuple[Server, list[str]]:
        """A server, and the router's flags for it."""
        port, bootstrap = free_ports(2)
        mode = {"U": "null", "P": "prefill", "D": "decode"}[letter]
        flags = [*self._model, "--disaggregation-mode", mode, "--max-total-tokens", str(POOL_TOKENS),
                 *(["--disaggregation-transfer-backend", "ipc"] if letter != "U" else []),
                 *(["--disaggregation-bootstrap-port", str(bootstrap)] if letter == "P" else [])]
        log = self._logs / f"{letter}-{port}.log"
        if gpu is not None:
            server = Server("baton.launch", ["server", *flags, "--base-gpu-id", str(gpu)], port, log)
        else:
            server = Server("baton.tests.helpers.paced_server", flags, port, log, PACE_COSTS=str(PACED_COSTS),
                            OMP_NUM_THREADS="1")
        route = {"U": [], "P": ["--prefill", server.url, str(bootstrap)], "D": ["--decode", server.url]}[letter]
        return server.start(), route

    @property
    def all(self) -> list[Server]:
        return [server for some in self.of.values() for server, _ in some]


class Cluster:
    """A router over the first servers of each kind, as ``spec`` (``2P1D``) counts them; ``1U``: a server alone."""

    def __init__(self, spec: str, servers: Servers, logs: Path):
        self.spec, self.counts = spec, counts_of(spec)
        chosen = [each for letter, count in self.counts.items() for each in servers.of[letter][:count]]
        self.router = None
        if "P" in self.counts:
            [port] = free_ports(1)
            routes = [word for _, route in chosen for word in route]
            self.router = Server("baton.router.launch", ["--pd-disaggregation", *routes, "--log-level", "warning"],
                                 port, logs / f"router-{spec}.log").start()
        self.url = chosen[0][0].url if self.router is None else self.router.url


def counts_of(spec: str) -> dict[str, int]:
    return {letter: int(count) for count, letter in re.findall(r"(\d+)([UPD])", spec)}


def bench(command: str, argv: list[str], timeout: float) -> None:
    code = f"from baton.bench import {command}; {command}({argv!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=timeout)


def replay(cluster: Cluster, name: str, requests: Sequence[SimRequest], out: Path) -> None:
    """Send the requests at their times, and save what came back."""
    trace, lines = out / f"{name}.jsonl", out / f"{cluster.spec}-{name}.out.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": each.at * 1e3, "input_length": each.input_len,
                                         "output_length": each.output_len}) + "\n" for each in requests))
    lines.unlink(missing_ok=True)
    bench("bench_serving", ["--base-url", cluster.url, "--dataset-name", "trace", "--dataset-path", str(trace),
                            "--num-prompts", str(len(requests)), "--tokenize-prompt", "--flush-cache", "--output-file",
                            str(lines), "--output-details", "--disable-progress"],
          requests[-1].at + 120)
    found = json.loads(lines.read_text())
    assert not found["failed"], found["failed"]
    first = requests[0].at
    counts = cluster.counts
    (out / f"{cluster.spec}-{name}.json").write_text(json.dumps({
        "name": f"{cluster.spec} {name}", "date": f"{datetime.date.today()}", "unified": counts.get("U", 0),
        "prefill": counts.get("P", 0), "decode": counts.get("D", 0), "pool_tokens": POOL_TOKENS,
        "requests": [[round(each.at - first, 6), each.input_len, each.output_len] for each in requests],
        "ttft_ms": [round(1e3 * value, 2) for value in found["ttfts"]],
        "tpot_ms": [round(1e3 * sum(gaps) / (count - 1), 3) for gaps, count in
                    zip(found["itls"], found["output_lens"]) if count > 1],
        "e2e_ms": [round(1e3 * value, 2) for value in found["e2e_latencies"]],
        "client_cpu": found["client_cpu"]}, indent=None))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, nargs="*", default=[])
    parser.add_argument("--clusters", nargs="+", default=["1U", "1P1D"])
    parser.add_argument("--workloads", nargs="+", default=["poisson", "bursty"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--skip-calibration", action="store_true")
    parser.add_argument("--ready-seconds", type=float, default=150.0)
    parser.add_argument("--server-flags", default="", help="further flags of all servers")
    return parser.parse_args()


def model_flags(args: argparse.Namespace, folder: Path) -> list[str]:
    if not args.gpus:
        return ["--model-path", "tinychat", "--device", "cpu", "--json-model-override-args",
                '{"max_position_embeddings": 40000}', "--log-level", "warning", *args.server_flags.split()]
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return ["--model-path", str(folder), "--tokenizer-path", "tinychat", "--load-format", "dummy", "--log-level",
            "warning", *args.server_flags.split()]


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    specs = args.clusters if args.skip_calibration else list(dict.fromkeys(["1U", "1P1D", *args.clusters]))
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(specs, args.gpus, model_flags(args, Path(folder)), args.out)
        running = servers.all
        try:
            for server in servers.all:
                server.wait_ready(args.ready_seconds)
            clusters = {spec: Cluster(spec, servers, args.out) for spec in specs}
            running += [cluster.router.wait_ready() for cluster in clusters.values() if cluster.router is not None]
            print("ready", flush=True)
            if not args.skip_calibration:
                calibrate(clusters["1U"], clusters["1P1D"], servers.of["P"][0][0].url, args)
            for spec in args.clusters:
                replay_all(clusters[spec], args)
        finally:
            for server in reversed(running):
                server.process.terminate()  # type: ignore[union-attr]
            for server in reversed(running):
                server.stop(30)


def replay_all(cluster: Cluster, args: argparse.Namespace) -> None:
    prefills = cluster.counts.get("U", 0) + cluster.counts.get("P", 0)
    for name, requests in workloads(args.seconds, paced=not args.gpus, prefills=prefills).items():
        if name in args.workloads:
            replay(cluster, name, requests, args.out)


def calibrate(unified: Cluster, pair: Cluster, prefill_url: str, args: argparse.Namespace) -> None:
    """The unified server, and the pair for its transfers."""
    bench("bench_calibrate", [
        "--base-url", unified.url, "--output-file", str(args.out / "costs.json"), "--samples-file",
        str(args.out / "samples.json"), "--max-batch", "128" if args.gpus else "32", "--max-context",
        "8192" if args.gpus else "4096", "--repeats", "3", "--pair-url", pair.url, "--prefill-url", prefill_url], 200)


if __name__ == "__main__":
    main()
