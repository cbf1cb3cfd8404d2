"""Handlers that report on the server, and those that manage requests and connections."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec
from aiohttp import web

from ...api.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    PairMismatch,
    TransferFailed,
    WorkerUnavailable,
)
from ...api.messages import Generate, State
from ...api.sampling import SamplingParams
from ...obs.about_page import POLICY, about
from ...obs.metrics import CONTENT_TYPE
from ...version import __version__
from ..context.generation import Generation
from ..context.serving_context import ServingContext
from ..protocol.bootstrap import bootstrap_point
from ..protocol.decoding import BodyDecoder
from ..web import error_response, json_response
from .schema import LOGGING_REFUSED, AbortRequest, LoggingRequest, PrefillAddress, WeightVersion

_STARTED = int(time.time())


_LINKS = {
    "/health": "whether it takes requests", "/v1/models": "the model that it serves",
    "/get_server_info": "its flags and its state", "/metrics": "Prometheus metrics",
    "/openapi.json": "every endpoint with its fields"}


async def root(context: ServingContext, request: web.Request) -> web.Response:
    """Names this server and links to its main endpoints."""
    as_html = "text/html" in request.headers.get("Accept", "")
    body = about(f"This is a {context.role.facts.label} server of {context.model.name}. It speaks OpenAI's API.",
                 _LINKS, as_html=as_html)
    headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": POLICY} if as_html else {
        "Content-Type": "application/json; charset=utf-8"}
    return web.Response(body=body, headers={**headers, "Vary": "Accept"})


async def health(context: ServingContext, request: web.Request) -> web.Response:
    """200 when requests are served; 503 with the reason while starting or stopping, and when a rank is dead."""
    if context.status.dead is not None:
        return error_response(EngineDead(context.status.dead), {"status": "dead", "message": context.status.dead})
    if context.status.stopping:
        return json_response({"status": "stopping"}, 503)
    if not context.status.is_ready:
        loading = context.status.loading
        progress = round(loading.fraction, 4)
        return json_response({"status": "starting", "stage": loading.stage, "progress": progress}, 503)
    if context.status.awaits_weights:
        return json_response({"status": "starting", "stage": "waiting for weights", "progress": 1.0}, 503)
    return _ready(context)


def _ready(context: ServingContext) -> web.Response:
    """``epoch`` changes with a restart, and when weights are loaded: facts learnt of the server before are stale."""
    return json_response({"status": "ready", "epoch": context.status.epoch})


async def health_generate(context: ServingContext, request: web.Request) -> web.Response:
    """Health, checked by generating a token.

    A prefill or decode server generates nothing alone, and neither does a server that is paused: there this is
    ``/health``.
    """
    if not context.role.facts.serves_alone or context.client.paused or context.status.awaits_weights:
        return await health(context, request)
    tokenizer = context.status.serving_tokenizer()
    probe = Generate(rid=f"health-{time.monotonic_ns()}", input_ids=[0],
                     sampling=SamplingParams(max_new_tokens=1, temperature=0.0), deadline=20.0)
    with Generation(context.client, tokenizer, context.telemetry.metrics, [probe], time.monotonic()) as generation:
        await generation.complete()
    return _ready(context)


async def models(context: ServingContext, request: web.Request) -> web.Response:
    """The model that is served, as a list; raises WorkerUnavailable before: clients wait for this answer."""
    context.status.check_serving()
    return json_response({"object": "list", "data": [_model(context)]})


async def model(context: ServingContext, request: web.Request) -> web.Response:
    """One model's entry; raises NotFound for one that is not served, WorkerUnavailable as ``models``."""
    context.status.check_serving()
    context.model.check_name(request.match_info["model"])
    return json_response(_model(context))


def _model(context: ServingContext) -> dict[str, Any]:
    """``max_model_len``: prompt and output together, in tokens."""
    return {"id": context.model.name, "object": "model", "created": _STARTED, "owned_by": "baton",
            "root": context.config.model.model_path, "parent": None,
            "max_model_len": context.planner.token_limit}


