"""The processes that ``launch_cluster`` plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.cli import _flags, parse
from baton.common.config.server import ServerConfig
from baton.launch import (
    DECIDED_BY_CLUSTER,
    DEFAULTS,
    ClusterConfig,
    copies_of,
    launch_cluster,
    plan_cluster,
    router_tls,
)
from baton.router.config import RouterConfig


def plan(tmp_path, *argv: str, num_gpus: int = 0):
    config = parse(ClusterConfig, ["--model-path", "m", "--log-dir", str(tmp_path), *argv], prog="x", description="")
    *servers, router = plan_cluster(config, num_gpus).processes(config.cluster, tmp_path)
    flags = router.argv[router.argv.index("baton.router.launch") + 1:]
    return servers, parse(RouterConfig, flags, prog="launch_router", description="")


def test_pairs(tmp_path):
    servers, router = plan(tmp_path, "--prefill", "1", "--decode", "2")
    assert [part.name for part in servers] == ["prefill-0", "decode-0", "decode-1"]
    assert [(spec.role, spec.url) for spec in router.workers.specs] == [
        ("prefill", servers[0].url), ("decode", servers[1].url), ("decode", servers[2].url)]


def test_the_servers_that_answer_share_the_folder_of_files(tmp_path):
    servers, _ = plan(tmp_path, "--file-storage-path", "/var/files", "--decode", "2")
    given = [dict(zip(part.argv, part.argv[1:])).get("--file-storage-path") for part in servers]
    assert given == [None, "/var/files", "/var/files"]  # a prefill server refuses it


def test_what_is_for_servers_that_decode_goes_to_them_alone(tmp_path):
    servers, _ = plan(tmp_path, "--enable-mixed-chunk", "--retract-host-memory-gb", "2", "--schedule-policy", "lof")
    assert [[flag in part.argv for flag in ("--enable-mixed-chunk", "--retract-host-memory-gb", "--schedule-policy")]
            for part in servers] == [[False, False, True], [True, True, True]]
    for part in servers:  # each server takes what it is given
        at = part.argv.index(f"baton.{part.name[:-2]}.launch") + 1
        mode = ["--disaggregation-mode", part.name[:-2]]
        parse(ServerConfig, [*part.argv[at:], *mode], prog="x", description="")


@pytest.mark.parametrize("flags, prefill_too", [
    (("EAGLE3", "--speculative-draft-model-path", "tinychat-eagle3"), True), (("NGRAM",), False)])
def test_draft_models_are_for_both_halves_of_a_pair(tmp_path, flags, prefill_too):
    """Prefill computes the draft's keys and values too; what drafts from tokens alone has nothing to do there."""
    servers, _ = plan(tmp_path, "--speculative-algorithm", *flags)
    assert ["--speculative-algorithm" in part.argv for part in servers] == [prefill_too, True]


def test_stages_are_the_prefill_servers(tmp_path):
    servers, _ = plan(tmp_path, "--pp-size", "2", "--pp-layer-partition", "3", "4", num_gpus=4)
    assert [["--pp-size" in part.argv, "--pp-layer-partition" in part.argv] for part in servers] \
        == [[True, True], [False, False]]
    assert [dict(zip(part.argv, part.argv[1:])).get("--base-gpu-id", "0") for part in servers] == ["0", "2"]


@pytest.mark.parametrize(("num_gpus", "ids"), [(0, ["0", "0"]), (2, ["0", "1"])])
def test_whole_servers(tmp_path, num_gpus, ids):
    servers, router = plan(tmp_path, "--dp-size", "2", "--policy", "round_robin", num_gpus=num_gpus)
    assert [part.argv[1:4] for part in servers] == [["-m", "baton.launch", "server"]] * 2
    assert [spec.url for spec in router.workers.specs] == [part.url for part in servers]
    given = [dict(zip(part.argv, part.argv[1:])).get("--base-gpu-id", "0") for part in servers]
    assert (given, router.policy.policy) == (ids, "round_robin")


