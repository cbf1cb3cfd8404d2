"""Keys, TLS and CORS: who gets through, and what workers are shown."""

from __future__ import annotations

import json
import ssl

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.cli import build
from baton.router.admin.endpoints import OPEN_PATHS, admin_routes
from baton.router.config import RouterConfig
from baton.router.routes import RELAYED
from baton.tests.helpers.certificates import make_certificate


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


def sent_headers(served) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in served.headers}


async def test_several_client_keys(start_router, worker, request_to, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# teams\nred   # the first\n\nblue\n")
    router = await start_router(await worker(), api_key="one", api_key_file=str(file))
    for key, status in (("one", 200), ("red", 200), ("blue", 200), ("# teams", 401), ("on", 401), ("", 401)):
        assert (await request_to(router, "POST", "/generate", b"{}", bearer(key))).status == status
    assert (await request_to(router, "POST", "/generate", b"{}", "authorization: bearer  red\r\n")).status == 200
    assert (await request_to(router, "POST", "/generate", b"{}", "Authorization: Basic red\r\n")).status == 401
    for lines, status in (("x-api-key: red\r\n", 200), ("X-API-Key: green\r\n", 401), ("x-api-key:\r\n", 401),
                          ("x-api-key: red\r\n" + bearer("green"), 401)):  # Anthropic's clients
        assert (await request_to(router, "POST", "/v1/messages", b"{}", lines)).status == status


@pytest.mark.parametrize("content", ["", "# nothing\n"])
def test_key_file_without_keys_is_refused(tmp_path, content):
    """It would open the router to everyone."""
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigError, match="holds no key"):
        assert build(RouterConfig, {"api_key_file": str(file)}).security.client_keys


@pytest.mark.parametrize("path", ["/add_worker?url=http://h:1", "/remove_worker?url=http://h:1", "/flush_cache",
                                  "/update_weights_from_disk", "/start_profile"])
async def test_admin_key_for_what_changes_workers(start_router, worker, request_to, path):
    router = await start_router(await worker(), api_key="client", admin_api_key="admin")
    assert (await request_to(router, "POST", path, b"", bearer("client"))).status == 401
    assert (await request_to(router, "POST", path, b"", bearer("admin"))).status in (200, 404)
    assert (await request_to(router, "POST", "/generate", b"{}", bearer("admin"))).status == 200


async def test_admin_key_alone_leaves_clients_free(start_router, worker, request_to):
    router = await start_router(await worker(), control_plane_api_keys=("1:ops:admin:a:b",))
    assert (await request_to(router, "POST", "/generate", b"{}")).status == 200
    assert (await request_to(router, "POST", "/flush_cache")).status == 401
    assert (await request_to(router, "POST", "/flush_cache", b"", bearer("a:b"))).status == 200


async def test_workers_are_shown_their_own_keys(start_router, worker, request_to, script):
    common, own = await worker(), await worker()
    router = await start_router(common, api_key="client", admin_api_key="a", worker_api_key="shared",
                                policy="round_robin")
    await request_to(router, "POST", f"/add_worker?url={own.url}&api_key=special", b"", bearer("a"))
    await script.until(lambda: len(router.registry.available("regular")) == 2)
    for _ in range(2):
        await request_to(router, "POST", "/generate", b"{}", bearer("client"))
    await request_to(router, "POST", "/flush_cache", b"", bearer("a"))
    for mock, key in ((common, b"shared"), (own, b"special")):
        assert [sent_headers(post)[b"authorization"] for post in mock.posts] == [b"Bearer " + key] * 2
    assert "special" not in (await request_to(router, "GET", "/list_workers", b"", bearer("client"))).body.decode()


_CLIENTS = {b"/abort_request"}
"""The router's own POST paths that a client key authorizes."""


