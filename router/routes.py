"""The route table: each path's handler and methods."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Set
from typing import Literal, NamedTuple

from ..common.commands.base import Broadcast
from ..common.commands.registry import all_endpoints

_POST, _GET = (b"POST",), (b"GET", b"HEAD")
COMPUTING = (b"POST", b"PUT")
"""Methods of requests that workers compute; SGLang's endpoints take either for some."""

PAIR_PATHS = frozenset((b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages", b"/generate",
                        b"/invocations"))
"""Paths that need a pair in a cluster of pairs; all others need one worker of either role. Streams of our servers name
their tokens here, so that another worker can continue them."""

RELAYED: dict[bytes, tuple[bytes, ...]] = {
    **dict.fromkeys(PAIR_PATHS, _POST),
    **dict.fromkeys((b"/generate", b"/encode", b"/classify", b"/v1/rerank"), COMPUTING),
    **dict.fromkeys((b"/open_session", b"/close_session", b"/get_memory_pool_size",
                     b"/get_weights_by_name"), (b"POST", b"GET")),
    **dict.fromkeys((b"/generate_from_file", b"/score", b"/rerank", b"/pooling", b"/tokenize", b"/detokenize",
                     b"/v1/embeddings", b"/v1/score", b"/v1/classify",
                     b"/v1/tokenize", b"/v1/detokenize",
                     b"/separate_reasoning", b"/parse_function_call", b"/function_call", b"/vertex_generate"), _POST),
    **dict.fromkeys((b"/v1/models", b"/get_model_info", b"/model_info", b"/get_server_info", b"/server_info",
                     b"/get_server_args", b"/get_max_total_num_tokens", b"/get_weight_version", b"/weight_version",
                     b"/health_generate", b"/openapi.json"), _GET),
}
"""Methods of the paths that are relayed to one worker."""

PREFIXES = (b"/v1/", b"/v2/", b"/api/", b"/inference/")
"""Prefixes of further relayed paths, with any method: a worker may offer more than ``RELAYED``."""
ANY_METHOD = (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE")

UNSUPPORTED: dict[bytes, str] = {
    b"/parse/function_call": "use /parse_function_call, which the workers answer",
    b"/parse/reasoning": "use /separate_reasoning, which the workers answer",
    b"/wasm": "this router runs no plug-ins",
    b"/ha/": "processes of one router share their state by --router-workers; several routers need none in common",
}
"""Prefixes of sglang-router's paths that this router does not have, and what to do instead."""

_OTHER_BROADCASTS: dict[bytes, Broadcast] = {
    **dict.fromkeys((b"/abort_request", b"/configure_logging", b"/reset_prefix_cache"), Broadcast()),
    b"/update_weight_version": Broadcast(slow=True),
    **dict.fromkeys((b"/load_lora_adapter", b"/unload_lora_adapter", b"/v1/load_lora_adapter",
                     b"/v1/unload_lora_adapter"),
                    Broadcast(slow=True, renames=True)),
}
"""Endpoints that are sent to every worker besides commands: requests to abort, and those of other engines."""


@functools.cache
def broadcasts() -> dict[bytes, tuple[tuple[bytes, ...], Broadcast]]:
    """Methods of the paths that are sent to every worker, by path: those of registered commands, and others. Raises
    ConfigError for a plug-in that does not load."""
    found: dict[bytes, tuple[tuple[bytes, ...], Broadcast]] = {
        path: ((b"GET", b"POST") if path == b"/configure_logging" else _POST, broadcast)
        for path, broadcast in _OTHER_BROADCASTS.items()}
    for endpoint in all_endpoints():
        if endpoint.broadcast is not None:
            others, _ = found.get(path := endpoint.path.encode(), ((), endpoint.broadcast))
            found[path] = (*others, *map(str.encode, endpoint.methods)), endpoint.broadcast
    return found


@functools.cache
def changing_paths() -> frozenset[bytes]:
    """The broadcasts that need an administrator's key."""
    for_clients = {endpoint.path.encode() for endpoint in all_endpoints() if endpoint.for_clients}
    return frozenset(broadcasts().keys() - for_clients)


class Route(NamedTuple):
    """A row of the route table."""

    kind: Literal["relay", "router", "unknown"]
    """The handler: a worker, the router itself, or none (404)."""
    methods: tuple[bytes, ...] = ()
    """Methods of a relayed path; the router's own handlers check theirs."""
    label: str = "other"
    """The path in metrics: few values, whatever clients ask for."""
    runs_on_pair: bool = False
    """True if a cluster of pairs needs a pair for it."""
    is_open: bool = False
    """True if it needs no API key."""
    is_plain: bool = False
    """True for an exact path that changes no worker: it needs no check of its spelling, or for an admin key."""
    hint: str = ""
    """The alternative to an unsupported path."""


_UNKNOWN = Route("unknown")


class RouteTable(dict[bytes, Route]):
    """Routes by path: exact paths are the items; others are found by prefix, in order."""

    def __init__(self, router_paths: Iterable[bytes], *, open_paths: Set[bytes], router_folder: bytes):
        """``router_paths`` and the paths in ``router_folder`` are the router's own."""
        super().__init__((path, Route("router", label=path.decode(), is_open=path in open_paths))
                         for path in router_paths)
        self[router_folder] = folder = Route("router")
        self.update((path, Route("relay", methods, path.decode(), path in PAIR_PATHS, is_plain=True))
                    for path, methods in RELAYED.items())
        self._prefixes = [(prefix, Route("relay", ANY_METHOD, prefix.decode() + "*")) for prefix in PREFIXES]
        self._prefixes.append((router_folder + b"/", folder))
        self._prefixes += [(prefix, Route("unknown", hint=hint)) for prefix, hint in UNSUPPORTED.items()]

    def __missing__(self, path: bytes) -> Route:
        return next((route for prefix, route in self._prefixes if path.startswith(prefix)), _UNKNOWN)
