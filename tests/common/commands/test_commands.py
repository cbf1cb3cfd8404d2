"""Administrative commands as data: what is registered, what follows from it, and what is refused."""

from __future__ import annotations

import inspect

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

import baton
from baton.common.api.errors import ConfigError
from baton.common.api.wire import Int32
from baton.common.commands.base import Broadcast, Command, messages_by_worker, plain_endpoint
from baton.common.commands.methods import signature_of
from baton.common.commands.registry import COMMANDS, all_endpoints, name_of, own_endpoints
from baton.common.commands.update_weights import UpdateWeights
from baton.common.config.cli import build
from baton.common.config.server import ServerConfig
from baton.common.engine_client.client import EngineClient
from baton.common.models.registry import load_model_spec
from baton.common.serving import app
from baton.common.serving.context.serving_context import ServingContext
from baton.router import routes
from baton.router.admin import endpoints as router_endpoints
from baton.router.admin.rights import needs_admin
from baton.router.net.request import Request


class Toy(msgspec.Struct, frozen=True):
    """Does nothing."""

    count: Int32 = 1


def toy(path: str, **facts) -> Command[Toy]:
    return Command(Toy, lambda rank, command: "Done.", (plain_endpoint(path, Toy, **facts),))


@pytest.fixture
def register(monkeypatch):
    """Registers a command until the test ends."""
    def add(name: str, command: Command) -> None:
        monkeypatch.setitem(COMMANDS._entries, name, command)
        for cached in caches:
            cached.cache_clear()

    caches = routes.broadcasts, routes.changing_paths, router_endpoints.admin_routes
    yield add
    for cached in caches:
        cached.cache_clear()


def test_every_command_is_whole():
    for name in COMMANDS:
        command = COMMANDS.get(name)
        assert command.timeout > 0
    sent = UpdateWeights("folder", "v2")
    assert name_of(sent) == "update_weights_from_disk"
    assert COMMANDS.get(name_of(sent)).decode(msgspec.msgpack.encode(sent)) == sent
    with pytest.raises(LookupError, match="struct Toy"):
        name_of(Toy())


def test_each_endpoint_is_a_method_of_the_engine():
    for endpoint in own_endpoints():
        method = getattr(baton.Engine, endpoint.name)
        assert method.__doc__ and method.__doc__ == endpoint.serve.__doc__
        required_first = sorted(endpoint.parameters, key=lambda each: not each.required)
        assert list(inspect.signature(method).parameters) == ["self", *(each.name for each in required_first)]
    assert str(signature_of(next(each for each in own_endpoints() if each.name == "update_weights_from_disk"))) == (
        "(self, model_path: 'str', revision: 'str | None' = None, abort_all_requests: 'bool | None' = None, "
        "weight_version: 'str | None' = None, load_format: 'str | None' = None, is_async: 'bool | None' = None, "
        "keep_pause: 'bool | None' = None, token_step: 'int | None' = None) -> 'str'")


def test_each_endpoint_is_a_broadcast_of_the_router():
    found = routes.broadcasts()
    for endpoint in own_endpoints():
        if endpoint.broadcast is None:
            continue
        methods, broadcast = found[endpoint.path.encode()]
        assert {each.encode() for each in endpoint.methods} <= {*methods} and broadcast is endpoint.broadcast
        assert len(methods) == sum(len(each.methods) for each in own_endpoints() if each.path == endpoint.path)
    assert found[b"/update_weights_from_disk"][1] == Broadcast(slow=True, renames=True)


async def test_a_client_s_key_opens_commands_for_clients(register, checkpoint):
    register("toy", toy("/toy", for_clients=True, broadcast=None))
    register("admin_toy", toy("/admin_toy"))
    config = build(ServerConfig, {"model_path": str(checkpoint), "api_key": "client", "admin_api_key": "admin"})
    client = EngineClient(4, lambda message: None)
    served = app.make_app(ServingContext(config, load_model_spec(config.model), client))
    async with TestClient(TestServer(served)) as http:
        for path, key, status in (("/toy", "client", 503), ("/toy", "", 401), ("/admin_toy", "client", 401),
                                  ("/admin_toy", "admin", 503)):  # the engine has not started
            async with http.post(path, headers={"Authorization": f"Bearer {key}"}) as answer:
                assert answer.status == status, (path, key)
    client.channel.close()


def test_the_router_s_keys_for_commands(register):
    register("toy", toy("/toy", broadcast=None))
    register("admin_toy", toy("/admin_toy"))
    register("client_toy", toy("/client_toy", for_clients=True))
    found = router_endpoints.admin_routes()
    assert b"/toy" not in found and {b"/admin_toy", b"/client_toy"} <= found.keys()
    assert [needs_admin(Request(b"POST", b"", path=path)) for path in (b"/admin_toy", b"/client_toy")] == [True, False]


def test_messages_of_workers():
    assert messages_by_worker({"a": {"message": "x"}, "b": {}}) == {"messages": {"a": "x", "b": None}}


@pytest.mark.parametrize("path", ["/flush_cache", "/health"])
def test_a_path_that_is_taken_is_refused(register, path, checkpoint):
    register("toy", toy(path))
    config = build(ServerConfig, {"model_path": str(checkpoint)})
    client = EngineClient(4, lambda message: None)
    with pytest.raises(ConfigError, match=f"A plug-in's command has the path {path}, which is taken"):
        app.make_app(ServingContext(config, load_model_spec(config.model), client))
    client.channel.close()
    with pytest.raises(ConfigError, match=path):
        router_endpoints.admin_routes()


@pytest.mark.parametrize("path", ["/mine/generate", "/mine/flush_cache"])
def test_a_method_that_the_engine_has_is_refused(register, path):
    register("toy", toy(path))
    with pytest.raises(ConfigError, match=f"has the path {path}, and baton.Engine has another method"):
        baton.Engine("m")


def test_a_number_without_bounds_is_refused(register):
    """It would break the message to the ranks."""
    class Wide(msgspec.Struct, frozen=True):
        count: int = 1

    register("wide", Command(Wide, lambda rank, command: "", (plain_endpoint("/wide", Wide),)))
    with pytest.raises(TypeError, match="Give these numbers bounds: Wide.count"):
        app.all_routes(all_endpoints())
