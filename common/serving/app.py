"""The aiohttp application: routes, and the middleware around all of them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Set
from typing import Any

from aiohttp import web

from ..api.errors import InvalidRequest, NotFound, ServingError, TooLarge
from ..commands.base import Endpoint
from ..commands.registry import all_endpoints, refuse_taken_paths
from ..config.roles import ROLE_HEADER, check_role
from .admin import commands
from .admin import handler as admin_routes
from .api_document import api_document
from .batches import handler as batch_routes
from .chat import handler as chat_routes
from .chat import parsing_handler
from .completions import handler as completion_routes
from .context.api_keys import ApiKeys
from .context.client_timeouts import SlowBody, SlowRequest
from .context.in_flight import shut_down
from .context.request_planner import CLIENT
from .context.served_role import REQUEST_ROLE
from .context.serving_context import ServingContext
from .context.telemetry import CUSTOM_LABELS
from .context.traces import TRACEPARENT
from .embeddings import handler as embedding_routes
from .files import handler as file_routes
from .forward import SHOWN_ADDRESS, Forwarder
from .messages import handler as message_routes
from .messages.schema import error_body
from .native import handler as native_routes
from .native.schema import preferred_sampling
from .protocol.slo import HEADER_SLO, slo_of_headers
from .respond import add_prompt_pages
from .responses import handler as response_routes
from .sessions import handler as session_routes
from .tokens import handler as tokenize_routes
from .web import error_response, is_server_fault, json_bytes, log_failure

log = logging.getLogger("baton.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = Callable[[ServingContext, web.Request], Awaitable[web.StreamResponse]]

_ROUTES: tuple[tuple[str, str, Route], ...] = (
    ("POST", "/v1/chat/completions", chat_routes.chat_completions),
    ("POST", "/invocations", chat_routes.chat_completions),
    ("POST", "/v1/completions", completion_routes.completions),
    ("POST", "/v1/responses", response_routes.responses),
    ("POST", "/v1/messages", message_routes.messages),
    ("POST", "/v1/messages/count_tokens", message_routes.count_tokens),
    ("GET", "/v1/responses/{response_id}", response_routes.retrieve),
    ("DELETE", "/v1/responses/{response_id}", response_routes.delete),
    ("POST", "/v1/responses/{response_id}/cancel", response_routes.cancel),
    ("GET", "/v1/responses/{response_id}/input_items", response_routes.input_items),
    ("GET", "/v1/responses/{response_id}/conversation", response_routes.conversation),
    ("POST", "/generate", native_routes.generate),
    ("PUT", "/generate", native_routes.generate),
    ("POST", "/vertex_generate", native_routes.vertex_generate),
    ("POST", "/generate_from_file", native_routes.generate_from_file),
    ("POST", "/v1/tokenize", tokenize_routes.tokenize),
    ("POST", "/tokenize", tokenize_routes.tokenize),
    ("POST", "/v1/detokenize", tokenize_routes.detokenize),
    ("POST", "/detokenize", tokenize_routes.detokenize),
    ("POST", "/parse_function_call", parsing_handler.parse_function_call),
    ("POST", "/function_call", parsing_handler.parse_function_call),
    ("POST", "/separate_reasoning", parsing_handler.separate_reasoning),
    ("POST", "/v1/files", file_routes.upload),
    ("GET", "/v1/files", file_routes.files),
    ("GET", "/v1/files/{file_id}", file_routes.file),
    ("GET", "/v1/files/{file_id}/content", file_routes.content),
    ("DELETE", "/v1/files/{file_id}", file_routes.delete),
    ("POST", "/v1/batches", batch_routes.create),
    ("GET", "/v1/batches", batch_routes.batches),
    ("GET", "/v1/batches/{batch_id}", batch_routes.batch),
    ("POST", "/v1/batches/{batch_id}/cancel", batch_routes.cancel),
    ("GET", "/v1/models", admin_routes.models),
    ("GET", "/v1/models/{model:.+}", admin_routes.model),
    ("GET", "/", admin_routes.root),
    ("GET", "/health", admin_routes.health),
    ("GET", "/ping", admin_routes.health),
    ("GET", "/health_generate", admin_routes.health_generate),
    ("GET", "/get_model_info", admin_routes.model_info),
    ("GET", "/model_info", admin_routes.model_info),
    ("GET", "/get_weight_version", admin_routes.weight_version),
    ("GET", "/weight_version", admin_routes.weight_version),
    ("GET", "/get_load", admin_routes.load),
    ("GET", "/v1/loads", admin_routes.loads),
    ("GET", "/get_server_info", admin_routes.server_info),
    ("GET", "/server_info", admin_routes.server_info),
    ("GET", "/get_server_args", admin_routes.server_info),
    ("GET", "/get_memory_pool_size", admin_routes.memory_pool_size),
    ("POST", "/get_memory_pool_size", admin_routes.memory_pool_size),
    ("GET", "/get_max_total_num_tokens", admin_routes.max_total_num_tokens),
    ("POST", "/abort_request", admin_routes.abort_request),
    ("POST", "/connect_prefill", admin_routes.connect_prefill),
    ("POST", "/v1/embeddings", embedding_routes.embeddings),
    ("POST", "/encode", embedding_routes.encode),
    ("PUT", "/encode", embedding_routes.encode),
    ("POST", "/classify", embedding_routes.classify),
    ("PUT", "/classify", embedding_routes.classify),
    ("POST", "/v1/classify", embedding_routes.classify_by_name),
    ("POST", "/v1/rerank", embedding_routes.rerank),
    ("PUT", "/v1/rerank", embedding_routes.rerank),
    ("POST", "/rerank", embedding_routes.rerank),
    ("POST", "/v1/score", embedding_routes.score),
    ("POST", "/score", embedding_routes.score),
    ("POST", "/open_session", session_routes.open_session),
    ("GET", "/open_session", session_routes.open_session),
    ("POST", "/close_session", session_routes.close_session),
    ("GET", "/close_session", session_routes.close_session),
    ("GET", "/metrics", admin_routes.metrics),
)
_ADMIN_ROUTES: tuple[tuple[str, str, Route], ...] = (
    ("POST", "/update_weight_version", admin_routes.update_weight_version),
    ("POST", "/configure_logging", admin_routes.configure_logging),
    ("GET", "/configure_logging", admin_routes.configure_logging),
)
"""Routes that change the API server alone; those that change the engine are commands."""
_FOR_CLIENTS = frozenset(re.sub(r":[^}]*}", "}", path) for _, path, _ in _ROUTES) | {"/openapi.json"}
"""Paths that a client's key opens, as aiohttp spells them, besides those of commands for clients. Every other path
needs an administrator's key, also one that is missing here by mistake."""
_OPEN_TO_ALL = frozenset(("/", "/health", "/health_generate", "/ping", "/metrics"))


