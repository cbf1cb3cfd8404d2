"""SLURM's, SkyPilot's and managed scripts, run with stand-ins for the commands that they start; systemd's units."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.common.config.cli import parse
from baton.common.config.server import HttpArgs, ServerConfig
from baton.common.serving import app, host
from baton.docs import generate
from baton.router.config import RouterConfig

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SLURM = DEPLOY / "slurm/baton.sbatch"
SKYPILOT = sorted((DEPLOY / "skypilot").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
CONFIGS = {command.name: command.config for command in generate.COMMANDS}
CONFIGS |= {"launch_prefill": ServerConfig, "launch_decode": ServerConfig}
MODES = {"launch_server": "null", "launch_prefill": "prefill", "launch_decode": "decode"}

LAUNCH = f"""#!{sys.executable}
# Writes its command line, and ends when all have.
import json, os, sys, time
folder = os.environ["RECORDS"]
name = os.path.join(folder, str(os.getpid()))
with open(name + ".new", "w") as file:
    json.dump([os.path.basename(sys.argv[0]), *sys.argv[1:]], file)
os.rename(name + ".new", name + ".json")
until = time.monotonic() + 20
while len([n for n in os.listdir(folder) if n.endswith(".json")]) < int(os.environ["EXPECTED"]):
    if time.monotonic() > until:
        sys.exit("too few commands")
    time.sleep(0.01)
