"""The route table: one row for each path, exact paths before prefixes."""

from __future__ import annotations

import pytest

from baton.router.admin.endpoints import OPEN_PATHS, admin_routes
from baton.router.entry import route_table
from baton.router.routes import ANY_METHOD, PAIR_PATHS, RELAYED

ROUTES = route_table()

def test_exact_paths():
    for path, methods in RELAYED.items():
        route = ROUTES[path]
        assert (route.kind, route.methods, route.label, route.is_plain) == ("relay", methods, path.decode(), True)
        assert route.runs_on_pair is (path in PAIR_PATHS) and not route.is_open
    for path in admin_routes():
        route = ROUTES[path]
        assert (route.kind, route.label, route.is_open) == ("router", path.decode(), path in OPEN_PATHS)
        assert not route.is_plain and not route.runs_on_pair


@pytest.mark.parametrize(("path", "kind", "label"), [
    (b"/v1/files/abc", "relay", "/v1/*"), (b"/inference/x", "relay", "/inference/*"),
    (b"/v1/load_lora_adapter", "router", "/v1/load_lora_adapter"), (b"/v1/load_lora_adapter/", "relay", "/v1/*"),
    (b"/workers", "router", "other"), (b"/workers/3/drain", "router", "other"), (b"/workersx", "unknown", "other"),
    (b"/wasm/x", "unknown", "other"), (b"/nowhere", "unknown", "other"), (b"", "unknown", "other")])
def test_prefixes(path, kind, label):
    route = ROUTES[path]
    assert (route.kind, route.label) == (kind, label)
    assert route.methods == (ANY_METHOD if kind == "relay" else ()) and not route.is_plain
    assert bool(route.hint) is path.startswith(b"/wasm")