_FOR_WORKERS: dict[str, bytes | None] = {
    **dict.fromkeys(("/v1/messages",
                     "/v1/messages/count_tokens", "/generate_from_file", "/v1/tokenize", "/tokenize", "/v1/detokenize",
                     "/detokenize", "/parse_function_call", "/function_call", "/separate_reasoning", "/v1/embeddings",
                     "/encode", "/classify", "/v1/classify", "/v1/rerank", "/rerank", "/v1/score", "/score")),
    **dict.fromkeys(("/generate", "/vertex_generate", "/v1/chat/completions", "/invocations", "/v1/completions"),
                    b'session_params'),
}
"""Paths that each process of a server serves by itself, unless the body holds these bytes; the others have state, which
one process keeps."""


class MethodNotAllowed(ServingError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


def make_app(context: ServingContext, forwarder: Forwarder | None = None) -> web.Application:
    """The application of a server with all its endpoints, registered commands among them; raises ConfigError for a
    plug-in that does not load or takes a path of the server, and for --preferred-sampling-params that are none.

    ``forwarder`` leads to the process that keeps the server's state, where that is another one.
    """
    if (preferred := context.config.answers.preferred_sampling_params) is not None:
        preferred_sampling(preferred)
    endpoints = all_endpoints()
    refuse_taken_paths({endpoint.path for endpoint in endpoints} & {path for _, path, _ in (*_ROUTES, *_ADMIN_ROUTES)})
    for_clients = _FOR_CLIENTS | {endpoint.path for endpoint in endpoints if endpoint.for_clients}
    guard = _guard(context, for_clients)
    app = web.Application(client_max_size=context.config.http.max_payload_size, middlewares=[guard])
    for method, path, route in all_routes(endpoints):
        handler = functools.partial(route if forwarder is None else _forwarded(path, route, forwarder), context)
        if method == "GET":
            app.router.add_get(path, handler)  # and HEAD
        else:
            app.router.add_route(method, path, handler)

    async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["X-Request-Id"] = _request_id(request)

    app.on_response_prepare.append(echo_request_id)
    app.on_response_prepare.append(add_prompt_pages)
    logging.getLogger("aiohttp.server").addFilter(is_server_fault)
    document = functools.cache(lambda: api_document((*_ROUTES, *_ADMIN_ROUTES), endpoints, _OPEN_TO_ALL))

    async def openapi(request: web.Request) -> web.Response:
        return json_bytes(document())

    app.router.add_get("/openapi.json", openapi)
    storage = context.config.storage
    if storage.file_storage_path is not None and forwarder is None:
        batched = {path: route for method, path, route in _ROUTES if path in batch_routes.ENDPOINTS}
        batch_routes.add_storage(app, context, storage.file_storage_path, batched, storage.batch_concurrency)
    return app


def all_routes(endpoints: Iterable[Endpoint]) -> list[tuple[str, str, Route]]:
    """Method, path and handler of every endpoint; ``endpoints`` are those of commands."""
    return [*_ROUTES, *_ADMIN_ROUTES, *((method, endpoint.path, commands.route(endpoint))
                        for endpoint in endpoints for method in endpoint.methods)]


def _forwarded(path: str, route: Route, forwarder: Forwarder) -> Route:
    """The handler of a process that leaves state to another one."""
    async def forward(context: ServingContext, request: web.Request) -> web.StreamResponse:
        return await forwarder.forward(request)

    async def serve(context: ServingContext, request: web.Request) -> web.StreamResponse:
        assert marker is not None
        return await (forwarder.forward(request) if marker in await request.read() else route(context, request))

    if path not in _FOR_WORKERS:
        return forward
    return route if (marker := _FOR_WORKERS[path]) is None else serve


def _guard(context: ServingContext, for_clients: Set[str]) -> Any:
    """A middleware that checks the key, and turns every error into the API's error object."""
    http, in_flight, observe = context.config.http, context.in_flight, context.config.observe
    custom_labels = (observe.tokenizer_metrics_custom_labels_header if observe.tokenizer_metrics_allowed_custom_labels
                     else None)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if context.telemetry.traces is not None:
            TRACEPARENT.set(request.headers.get("traceparent"))
        if custom_labels is not None:
            CUSTOM_LABELS.set(request.headers.get(custom_labels))
        CLIENT.set(functools.partial(_client, request))
        task = asyncio.current_task()
        assert task is not None
        in_flight.begin(task, request)
        context.client_timeouts.on_head(request)
        try:
            _check_key(request, context.keys, for_clients)
            HEADER_SLO.set(slo_of_headers(request.headers))
            if context.role.switchable:
                asked = request.headers.get(ROLE_HEADER)
                REQUEST_ROLE.set(None if asked is None else check_role(asked, ROLE_HEADER))
            return await handler(request)
        except ServingError as error:
            return _failure(request, error)
        except web.HTTPException as error:
            return _http_error(request, error, http.max_payload_size)
        except SlowBody:
            return _failure(request, SlowRequest("The request's body did not arrive in time; see "
                                              "--client-body-timeout-secs."))
        except web.RequestPayloadError:
            return _failure(request, InvalidRequest("The request body does not match its headers: its encoding, or its "
                                                    "chunks, are malformed."))
        except asyncio.CancelledError:
            if not in_flight.cut or request.writer.output_size:
                raise  # the client left, or has a part of its answer
            return _failure(request, shut_down())
        except Exception as error:
            if isinstance(error, ConnectionError) and request.writer.output_size:
                raise  # the client left
            log.exception("%s %s failed", request.method, request.path)
            return _failure(request, ServingError("The server failed to handle the request; its log says why."))
        finally:
            in_flight.end(task)

    return guard


def _client(request: web.Request) -> str:
    """The hash of the API key (the key itself must not be logged), the address that a proxy names, or the peer's."""
    headers = request.headers
    key = headers.get("Authorization") or headers.get("x-api-key")
    if key:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()  # the same in each process
    return headers.get(SHOWN_ADDRESS) or request.remote or ""


def _check_key(request: web.Request, keys: ApiKeys, for_clients: Set[str]) -> None:
    """Checks the request's key for its route, however its path is written; raises Unauthorized."""
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else None
    if path in _OPEN_TO_ALL:
        return
    keys.check(request, admin=path is not None and path not in for_clients)


def _failure(request: web.Request, error: ServingError) -> web.Response:
    """The error in the form of the API that was called."""
    log_failure(error, request)
    anthropic = request.path.startswith(message_routes.PATH)
    return error_response(error, error_body(error) if anthropic else None)


def _http_error(request: web.Request, error: web.HTTPException, max_payload: int) -> web.Response:
    if isinstance(error, web.HTTPNotFound):
        return _failure(request, NotFound(f"There is no route {request.method} {request.path}."))
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        response = _failure(request, MethodNotAllowed(f"{request.path} takes {allowed}, not {request.method}."))
        response.headers["Allow"] = allowed
        return response
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return _failure(request, TooLarge("Payload Too Large: the request body is larger than --max-payload-size "
                                        f"({max_payload} bytes)."))
    failure = ServingError(f"{error.reason}.")
    failure.status = error.status
    return _failure(request, failure)


def _request_id(request: web.Request) -> str:
    """The client's id where it can be echoed safely, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if given and len(given) <= 256 and given.isascii() and given.isprintable() else uuid.uuid4().hex
