"""The OpenAPI document of a server, built from its routes and the structs that they decode and encode."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from ..commands.base import Endpoint
from ..version import __version__
from .admin import schema as admin
from .chat import parsing_schema as parsing
from .chat import schema as chat
from .completions import schema as completions
from .embeddings import schema as embeddings
from .messages import schema as messages
from .native import schema as native
from .protocol.encoding import encode
from .responses import schema as responses
from .sessions import schema as sessions
from .storage import batch_schema as batches
from .storage import file_schema as files
from .tokens import schema as tokens

Route = tuple[str, str, Callable[..., Awaitable[web.StreamResponse]]]
"""Method, path as aiohttp writes it, handler."""


class ErrorDetails(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """OpenAI's error object, and SGLang's fields beside it: ``code`` is the HTTP status."""

    error: ErrorDetails
    message: str
    type: str
    param: str | None
    code: int
    object: str = "error"


class _Shape(NamedTuple):
    """The JSON types of a route's request and response; ``chunk``: the type of its stream's events, if it streams.

    ``optional``: an empty body means defaults. ``query``: parameters of the URL.
    """

    request: Any = None
    response: Any = None
    chunk: Any = None
    optional: bool = False
    query: tuple[str, ...] = ()


_PAGE = ("limit", "after", "order")
_SHAPES: dict[str, _Shape] = {
    **dict.fromkeys(("POST /v1/chat/completions", "POST /invocations"),
                    _Shape(chat.ChatRequest, chat.ChatCompletion, chat.ChatChunk)),
    "POST /v1/completions": _Shape(completions.CompletionRequest, completions.Completion, completions.Completion),
    "POST /v1/responses": _Shape(responses.ResponseRequest, responses.ResponseObject, dict[str, Any]),
    "GET /v1/responses/{response_id}": _Shape(response=responses.ResponseObject, query=("stream", "starting_after")),
    "DELETE /v1/responses/{response_id}": _Shape(response=responses.ResponseDeleted),
    "POST /v1/responses/{response_id}/cancel": _Shape(response=responses.ResponseObject),
    "GET /v1/responses/{response_id}/input_items": _Shape(response=dict[str, Any], query=_PAGE),
    "GET /v1/responses/{response_id}/conversation": _Shape(response=dict[str, Any]),
    "POST /v1/messages": _Shape(messages.MessagesRequest, messages.AnswerMessage, dict[str, Any]),
    "POST /v1/messages/count_tokens": _Shape(messages.Conversation, messages.TokenCount),
    **dict.fromkeys(("POST /generate", "PUT /generate"), _Shape(
        native.GenerateRequest, native.GenerateAnswer | list[native.GenerateAnswer], native.GenerateAnswer)),
    "POST /vertex_generate": _Shape(native.VertexRequest, dict[str, list[native.GenerateAnswer]]),
    "POST /generate_from_file": _Shape(response=native.GenerateAnswer | list[native.GenerateAnswer]),
    "POST /v1/embeddings": _Shape(embeddings.EmbeddingRequest, embeddings.EmbeddingAnswer),
    **dict.fromkeys(("POST /encode", "PUT /encode", "POST /classify", "PUT /classify"),
                    _Shape(embeddings.EncodeRequest, embeddings.EncodeAnswer | list[embeddings.EncodeAnswer])),
    "POST /v1/classify": _Shape(embeddings.ClassifyRequest, embeddings.ClassifyAnswer),
    **dict.fromkeys(("POST /v1/rerank", "PUT /v1/rerank", "POST /rerank"),
                    _Shape(embeddings.RerankRequest, list[embeddings.RankedDocument])),
    **dict.fromkeys(("POST /v1/score", "POST /score"), _Shape(embeddings.ScoreRequest, embeddings.ScoreAnswer)),
    **dict.fromkeys(("POST /v1/tokenize", "POST /tokenize"),
                    _Shape(tokens.TokenizeRequest, tokens.TokenizeAnswer)),
    **dict.fromkeys(("POST /v1/detokenize", "POST /detokenize"),
                    _Shape(tokens.DetokenizeRequest, tokens.DetokenizeAnswer)),
    "POST /v1/files": _Shape(response=files.FileObject),
    "GET /v1/files": _Shape(response=files.Page[files.FileObject], query=(*_PAGE, "purpose")),
    "GET /v1/files/{file_id}": _Shape(response=files.FileObject),
    "DELETE /v1/files/{file_id}": _Shape(response=files.FileDeleted),
    "POST /v1/batches": _Shape(batches.CreateBatch, batches.Batch),
    "GET /v1/batches": _Shape(response=files.Page[batches.Batch], query=_PAGE),
    "GET /v1/batches/{batch_id}": _Shape(response=batches.Batch),
    "POST /v1/batches/{batch_id}/cancel": _Shape(response=batches.Batch),
    **dict.fromkeys(("POST /parse_function_call", "POST /function_call"),
                    _Shape(parsing.ParseRequest, parsing.ParseAnswer)),
    "POST /separate_reasoning": _Shape(parsing.SeparateRequest, parsing.SeparateAnswer),
    **dict.fromkeys(("POST /open_session", "GET /open_session"), _Shape(sessions.OpenSessionRequest, str)),
    **dict.fromkeys(("POST /close_session", "GET /close_session"), _Shape(sessions.CloseSessionRequest)),
    **dict.fromkeys(("POST /get_memory_pool_size", "GET /get_memory_pool_size"), _Shape(response=int)),
    "POST /abort_request": _Shape(admin.AbortRequest),
    "POST /update_weight_version": _Shape(admin.WeightVersion),
    **dict.fromkeys(("POST /configure_logging", "GET /configure_logging"), _Shape(admin.LoggingRequest)),
    "POST /connect_prefill": _Shape(admin.PrefillAddress),
}
_QUERY_SCHEMAS: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1}, "order": {"enum": ["asc", "desc"]}}


_FILE = {"type": "string", "format": "binary"}
_FORMS: dict[str, dict[str, Any]] = {
    "/generate_from_file": {"type": "object", "required": ["file"], "properties": {"file": _FILE}},
    "/v1/files": {"type": "object", "required": ["purpose", "file"], "properties": {
        "purpose": {"enum": list(files.PURPOSES)}, "file": _FILE,
        "expires_after[anchor]": {"enum": ["created_at"]}, "expires_after[seconds]": {"type": "integer"}}},
}


_REF = "#/components/schemas/"
_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")


def api_document(routes: Iterable[Route], endpoints: Iterable[Endpoint], open_paths: Iterable[str]) -> bytes:
    """The OpenAPI 3.1 document as JSON. ``endpoints`` are those of commands; ``open_paths`` need no key."""
    operations: list[tuple[str, str, Callable[..., Any], _Shape]] = [
        (method, path, handler, _SHAPES.get(f"{method} {_template(path)}", _Shape()))
        for method, path, handler in routes]
    operations += [(method, endpoint.path, endpoint.serve, _Shape(endpoint.body, optional=not endpoint.requires_body))
                   for endpoint in endpoints for method in endpoint.methods]
    kinds = {kind: None for *_, shape in operations for kind in (shape.request, shape.response, shape.chunk) if kind}
    kinds |= dict.fromkeys((ErrorBody, messages.MessagesError))
    kind_schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF + "{name}")
    schemas = dict(zip(kinds, kind_schemas))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler, shape in operations:
        operation = _operation(method, path, handler, shape, schemas, path in open_paths)
        paths.setdefault(_template(path), {})[method.lower()] = operation
    return encode(_renamed({
        "openapi": "3.1.0", "info": {"title": "Baton", "version": __version__}, "paths": paths,
        "security": [{"bearer": []}, {"header": []}],
        "components": {"schemas": {_clean(name): schema for name, schema in components.items()}, "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}}}}))


def _operation(method: str, path: str, handler: Callable[..., Any], shape: _Shape, schemas: dict[Any, Any],
               is_open: bool) -> dict[str, Any]:
    error = messages.MessagesError if path.startswith("/v1/messages") else ErrorBody
    content = {"application/json": {"schema": schemas[shape.response] if shape.response else {}}}
    if shape.chunk is not None:
        content["text/event-stream"] = {"schema": schemas[shape.chunk]}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"[^A-Za-z0-9]+", "_", f"{method.lower()}{_template(path)}").strip("_"),
        "summary": _summary(handler),
        "responses": {"200": {"description": "The answer.", "content": content},
                      "default": {"description": "An error.",
                                  "content": {"application/json": {"schema": schemas[error]}}}}}
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                  for name in _PARAMETER.findall(path)]
    parameters += [{"name": name, "in": "query", "schema": _QUERY_SCHEMAS.get(name, {"type": "string"})}
                   for name in shape.query]
    if parameters:
        operation["parameters"] = parameters
    if shape.request is not None:
        operation["requestBody"] = {"required": not shape.optional,
                                    "content": {"application/json": {"schema": schemas[shape.request]}}}
    elif path in _FORMS and method == "POST":
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FORMS[path]}}}
    if is_open:
        operation["security"] = []
    return operation


def _template(path: str) -> str:
    """A path without the patterns of aiohttp's parameters."""
    return _PARAMETER.sub(r"{\1}", path)


def _summary(handler: Callable[..., Any]) -> str:
    """The first sentence of a handler's docstring, else its name."""
    text = handler.__doc__ or handler.__name__.replace("_", " ").capitalize() + "."
    return " ".join(re.split(r"(?<=\.)\s|\n\n", text.strip(), maxsplit=1)[0].split())


def _renamed(value: Any) -> Any:
    """The value with schema names that OpenAPI allows."""
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _REF + _clean(item[len(_REF):]) if key == "$ref" and isinstance(item, str) else _renamed(item)
            for key, item in value.items()}


def _clean(name: str) -> str:
    """A schema name that OpenAPI allows."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("_")
