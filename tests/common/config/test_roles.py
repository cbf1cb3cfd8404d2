"""Roles as data: a toy role in the tables is listed, validated and routed by its facts alone."""

from __future__ import annotations

import pytest

from baton.common.api.errors import ConfigError, InvalidRequest
from baton.common.config.cli import build, parse
from baton.common.config.roles import ROLES, Role
from baton.common.config.server import ServerConfig
from baton.common.obs.metrics import ServerMetrics
from baton.launch import launch_server
from baton.router.admin.endpoints import worker_from
from baton.router.workers import roles
from baton.router.workers.registry import Registry

ENCODE = Role(label="encode", component="encode", launcher="baton.tests.common.config.test_roles",
              argv=("baton.launch", "server"), answers_clients=False)


def run(config: ServerConfig) -> int:
    """The launcher of the toy role."""
    return 7 if config.mode == "encode" else 1


@pytest.fixture
def encode(monkeypatch):
    monkeypatch.setitem(ROLES._entries, "encode", ENCODE)
    monkeypatch.setitem(roles.WORKER_ROLES, "encode", ENCODE)


def test_facts_of_our_roles():
    facts = {name: ROLES.get(name) for name in ROLES}
    assert {name for name, role in facts.items() if role.serves_alone} == {"null"}
    assert {name for name, role in facts.items() if role.transfers_kv} == {"prefill", "decode"}
    assert {name for name, role in facts.items() if role.answers_clients} == {"null", "decode"}


def test_a_role_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="must be one of decode, null, prefill, not 'encode'"):
        build(ServerConfig, {"model_path": "m", "disaggregation_mode": "encode"})
    with pytest.raises(InvalidRequest, match="role must be prefill or decode on this router, not 'encode'"):
        worker_from({"url": "http://a:1", "role": "encode"}, pairs=True)


def test_a_new_role_is_listed_and_its_flags_are_checked(encode, capsys):
    with pytest.raises(SystemExit):
        parse(ServerConfig, ["--help"], prog="launch_server", description="")
    assert "{decode,encode,null,prefill}" in capsys.readouterr().out.replace("\n", "").replace(" ", "")
    config = build(ServerConfig, {"model_path": "m", "disaggregation_mode": "encode"})
    assert config.role is ENCODE and not config.disaggregation.shares_memory
    for flag, value, reason in (("enable_mixed_chunk", True, "is for servers that decode; leave it out here"),
                                ("file_storage_path", "folder", "is for unified and decode servers"),
                                ("pp_size", 2, "is for prefill and unified servers"),
                                ("is_embedding", True, "needs a unified server")):
        with pytest.raises(ConfigError, match=f"^--{flag.replace('_', '-')} {reason}"):
            build(ServerConfig, {"model_path": "m", "disaggregation_mode": "encode", flag: value})
    exported = ServerMetrics("m", "encode").render(None).decode()
    assert "baton:engine_finished_requests" in exported and "kv_bytes_sent" not in exported


def test_a_new_role_is_launched_by_its_module(encode):
    with pytest.raises(SystemExit) as ended:
        launch_server(["--model-path", "m", "--disaggregation-mode", "encode"])
    assert ended.value.code == 7


def test_the_router_takes_workers_of_a_new_role(encode):
    worker = worker_from({"url": "http://a:1", "role": "encode"}, pairs=True)
    registry = Registry()
    registry.add(worker)
    registry.record_check_passed(worker)
    assert registry.available("encode") == (worker,) and worker.facts is ENCODE
    assert not registry.ready(pairs=True) and "bootstrap_port" not in worker.describe()
    assert roles.can_serve_as("encode", "encode") and not roles.can_serve_as("encode", "regular")
    assert roles.can_serve_as("decode", "regular") and not roles.can_serve_as("prefill", "decode")
    assert roles.can_serve_as("someone's", "prefill") and roles.role_of_mode("null") == "regular"
    with pytest.raises(InvalidRequest, match="role must be regular on this router"):
        worker_from({"url": "http://a:1", "role": "encode"}, pairs=False)