def test_router_flags_and_the_first_server_s_port(tmp_path, capfd):
    config = parse(ClusterConfig, ["--log-dir", str(tmp_path), "--dp-size", "2", "--model-path", "m",
                                   "--router-dp-worker-base-port", "31000"], prog="x", description="")
    planned = plan_cluster(config, 0, ["--policy", "random", "--queue-size", "7"])
    *servers, router = planned.processes(config.cluster, tmp_path)
    assert [part.url for part in servers] == ["http://127.0.0.1:31000", "http://127.0.0.1:31001"]
    found = parse(RouterConfig, router.argv[3:], prog="x", description="")
    assert (found.policy.policy, found.admission.queue_size, found.http.port) == ("random", 7, 30000)
    for flags, sentence in ((["--router-mini-lb"], "leave the flag away"),
                            (["--router-cache-threshold", "9"], "between 0")):
        with pytest.raises(SystemExit) as refusal:
            launch_cluster(["--log-dir", str(tmp_path), *flags])
        assert refusal.value.code == 2
        assert sentence in capfd.readouterr().err


def spellings(config: type) -> dict[str, set[str]]:
    return {item.key: {f"--{item.key.replace('_', '-')}", *item.field.metadata["names"]} for item in _flags(config)}


def test_every_flag_of_a_server_is_taken_or_left_out_with_a_reason():
    server, cluster = spellings(ServerConfig), spellings(ClusterConfig)
    given = set().union(*cluster.values())
    assert set(DECIDED_BY_CLUSTER) <= set(server)
    for name, flags in server.items():
        assert name in DECIDED_BY_CLUSTER or flags <= given, name
    assert not {name for name in cluster if name in DECIDED_BY_CLUSTER} - {"host", "port", "dp_size"}


def test_a_flag_that_is_left_out_is_refused_with_its_reason(capsys):
    with pytest.raises(SystemExit):
        launch_cluster(["--nnodes", "2"])
    assert "--nnodes is not for this command: all servers run on this host" in capsys.readouterr().err


def configs(*argv: str):
    config = parse(ClusterConfig, argv, prog="x", description="", defaults=DEFAULTS)
    return plan_cluster(config, 0)


def test_flags_reach_every_server():
    found = configs("--api-key", "k", "--log-requests", "--kv-events-port", "7000", "--peer-timeout", "9")
    for server in found.servers.values():
        assert server.http.api_key == "k" and server.observe.log_requests
        assert server.disaggregation.peer_timeout == 9
        assert server.disaggregation.disaggregation_transfer_backend == "auto"
    assert [server.events.kv_events_port for server in found.servers.values()] == [7000, 7002]
    assert (found.router.security.api_key, found.router.security.worker_api_key) == ("k", "k")


@pytest.mark.parametrize("flags", [("--policy", "cache_exact"), ("--policy", "cache_exact", "--dp-size", "3")])
def test_cache_exact_turns_kv_events_on(flags):
    servers = list(configs(*flags).servers.values())
    ports = [port for server in servers for port in (server.events.kv_events_port, server.events.kv_events_port + 1)]
    taken = [server.http.port for server in servers]
    taken += [server.disaggregation.disaggregation_bootstrap_port for server in servers if server.mode == "prefill"]
    assert min(ports) > 0 and len({*ports, *taken}) == len(ports) + len(taken)


def test_other_policies_and_no_prefix_cache_leave_kv_events_off():
    for flags in ([], ["--policy", "cache_exact", "--disable-radix-cache"]):
        assert {server.events.kv_events_port for server in configs(*flags).servers.values()} == {0}


def test_attention_groups_of_pairs():
    found = configs("--enable-dp-attention", "--dp-size", "2", "--tp-size", "2")
    assert [(name, server.dp_size) for name, server in found.servers.items()] == [("prefill-0", 2), ("decode-0", 2)]


def test_tls_ends_at_the_router():
    values = {"model_path": "tinychat", "dp_size": 2, "port": 31000, "ssl_certfile": "cert.pem",
              "ssl_keyfile": "key.pem"}
    flags = router_tls(values)
    assert flags == ["--ssl-certfile", "cert.pem", "--ssl-keyfile", "key.pem"]
    copies = copies_of(values)
    plan = plan_cluster(copies, 0, flags)
    *servers, router = plan.processes(copies.cluster, Path())
    assert router.url == "https://127.0.0.1:31000" == plan.url(copies.cluster)
    assert all(part.url.startswith("http://") and "--ssl-certfile" not in part.argv for part in servers)
    with pytest.raises(ConfigError, match="--ssl-ca-certs is not for the router that --dp-size starts"):
        router_tls({"ssl_ca_certs": "x"})