@pytest.mark.parametrize("keys", [{"api_key": "client"}, {"api_key": "client", "admin_api_key": "admin"}])
async def test_every_path_that_changes_workers_is_an_administrator_s(start_router, worker, request_to, keys):
    """All routes that there are, so that none can be forgotten, and those of workers under a version."""
    mock = await worker()
    router = await start_router(mock, **keys)
    changing = {path for path, (methods, _) in admin_routes().items() if b"POST" in methods} - _CLIENTS
    changing |= {b"/v1" + path for path in changing} | {b"/v1/%6coad_lora_adapter", b"/v1/unload_lora_adapter/",
                                                        b"/workers", b"/workers/w1/drain", b"/v2/sleep"}
    asked = [(path.decode(), method) for path in sorted(changing) for method in ("POST", "PUT", "DELETE")]
    asked += [("/workers/w1", "DELETE"), ("/workers/w1", "PUT"), ("/flush_cache", "GET")]
    for path, method in asked:
        for headers in (bearer("client"), "x-api-key: client\r\n", ""):
            reply = await request_to(router, method, path, b"", headers)
            assert reply.status == 401, (method, path)
            assert "admin" in reply.error["message"]
    reply = await request_to(router, "POST", "/abort_request", b'{"abort_all": true}', bearer("client"))
    assert reply.status == 401
    assert not mock.posts and len(router.registry) == 1
    for path in (*RELAYED, b"/abort_request", b"/v1/files", b"/v1/some/thing"):
        method = "POST" if path not in RELAYED else RELAYED[path][0].decode()
        assert (await request_to(router, method, path.decode(), b"{}", bearer("client"))).status == 200, path
        if path not in OPEN_PATHS:
            assert (await request_to(router, method, path.decode(), b"{}")).status == 401, path


async def test_changes_of_workers_without_any_key_are_logged(start_router, worker, request_to, caplog):
    router = await start_router(await worker(), host="0.0.0.0")
    assert (await request_to(router, "POST", "/flush_cache")).status == 200
    assert [line for line in caplog.messages if "POST /flush_cache by 127.0.0.1, without a key" in line]
    caplog.clear()
    assert (await request_to(await start_router(await worker()), "POST", "/flush_cache")).status == 200
    assert not [line for line in caplog.messages if "without a key" in line]


@pytest.mark.parametrize("keys", [{"api_key": "secret"}, {"admin_api_key": "secret"}])
@pytest.mark.parametrize("line", ["Authorization: Bearer secret\r\n", "X-Api-Key: secret\r\n"])
async def test_a_key_that_the_router_knows_goes_no_further(start_router, worker, request_to, keys, line):
    mock = await worker()
    router = await start_router(mock, **keys)
    for path in ("/generate", "/v1/messages", "/v1/unknown"):
        for _ in range(3):  # the last one's head is known
            assert (await request_to(router, "POST", path, b"{}", line)).status == 200
    assert len(mock.posts) == 9
    assert not [value for served in mock.posts for _, value in served.headers if b"secret" in value]


async def test_a_worker_that_requires_a_key_is_logged_once(start_router, worker, script, request_to, caplog):
    router = await start_router(await worker(script.status(401)), api_key="client")
    for _ in range(3):
        assert (await request_to(router, "POST", "/generate", b"{}", bearer("client"))).status == 401
    assert len([line for line in caplog.messages if "--worker-api-key" in line]) == 1


async def test_headers_for_the_router_alone_go_no_further(start_router, worker, request_to):
    mock = await worker()
    router = await start_router(mock)
    lines = ("Proxy-Authorization: Basic x\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nConnection: x-other\r\n"
             "x-oTher: 2\r\nX-End: 3\r\nx-api-key: theirs\r\n")
    for _ in range(3):
        await request_to(router, "POST", "/generate", b"{}", lines)
    for served in mock.posts:
        names = sent_headers(served)
        assert names[b"x-end"] == b"3" and names[b"x-api-key"] == b"theirs"
        assert not {b"proxy-authorization", b"x-hop", b"x-other", b"connection"} & set(names)


@pytest.mark.parametrize("path", ["/v1/../flush_cache", "/v1/%2e%2e/flush_cache", "/v1/a/./b", "/v1/..%2fadd_worker",
                                  "/v1/a/..", "/v1/..\\flush_cache", "/v1/%2E/x", "/workers/../add_worker"])