async def model_info(context: ServingContext, request: web.Request) -> web.Response:
    args = context.config.model
    return json_response({
        "model_path": context.model.weights_path, "tokenizer_path": args.tokenizer_path or args.model_path,
        "is_generation": not args.is_embedding, "weight_version": context.model.weight_version,
        "preferred_sampling_params": context.config.answers.preferred_sampling_params,
        "served_model_name": context.model.name, "architecture": context.model.spec.architecture,
        "context_length": context.model.spec.context_length, "vocab_size": context.model.spec.vocab_size})


async def weight_version(context: ServingContext, request: web.Request) -> web.Response:
    """The name of the weights: the last one that was given with them, or --weight-version."""
    return json_response({"weight_version": context.model.weight_version})


_version = BodyDecoder(WeightVersion)


async def update_weight_version(context: ServingContext, request: web.Request) -> web.Response:
    """Names the weights anew, in the answers that begin from now on; ``abort_all_requests`` (true) aborts the requests
    that run."""
    body = _version.decode(await request.read())
    if body.abort_all_requests:
        context.client.abort("")
    context.model.weight_version = body.new_version
    return json_response({"success": True, "message": f"The weights are called {body.new_version}.",
                          "new_version": body.new_version})


_logging = BodyDecoder(LoggingRequest, LOGGING_REFUSED)


async def configure_logging(context: ServingContext, request: web.Request) -> web.Response:
    """Changes --log-requests, its level and format, and --crash-dump-folder while the server runs."""
    body, requests = _logging.decode(await request.read()), context.telemetry.request_log
    level = next(each for each in (body.log_requests_level, requests.level, context.config.observe.log_requests_level)
                 if each is not None)
    enabled = requests.level is not None if body.log_requests is None else body.log_requests
    try:
        requests.configure(level if enabled else None, body.crash_dump_folder,
                           None if body.log_requests_format is None else body.log_requests_format == "text")
    except ConfigError as error:
        raise InvalidRequest(str(error), param="crash_dump_folder") from None
    message = f"Requests are logged at level {level}." if enabled else "Requests are not logged."
    return json_response({"success": True, "message": message})


async def server_info(context: ServingContext, request: web.Request) -> web.Response:
    """The flat configuration, with the engine's state once the engine is ready."""
    return json_response(await server_facts(context))


async def server_facts(context: ServingContext) -> dict[str, Any]:
    """The answer of ``/get_server_info``."""
    info: dict[str, Any] = {}
    for section in dataclasses.fields(context.config):
        info.update(dataclasses.asdict(getattr(context.config, section.name)))
    info["disaggregation_mode"] = context.role.name
    info["weight_version"] = context.model.weight_version
    for secret in ("api_key", "admin_api_key", "cluster_secret", "ssl_keyfile_password"):
        info[secret] = None
    info.update(version=__version__, status="ready" if context.status.is_ready else "not ready",
                served_model_name=context.model.name, stream_continuation=True, paused=context.client.paused,
                staging_weights=context.status.staging_weights, epoch=context.status.epoch,
                response_tag=context.response_store.tag if context.response_store.enabled else None)
    if (ready := context.status.ready) is not None:
        info.update(max_total_num_tokens=ready.max_total_tokens, max_req_input_len=ready.max_request_tokens,
                    pair_key=ready.pair_key)
        if (identity := ready.model) is not None:
            info.update(model_fingerprint=identity.fingerprint, weight_updates=identity.updates)
    if states := await _states(context):
        info["internal_states"] = [{name: value for name, value in msgspec.to_builtins(state).items()
                                    if name not in ("seq", "type", "model", "pair_key")} for state in states]
    return info


async def memory_pool_size(context: ServingContext, request: web.Request) -> web.Response:
    """The tokens that the KV pool holds, a JSON number; 503 while the server starts."""
    return json_response(_pool_tokens(context))


async def max_total_num_tokens(context: ServingContext, request: web.Request) -> web.Response:
    """The tokens that the KV pool holds, as an object; 503 while the server starts."""
    return json_response({"max_total_num_tokens": _pool_tokens(context)})


def _pool_tokens(context: ServingContext) -> int:
    context.status.check_serving()
    assert context.status.ready is not None
    return context.status.ready.max_total_tokens


