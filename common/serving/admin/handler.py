"""Routes that tell about the server or manage it."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Any

import msgspec
from aiohttp import web

from ...api.errors import DeadlineExceeded, EngineDead, InvalidRequest, PairMismatch, TransferFailed, WorkerUnavailable
from ...api.messages import Generate, State
from ...api.sampling import SamplingParams
from ...engine_client.dp_states import merge_states
from ...obs.about_page import POLICY, about
from ...obs.metrics import CONTENT_TYPE
from ...version import __version__
from ..context import ServingContext
from ..generation import Generation
from ..protocol.bootstrap import bootstrap_point
from ..protocol.decoding import BodyDecoder
from ..web import error_response, json_response

_STARTED = int(time.time())


_LINKS = {
    "/health": "whether it takes requests", "/v1/models": "the model that it serves",
    "/get_server_info": "its flags and its state", "/metrics": "Prometheus metrics",
    "/openapi.json": "every endpoint with its fields"}


async def root(front: ServingContext, request: web.Request) -> web.Response:
    """What this is, and where to go on."""
    role = "unified server" if front.config.mode == "null" else f"{front.config.mode} server"
    as_html = "text/html" in request.headers.get("Accept", "")
    body = about(f"This is a {role} of {front.config.model_name}. It speaks OpenAI's API.", _LINKS, as_html=as_html)
    headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": POLICY} if as_html else {
        "Content-Type": "application/json; charset=utf-8"}
    return web.Response(body=body, headers={**headers, "Vary": "Accept"})


async def health(front: ServingContext, request: web.Request) -> web.Response:
    """200 when requests are served; 503 with the reason while starting or stopping, and when a rank is dead."""
    if front.dead is not None:
        return error_response(EngineDead(front.dead), {"status": "dead", "message": front.dead})
    if front.stopping:
        return json_response({"status": "stopping"}, 503)
    if not front.is_ready:
        loading = front.loading
        progress = round(loading.fraction, 4)
        return json_response({"status": "starting", "stage": loading.stage, "progress": progress}, 503)
    return _ready(front)


def _ready(front: ServingContext) -> web.Response:
    """``epoch`` is another one after a restart, and after weights were loaded: what was learnt of the server is old."""
    return json_response({"status": "ready", "epoch": front.epoch})


async def health_generate(front: ServingContext, request: web.Request) -> web.Response:
    """Health, shown by generating a token.

    One half of a disaggregated pair generates nothing alone, and neither does a server that is paused: there this is
    ``/health``.
    """
    if front.config.mode != "null" or front.client.paused:
        return await health(front, request)
    tokenizer = front.serving_tokenizer()
    probe = Generate(rid=f"health-{time.monotonic_ns()}", input_ids=[0],
                     sampling=SamplingParams(max_new_tokens=1, temperature=0.0), deadline=20.0)
    with Generation(front.client, tokenizer, front.metrics, [probe], time.monotonic()) as generation:
        await generation.complete()
    return _ready(front)


async def models(front: ServingContext, request: web.Request) -> web.Response:
    """The model that is served, as a list."""
    return json_response({"object": "list", "data": [_model(front)]})


async def model(front: ServingContext, request: web.Request) -> web.Response:
    """One model's entry; raises NotFound for one that is not served."""
    front.check_model(request.match_info["model"])
    return json_response(_model(front))


def _model(front: ServingContext) -> dict[str, Any]:
    """``max_model_len``: prompt and output together, in tokens; while weights load, what the model itself allows."""
    return {"id": front.config.model_name, "object": "model", "created": _STARTED, "owned_by": "baton",
            "root": front.config.model.model_path, "parent": None,
            "max_model_len": front.model.context_length if front.ready is None else front.token_limit}


async def model_info(front: ServingContext, request: web.Request) -> web.Response:
    args = front.config.model
    return json_response({
        "model_path": front.weights_path, "tokenizer_path": args.tokenizer_path or args.model_path,
        "is_generation": not args.is_embedding,
        "served_model_name": front.config.model_name, "architecture": front.model.architecture,
        "context_length": front.model.context_length, "vocab_size": front.model.vocab_size})