async def test_paths_that_a_worker_could_take_for_others_are_refused(start_router, worker, request_to, path):
    mock = await worker()
    reply = await request_to(await start_router(mock), "POST", path, b"{}")
    assert (reply.status, mock.posts) == (400, [])


async def test_client_s_authorization_goes_through(start_router, worker, request_to):
    mock = await worker()
    router = await start_router(mock)
    await request_to(router, "POST", "/generate", b"{}", "AUTHorization: Digest x\r\n")
    assert [value for name, value in mock.posts[0].headers if name == b"AUTHorization"] == [b"Digest x"]


# ---------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def test_https_on_both_sides(start_router, worker, certificate, script):
    """A router with TLS before a router with TLS before a worker: both directions of the relay."""
    import asyncio

    cert, key = certificate
    mock = await worker(script.stream("a", "b", "c"))
    inner = await start_router(mock, ssl_certfile=cert, ssl_keyfile=key)
    outer = await start_router(worker_urls=(f"https://127.0.0.1:{inner.port}",), ssl_certfile=cert, ssl_keyfile=key,
                               worker_ca_file=(cert,))
    reader, writer = await asyncio.open_connection("127.0.0.1", outer.port,
                                                   ssl=ssl.create_default_context(cafile=cert))
    for body in (b"{}", b"{" + b" " * 300_000 + b"}"):
        writer.write(b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"data: ") == 3
        assert mock.posts[-1].body == body
    writer.close()


async def test_worker_with_an_unknown_certificate_gets_nothing(start_router, worker, certificate):
    cert, key = certificate
    inner = await start_router(await worker(), ssl_certfile=cert, ssl_keyfile=key)
    outer = await start_router(worker_urls=(f"https://127.0.0.1:{inner.port}",), wait=False)
    import asyncio

    await asyncio.sleep(0.2)
    assert [w.state for w in outer.registry] == ["starting"]


@pytest.mark.parametrize(("flags", "match"), [
    ({"ssl_certfile": "/nowhere"}, "go together"), ({"client_key_path": "/nowhere"}, "go together"),
    ({"ssl_certfile": "/nowhere", "ssl_keyfile": "/nowhere"}, "Cannot use --ssl-certfile"),
    ({"worker_ca_file": ("/nowhere",)}, "Cannot use --worker-ca-file"),
    ({"control_plane_api_keys": ("1:bob:user:k",)}, "takes ID:NAME:admin:KEY"),
])
async def test_unusable_security_is_refused_at_the_start(start_router, flags, match):
    with pytest.raises(ConfigError, match=match):
        await start_router(**flags)


# ---------------------------------------------------------------------- CORS


async def test_cors(start_router, worker, request_to, script):
    async def liberal(served):
        served.answer(extra=b"Access-Control-Allow-Origin: *\r\naccess-control-allow-credentials: true\r\n")

    router = await start_router(await worker(liberal), cors_allowed_origins=("https://a.example",), api_key="k")
    ask = "Origin: https://{}.example\r\nAccess-Control-Request-Method: POST\r\n" \
          "Access-Control-Request-Headers: authorization,x-y\r\n"
    granted = await request_to(router, "OPTIONS", "/v1/chat/completions", b"", ask.format("a"))
    assert (granted.status, granted.headers["access-control-allow-headers"]) == (204, "authorization,x-y")
    assert (await request_to(router, "OPTIONS", "/v1/chat/completions", b"", ask.format("b"))).status == 404
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        reply = await request_to(router, "POST", "/generate", b"{}", bearer("k") + f"Origin: {origin}\r\n")
        assert (reply.status, reply.headers.get("access-control-allow-origin")) == (200, allowed)
        assert "access-control-allow-credentials" not in reply.headers
        assert json.loads(reply.body) == {"ok": True}
    refused = await request_to(router, "POST", "/generate", b"{}", "Origin: https://a.example\r\n")
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