async def load(context: ServingContext, request: web.Request) -> web.Response:
    """SGLang's load report for each data-parallel rank: requests, and tokens of the KV pool that are in use; and what
    loading a page of the tiers costs, as a share of computing it."""
    return json_response([_load_of(state) for state in await context.client.states()])


async def loads(context: ServingContext, request: web.Request) -> web.Response:
    """The load of each data-parallel rank in the form of SGLang's newer versions, and the sum."""
    ranks, now = [], time.time()
    for state in await context.client.states():
        report = _load_of(state)
        running, total = report["num_reqs"] - report["num_waiting_reqs"], report["max_total_num_tokens"]
        ranks.append({"dp_rank": state.dp_rank, "timestamp": now, "num_running_reqs": running,
                      "num_waiting_reqs": report["num_waiting_reqs"], "num_total_reqs": report["num_reqs"],
                      "num_used_tokens": report["num_tokens"], "max_total_num_tokens": total,
                      "token_usage": state.gauges["token_usage"],
                      "max_running_requests": context.config.schedule.max_running_requests})
    summed = {f"total_{name}": sum(rank[f"num_{name}"] for rank in ranks) for name in ("running_reqs", "waiting_reqs")}
    summed["total_reqs"] = sum(summed.values())
    usage = sum(rank["token_usage"] for rank in ranks) / len(ranks)
    return json_response({"timestamp": now, "version": __version__, "dp_rank_count": len(ranks), "loads": ranks,
                          "aggregate": {**summed, "avg_token_usage": usage}})


def _load_of(state: State) -> dict[str, Any]:
    total = state.total_pages * state.page_size
    return {
        "dp_rank": state.dp_rank, "num_reqs": state.num_running + state.num_waiting + state.num_transferring,
        "num_waiting_reqs": state.num_waiting, "num_tokens": round(state.gauges["token_usage"] * total),
        "max_total_num_tokens": total,
        **{name.removeprefix("tier_"): state.gauges[name]
           for name in ("tier_host_page_cost", "tier_storage_page_cost") if name in state.gauges}}


async def _states(context: ServingContext) -> list[State]:
    """A snapshot of each data-parallel rank; empty while the engine cannot give them."""
    if context.status.ready is None or context.status.dead is not None:
        return []
    try:
        return await context.client.states()
    except WorkerUnavailable:
        return []


_prefill = BodyDecoder(PrefillAddress)
_CONNECT_SECONDS = 8.0


async def connect_prefill(context: ServingContext, request: web.Request) -> web.Response:
    """Connects a decode server to a prefill server ahead of requests. ``fits`` is true; false, with the reason why no
    KV cache can ever be transferred; or null, with the reason why that is not known yet."""
    body = _prefill.decode(await request.read())
    context.status.check_serving()
    context.status.check_weights_stable()
    point = bootstrap_point(body.bootstrap_host, body.bootstrap_port)
    began = time.monotonic()
    fits: bool | None = True
    message: str | None = None
    try:
        await context.client.connect_peer(*point, _CONNECT_SECONDS)
    except PairMismatch as error:
        fits, message = False, error.message
    except (TransferFailed, DeadlineExceeded, WorkerUnavailable) as error:
        fits, message = None, error.message
    return json_response({"fits": fits, "message": message, "seconds": round(time.monotonic() - began, 3)})


_abort = BodyDecoder(AbortRequest)


async def abort_request(context: ServingContext, request: web.Request) -> web.Response:
    """Aborts one request (all choices of it) or all; their clients get the tokens so far, with the finish reason
    "abort". An unknown id is fine."""
    body = _abort.decode(await request.read())
    if body.abort_all:
        context.keys.check(request, admin=True)  # others' requests are among them
        context.client.abort("")
    elif body.rid:
        context.client.abort_group(body.rid)
    else:
        raise InvalidRequest("Give a rid, or abort_all.", param="rid")
    return json_response({"success": True})


async def metrics(context: ServingContext, request: web.Request) -> web.Response:
    states = await _states(context)
    if context.telemetry.collect_others is not None:
        await context.telemetry.collect_others()
    body = context.telemetry.metrics.render(states)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
