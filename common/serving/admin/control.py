"""Handlers that change the engine as a whole. With --admin-api-key they take that key alone."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import msgspec
from aiohttp import web

from ...api.commands import (
    Command,
    FlushCache,
    MemoryKind,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    SetLimits,
    StartProfile,
    StopProfile,
    UpdateWeights,
)
from ...api.errors import Conflict, InvalidRequest
from ..context.serving_context import ServingContext
from ..protocol.decoding import BodyDecoder
from ..web import json_response
from .schema import DumpRequest, InternalStateRequest, MemoryRequest, PauseRequest, ProfileRequest, UpdateWeightsRequest

LOAD_SECONDS = 1800.0
_ABORT_GRACE_SECONDS = 10.0  # aborted requests free their pages once their peers have answered


_update, _memory = BodyDecoder(UpdateWeightsRequest), BodyDecoder(MemoryRequest)
_profile, _internal_state = BodyDecoder(ProfileRequest), BodyDecoder(InternalStateRequest)
_dump, _pause = BodyDecoder(DumpRequest), BodyDecoder(PauseRequest)


async def _body(request: web.Request) -> bytes:
    """The request's body; an empty one means defaults."""
    return await request.read() or b"{}"


async def _execute(context: ServingContext, command: Command, timeout: float = 60.0) -> web.Response:
    context.status.check_serving()
    return json_response({"success": True, "message": await context.client.control(command, timeout)})


async def flush_cache(context: ServingContext, request: web.Request) -> web.Response:
    """Drops the prefix cache; 409 while requests run."""
    return await _execute(context, FlushCache())


async def update_weights_from_disk(context: ServingContext, request: web.Request) -> web.Response:
    """Loads another checkpoint of the same architecture; 400 where it does not fit, 409 while requests run."""
    body = _update.decode(await _body(request))
    command = UpdateWeights(body.model_path, body.revision)
    if body.abort_all_requests:
        context.client.abort("")
    async with context.status.weights_lock:
        deadline = asyncio.get_running_loop().time() + (_ABORT_GRACE_SECONDS if body.abort_all_requests else 0.0)
        while True:
            try:
                response = await _execute(context, command, LOAD_SECONDS)
                await _refresh_identity(context)
                break
            except Conflict:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(0.05)
    context.model.weights_path = body.model_path
    return response


async def _refresh_identity(context: ServingContext) -> None:
    """Reads which weights the engine has now."""
    state = await context.client.state()
    assert context.status.ready is not None
    context.status.ready = msgspec.structs.replace(context.status.ready, model=state.model, pair_key=state.pair_key)


async def release_memory_occupation(context: ServingContext, request: web.Request) -> web.Response:
    """Releases the device memory of weights and KV pool, or of ``tags``; 409 while requests run."""
    return await _execute(context, ReleaseMemory(await _kinds(context, request)))


async def resume_memory_occupation(context: ServingContext, request: web.Request) -> web.Response:
    return await _execute(context, ResumeMemory(await _kinds(context, request)), LOAD_SECONDS)


async def _kinds(context: ServingContext, request: web.Request) -> tuple[MemoryKind, ...]:
    kinds = _memory.decode(await _body(request)).tags
    if kinds is not None:
        return kinds
    return ("weights", "kv_cache") if context.config.mode == "null" else ("weights",)


async def pause_generation(context: ServingContext, request: web.Request) -> web.Response:
    """Pauses generation until ``/continue_generation``; new requests wait. Running ones end ("abort", the default), are
    retracted ("retract"), or keep their pages ("in_place")."""
    context.status.check_serving()
    message = await context.client.pause(_pause.decode(await _body(request)).mode or "abort")
    return json_response({"success": True, "status": "ok", "message": message})


async def continue_generation(context: ServingContext, request: web.Request) -> web.Response:
    """Resumes generation after ``/pause_generation``."""
    context.status.check_serving()
    return json_response({"success": True, "status": "ok", "message": await context.client.resume()})


async def start_profile(context: ServingContext, request: web.Request) -> web.Response:
    body = _profile.decode(await _body(request))
    folder = body.output_dir or tempfile.gettempdir()
    return await _execute(context, StartProfile(
        folder, body.num_steps, body.activities or ("CPU", "GPU"), bool(body.with_stack), bool(body.record_shapes)))


async def stop_profile(context: ServingContext, request: web.Request) -> web.Response:
    return await _execute(context, StopProfile(), LOAD_SECONDS)


async def start_expert_distribution_record(context: ServingContext, request: web.Request) -> web.Response:
    """Counts the tokens of every expert from now on; 400 without --expert-distribution-recorder-mode."""
    return await _execute(context, RecordExperts("start"))


async def stop_expert_distribution_record(context: ServingContext, request: web.Request) -> web.Response:
    return await _execute(context, RecordExperts("stop"))


async def dump_expert_distribution_record(context: ServingContext, request: web.Request) -> web.Response:
    """Writes the current or last recording as JSON; the answer's message is the file's path."""
    folder = _dump.decode(await _body(request)).output_dir
    return await _execute(context, RecordExperts("dump", folder or tempfile.gettempdir()))


async def set_internal_state(context: ServingContext, request: web.Request) -> web.Response:
    """Changes limits of the scheduler while it runs."""
    limits: dict[str, Any] = msgspec.structs.asdict(_internal_state.decode(await _body(request)).server_args)
    if all(value is None for value in limits.values()):
        raise InvalidRequest(f"server_args must hold one of {', '.join(limits)}.", param="server_args")
    return await _execute(context, SetLimits(**limits))
