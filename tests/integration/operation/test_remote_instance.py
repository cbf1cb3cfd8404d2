"""A new server takes the weights of a running one, which were changed since it loaded its checkpoint."""

from __future__ import annotations

import base64
import json

import pytest
from safetensors.torch import load_file, save

from baton.common.api.errors import ConfigError
from baton.common.config.cli import build
from baton.common.config.server import ServerConfig
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Server, get_json, post_json
from baton.tests.helpers.ports import free_port

ARGV = ["--model-path", "tinychat", "--device", "cpu", "--log-level", "warning"]
ASK = {"text": "In the morning", "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
SEED = "--remote-instance-weight-loader-"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    servers: list[Server] = []

    def start(name, *flags):
        log = tmp_path_factory.mktemp(name) / "log"
        servers.append(Server("baton.launch_server", [*ARGV, *flags], free_port(), log).start())
        return servers[-1]

    yield start
    for server in servers:
        server.process.terminate()
    for server in servers:
        server.process.wait(30)


def test_a_new_server_has_the_weights_of_a_running_one(start):
    seed = start("seed", "--admin-api-key", "secret")
    seed.wait_ready()
    before = post_json(seed.url + "/generate", ASK)[1]["output_ids"]
    tensors = {name: 1.5 * tensor for name, tensor in load_file(CHECKPOINT / "model.safetensors").items()
               if name.endswith("o_proj.weight")}
    status, told = post_json(seed.url + "/update_weights_from_tensor", {
        "serialized_named_tensors": [base64.b64encode(save(tensors)).decode()], "weight_version": "v2"},
        headers={"Authorization": "Bearer secret"})
    assert status == 200, told
    expected = post_json(seed.url + "/generate", ASK)[1]["output_ids"]
    assert expected != before

    def newcomer(name, *flags):
        return start(name, "--load-format", "remote_instance", SEED + "seed-instance-ip", "127.0.0.1",
                     SEED + "seed-instance-service-port", seed.url.rpartition(":")[2],
                     SEED + "send-weights-group-ports", json.dumps([free_port()]), *flags)

    server, stranger, other = (newcomer("new", "--admin-api-key", "secret"), newcomer("stranger"),
                               newcomer("other", "--admin-api-key", "secret", "--dtype", "bfloat16"))
    server.wait_ready()
    assert post_json(server.url + "/generate", ASK)[1]["output_ids"] == expected
    facts = [tuple(get_json(each.url + "/get_server_info")[name] for name in ("model_fingerprint", "weight_version"))
             for each in (seed, server)]
    assert facts[0] == facts[1] and facts[0][1] == "v2"
    assert [each.process.wait(60) for each in (stranger, other)] == [1, 1]
    assert "refuses" in stranger.log.read_text() and "start both with the same model, --dtype" in other.log.read_text()
    assert post_json(seed.url + "/generate", ASK)[1]["output_ids"] == expected


@pytest.mark.parametrize(("flags", "words"), [
    ({"load_format": "remote_instance"}, "go together"),
    ({"load_format": "remote_instance", "remote_instance_weight_loader_seed_instance_ip": "h"}, "service-port"),
    ({"remote_instance_weight_loader_send_weights_group_ports": "8000"}, "JSON list")])
def test_flags_that_lack_others(flags, words):
    with pytest.raises(ConfigError, match=words):
        build(ServerConfig, {"model_path": "tinychat", "device": "cpu", **flags})