async def server_info(front: ServingContext, request: web.Request) -> web.Response:
    """The configuration, flat, with the engine's state once there is one."""
    info: dict[str, Any] = {}
    for section in dataclasses.fields(front.config):
        info.update(dataclasses.asdict(getattr(front.config, section.name)))
    info["api_key"] = info["admin_api_key"] = info["cluster_secret"] = None  # secrets
    info.update(version=__version__, status="ready" if front.is_ready else "not ready",
                served_model_name=front.config.model_name, stream_continuation=True, paused=front.client.paused,
                epoch=front.epoch)
    if front.ready is not None:
        info.update(max_total_num_tokens=front.ready.max_total_tokens, max_req_input_len=front.ready.max_request_tokens,
                    pair_key=front.ready.pair_key)
        if (identity := front.ready.model) is not None:
            info.update(model_fingerprint=identity.fingerprint, weight_updates=identity.updates)
    info["internal_states"] = [{name: value for name, value in msgspec.to_builtins(state).items()
                                if name not in ("seq", "type", "model", "pair_key")} for state in await _states(front)]
    if not info["internal_states"]:
        del info["internal_states"]
    return json_response(info)


async def load(front: ServingContext, request: web.Request) -> web.Response:
    """SGLang's load report: requests, and tokens of the KV pool that a new request could not have, of each
    data-parallel rank."""
    return json_response([_load_of(state) for state in await front.client.states()])


def _load_of(state: State) -> dict[str, Any]:
    total = state.total_pages * state.page_size
    return {
        "dp_rank": state.dp_rank, "num_reqs": state.num_running + state.num_waiting + state.num_transferring,
        "num_waiting_reqs": state.num_waiting, "num_tokens": round(state.gauges["token_usage"] * total),
        "max_total_num_tokens": total}


async def _states(front: ServingContext) -> list[State]:
    """A snapshot of each data-parallel rank; none while the engine cannot give them."""
    if front.ready is None or front.dead is not None:
        return []
    try:
        return await front.client.states()
    except WorkerUnavailable:
        return []


class PrefillAddress(msgspec.Struct):
    bootstrap_host: str
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


_prefill = BodyDecoder(PrefillAddress)
_CONNECT_SECONDS = 8.0


async def connect_prefill(front: ServingContext, request: web.Request) -> web.Response:
    """Connect a decode server to a prefill server ahead of requests: ``fits`` is true, false with the reason why no
    cache can ever be handed over, or null with the reason why that is not known yet."""
    body = _prefill.decode(await request.read())
    front.serving_tokenizer()
    front.check_not_changing()
    point = bootstrap_point(body.bootstrap_host, body.bootstrap_port)
    began = time.monotonic()
    fits: bool | None = True
    message: str | None = None
    try:
        await front.client.connect_peer(*point, _CONNECT_SECONDS)
    except PairMismatch as error:
        fits, message = False, error.message
    except (TransferFailed, DeadlineExceeded, WorkerUnavailable) as error:
        fits, message = None, error.message
    return json_response({"fits": fits, "message": message, "seconds": round(time.monotonic() - began, 3)})


class AbortRequest(msgspec.Struct):
    rid: str | None = None
    abort_all: bool | None = None


_abort = BodyDecoder(AbortRequest)


async def abort_request(front: ServingContext, request: web.Request) -> web.Response:
    """End one request (all choices of it) or all; those that wait get the tokens so far, with the finish reason
    "abort". An unknown id is fine."""
    body = _abort.decode(await request.read())
    if body.abort_all:
        front.keys.check(request, admin=True)  # others' requests are among them
        front.client.abort("")
    elif body.rid:
        front.client.abort_group(body.rid)
    else:
        raise InvalidRequest("Give a rid, or abort_all.", param="rid")
    return json_response({"success": True})


async def metrics(front: ServingContext, request: web.Request) -> web.Response:
    states = await _states(front)
    body = front.metrics.render(merge_states(states) if states else None)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