sys.exit(7)
"""

SRUN = """#!/bin/bash
# Runs the command once for each task, with the variables of SLURM.
while [[ $1 == --* ]]; do
  case $1 in --nodelist=*) list=${1#*=};; --container-image=*) echo "$1" >> "$RECORDS/containers";; esac
  shift
done
rank=0
for node in ${list//,/ }; do
  SLURMD_NODENAME=$node SLURM_PROCID=$rank "$@" &
  rank=$((rank + 1))
done
wait -n
"""


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def run(script: str, expected: int, folder: Path, **env: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """The script's end, and ``(configuration, words)`` of each command of ours that it started."""
    programs, records = folder / "bin", folder / "records"
    programs.mkdir()
    records.mkdir()
    for name in ("launch_router", "launch_cluster", *MODES):
        program(programs, name, LAUNCH)
    program(programs, "srun", SRUN)
    program(programs, "scontrol", "#!/bin/bash\ntr , '\\n' <<< \"$3\"\n")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=folder, env={
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(folder), "RECORDS": str(records),
        "EXPECTED": str(expected), **env})
    found = [json.loads(path.read_text()) for path in records.glob("*.json")]
    return done, [(configured(words, folder), words) for words in sorted(found)]


def configured(words: list[str], folder: Path) -> Any:
    name, *argv = words
    argv = [str(folder / word) if word in ("baton.yaml", "server.yaml", "router.yaml") else word for word in argv]
    defaults = {"disaggregation_mode": MODES[name]} if name in MODES else None
    return parse(CONFIGS[name], argv, prog=name, description="", **({"defaults": defaults} if defaults else {}))


# ---------------------------------------------------------------------- SLURM


def slurm(folder: Path, expected: int, hosts: str, **env: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    return run(SLURM.read_text(), expected, folder, SLURM_JOB_ID="5", SLURM_JOB_NODELIST=hosts, **env)


def test_slurm_starts_a_pair(tmp_path):
    done, started = slurm(tmp_path, 3, "a,b", PREFILL_ARGS="--chunked-prefill-size=4096", CONTAINER="baton.sqsh")
    assert done.returncode == 7, "the job ends as its first process does: " + done.stderr
    (decode, _), (prefill, _), (router, words) = started
    assert [prefill.mode, decode.mode] == ["prefill", "decode"]
    assert [(found.http.host, found.http.port) for found in (prefill, decode)] == [("a", 30001), ("b", 30001)]
    assert (prefill.schedule.chunked_prefill_size, prefill.parallel.tp_size) == (4096, 8)
    assert [(spec.url, spec.role) for spec in router.workers.specs] == [
        ("http://a:30001", "prefill"), ("http://b:30001", "decode")]
    assert prefill.disaggregation.cluster_secret == decode.disaggregation.cluster_secret != ""
    assert prefill.http.api_key == decode.http.api_key and len(prefill.http.api_key or "") == 64
    keys = yaml.safe_load((tmp_path / "baton-5/router.yaml").read_text())
    assert keys["worker-api-key"] == prefill.http.api_key and len(set(keys.values())) == 3
    assert not [word for word in words if any(key in word for key in keys.values())], "a key on a command line"
    assert {path.stat().st_mode & 0o77 for path in (tmp_path / "baton-5").glob("*.yaml")} == {0}
    assert (tmp_path / "records/containers").read_text().split() == ["--container-image=baton.sqsh"] * 3


def test_slurm_starts_servers_of_several_hosts(tmp_path):
    done, started = slurm(tmp_path, 7, "a,b,c,d,e,f", HOSTS="2", TP="16", DECODE="2")
    assert done.returncode == 7, done.stderr
    servers = [config for config, words in started if words[0] != "launch_router"]
    assert sorted((found.mode, found.http.host, found.nodes.node_rank, found.nodes.dist_init_addr)
                  for found in servers) == [
        ("decode", "c", 0, "c:30002"), ("decode", "d", 1, "c:30002"), ("decode", "e", 0, "e:30002"),
        ("decode", "f", 1, "e:30002"), ("prefill", "a", 0, "a:30002"), ("prefill", "b", 1, "a:30002")]
    assert {(found.nodes.nnodes, found.parallel.tp_size) for found in servers} == {(2, 16)}
    (router,) = (config for config, words in started if words[0] == "launch_router")
    assert [spec.url for spec in router.workers.specs] == [f"http://{name}:30001" for name in "ace"]


def test_slurm_starts_unified_servers(tmp_path):
    done, started = slurm(tmp_path, 3, "a,b", UNIFIED="2")
    assert done.returncode == 7, done.stderr
    (router, _), (one, _), (other, _) = started
    assert {found.mode for found in (one, other)} == {"null"}
    assert [(spec.url, spec.role) for spec in router.workers.specs] == [
        ("http://a:30001", "regular"), ("http://b:30001", "regular")]


def test_slurm_refuses_other_numbers_of_hosts(tmp_path):
    done, started = slurm(tmp_path, 1, "a,b,c")
    assert (done.returncode, started) == (2, [])
    assert "2 servers of 1 hosts need --nodes=2, not 3." in done.stderr


def test_slurm_waits_for_the_drain():
    (line,) = (line for line in SLURM.read_text().splitlines() if "--signal" in line)
    assert int(line.rpartition("@")[2]) > max(HttpArgs().shutdown_grace_secs + host._RANK_GRACE_SECONDS,
                                              parse(RouterConfig, [], prog="", description="").http.shutdown_grace_secs)


# ---------------------------------------------------------------------- SkyPilot


def sky(name: str, expected: int, folder: Path, **env: str) -> list[Any]:
    task = yaml.safe_load((DEPLOY / f"skypilot/{name}.yaml").read_text())
    (folder / "baton-venv/bin").mkdir(parents=True)
    (folder / "baton-venv/bin/activate").write_text("")
    done, started = run(task["run"], expected, folder, **task["envs"], API_KEY="k", CLUSTER_SECRET="s", **env)
    assert done.returncode == 7, done.stderr
    return started


@pytest.mark.parametrize("path", SKYPILOT, ids=lambda path: path.name)
def test_skypilot_tasks_are_scripts(path):
    task = yaml.safe_load(path.read_text())
    assert set(task) <= {"service", "num_nodes", "resources", "workdir", "envs", "secrets", "setup", "run"}
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)
    assert {name for name, value in task["secrets"].items() if value is None} >= {"API_KEY"}


def test_skypilot_serves_a_cluster_on_each_machine(tmp_path):
    ((cluster, words),) = sky("service", 1, tmp_path)
    assert words[0] == "launch_cluster"
    assert (cluster.cluster.prefill, cluster.cluster.decode, cluster.cluster.port) == (1, 1, 30000)
    service = yaml.safe_load((DEPLOY / "skypilot/service.yaml").read_text())["service"]
    assert service["readiness_probe"]["path"] == "/readiness" and service["ports"] == 30000


def test_skypilot_starts_pools(tmp_path):
    addresses = "10.0.0.1\n10.0.0.2\n10.0.0.3"
    (first := tmp_path / "0").mkdir()
    (prefill, _), (router, _) = sky("pools", 2, first, SKYPILOT_NODE_RANK="0", SKYPILOT_NODE_IPS=addresses)
    assert [(spec.url, spec.role) for spec in router.workers.specs] == [
        ("http://10.0.0.1:30001", "prefill"), ("http://10.0.0.2:30001", "decode"), ("http://10.0.0.3:30001", "decode")]
    (third := tmp_path / "2").mkdir()
    ((decode, _),) = sky("pools", 1, third, SKYPILOT_NODE_RANK="2", SKYPILOT_NODE_IPS=addresses)
    assert [(found.mode, found.http.host, found.http.port, found.parallel.tp_size) for found in (prefill, decode)] == [
        ("prefill", "10.0.0.1", 30001, 8), ("decode", "10.0.0.3", 30001, 8)]
    assert prefill.disaggregation.cluster_secret == decode.disaggregation.cluster_secret == "s"


# ---------------------------------------------------------------------- SageMaker, Vertex AI


@pytest.mark.parametrize("env,port", [({}, 8080), ({"AIP_HTTP_PORT": "8081"}, 8081),
                                      ({"SAGEMAKER_BIND_TO_PORT": "8082"}, 8082)])
def test_managed_endpoints_start_a_server(tmp_path, env, port):
    done, ((server, words),) = run(str(DEPLOY / "managed/serve"), 1, tmp_path, BATON_ARGS="--tp-size 4", **env)
    assert done.returncode == 7 and words[0] == "launch_server"
    assert (server.http.host, server.http.port, server.parallel.tp_size) == ("0.0.0.0", port, 4)
    assert server.model.model_path == "/opt/ml/model"
    assert {("GET", "/ping"), ("POST", "/invocations"), ("POST", "/vertex_generate")} <= {
        (method, path) for method, path, *_ in app._ROUTES}


def test_managed_endpoints_start_a_pair(tmp_path):
    done, ((cluster, words),) = run(str(DEPLOY / "managed/serve"), 1, tmp_path, MODEL="s3://models/chat", DECODE="3")
    assert done.returncode == 7 and words[0] == "launch_cluster"
    assert (cluster.cluster.prefill, cluster.cluster.decode, cluster.cluster.port) == (1, 3, 8080)
    assert cluster.servers.model.model_path == "s3://models/chat"


def test_managed_image_holds_its_command():
    lines = (DEPLOY / "managed/Dockerfile").read_text().splitlines()
    (copied,) = (line.split() for line in lines if line.startswith("COPY"))
    assert (DEPLOY.parent / copied[-2]).is_file() and os.access(DEPLOY.parent / copied[-2], os.X_OK)
    assert lines[-1] == f'CMD ["{Path(copied[-1]).name}"]'


# ---------------------------------------------------------------------- systemd


def unit(path: Path) -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(path.read_text())
    return found


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_starts_a_command_that_is_accepted(path):
    found = unit(path)
    words = found["Service"]["ExecStart"].split()
    name, argv = Path(words[0]).name, words[1:]
    local = DEPLOY / "systemd" / Path(argv[1].replace("%i", "0")).name
    config = parse(CONFIGS[name], ["--config", str(local)], prog=name, description="",
                   **({"defaults": {"disaggregation_mode": MODES[name]}} if name in MODES else {}))
    drain = config.http.shutdown_grace_secs + (host._RANK_GRACE_SECONDS if name in MODES else 0)
    assert float(found["Service"]["TimeoutStopSec"]) > drain
    assert name == "launch_router" or config.mode == MODES[name]


def test_units_make_one_cluster():
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (DEPLOY / "systemd").glob("*.yaml")}
    router = files["router"]
    for role in ("prefill", "decode"):
        server = files[f"{role}-0"]
        assert router[role] == [f"http://{server['host']}:{server['port']}"]
        assert server["api-key"] == router["worker-api-key"]
    assert files["prefill-0"]["cluster-secret"] == files["decode-0"]["cluster-secret"]
    assert files["prefill-0"]["base-gpu-id"] != files["decode-0"]["base-gpu-id"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path):
    for path in UNITS:
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/baton/bin/launch_", "/bin/true launch_"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))],
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
