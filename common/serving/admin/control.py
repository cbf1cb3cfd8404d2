"""Routes that change the engine as a whole. With --admin-api-key they take that key alone."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import msgspec
from aiohttp import web

from ...api.commands import (
    Activity,
    Command,
    FlushCache,
    MemoryKind,
    PauseMode,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    SetLimits,
    StartProfile,
    StopProfile,
    UpdateWeights,
)
from ...api.errors import Conflict, InvalidRequest
from ...api.wire import Int32
from ..context import ServingContext
from ..protocol.decoding import BodyDecoder
from ..web import json_response

LOAD_SECONDS = 1800.0
_ABORTED_SECONDS = 10.0  # aborted requests let go of their pages once their peers have answered


class _Update(msgspec.Struct):
    model_path: str
    revision: str | None = None
    abort_all_requests: bool | None = None


class _Memory(msgspec.Struct):
    tags: tuple[MemoryKind, ...] | None = None


class _Pause(msgspec.Struct):
    mode: PauseMode | None = None


class _Profile(msgspec.Struct):
    output_dir: str | None = None
    num_steps: Int32 | None = None
    activities: tuple[Activity, ...] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None


class _Dump(msgspec.Struct):
    output_dir: str | None = None


class _Limits(msgspec.Struct, forbid_unknown_fields=True):
    max_running_requests: Int32 | None = None
    chunked_prefill_size: Int32 | None = None
    schedule_policy: str | None = None


class _InternalState(msgspec.Struct):
    server_args: _Limits


_update, _memory = BodyDecoder(_Update), BodyDecoder(_Memory)
_profile, _internal_state = BodyDecoder(_Profile), BodyDecoder(_InternalState)
_dump, _pause = BodyDecoder(_Dump), BodyDecoder(_Pause)


async def _body(request: web.Request) -> bytes:
    """The request's body; none at all asks for defaults."""
    return await request.read() or b"{}"


async def _carry_out(front: ServingContext, command: Command, timeout: float = 60.0) -> web.Response:
    front.serving_tokenizer()
    return json_response({"success": True, "message": await front.client.control(command, timeout)})


async def flush_cache(front: ServingContext, request: web.Request) -> web.Response:
    """Drop the prefix cache; 409 while requests run."""
    return await _carry_out(front, FlushCache())


async def update_weights_from_disk(front: ServingContext, request: web.Request) -> web.Response:
    """Serve another checkpoint of the same architecture; 400 where it does not fit, 409 while requests run."""
    body = _update.decode(await _body(request))
    command = UpdateWeights(body.model_path, body.revision)
    if body.abort_all_requests:
        front.client.abort("")
    async with front.changing:
        deadline = asyncio.get_running_loop().time() + (_ABORTED_SECONDS if body.abort_all_requests else 0.0)
        while True:
            try:
                response = await _carry_out(front, command, LOAD_SECONDS)
                await _learn(front)
                break
            except Conflict:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(0.05)
    front.weights_path = body.model_path
    return response


async def _learn(front: ServingContext) -> None:
    """Which weights the engine has now."""
    state = await front.client.state()
    assert front.ready is not None
    front.ready = msgspec.structs.replace(front.ready, model=state.model, pair_key=state.pair_key)


async def release_memory_occupation(front: ServingContext, request: web.Request) -> web.Response:
    """Give back the device memory of weights and KV pool, or of what ``tags`` names; 409 while requests run."""
    return await _carry_out(front, ReleaseMemory(await _kinds(front, request)))


async def resume_memory_occupation(front: ServingContext, request: web.Request) -> web.Response:
    return await _carry_out(front, ResumeMemory(await _kinds(front, request)), LOAD_SECONDS)


async def _kinds(front: ServingContext, request: web.Request) -> tuple[MemoryKind, ...]:
    kinds = _memory.decode(await _body(request)).tags
    if kinds is not None:
        return kinds
    return ("weights", "kv_cache") if front.config.mode == "null" else ("weights",)


async def pause_generation(front: ServingContext, request: web.Request) -> web.Response:
    """Stand still until ``/continue_generation``; requests that come meanwhile wait. The running ones end ("abort", the
    default), give their pages back ("retract"), or keep them ("in_place")."""
    front.serving_tokenizer()
    message = await front.client.pause(_pause.decode(await _body(request)).mode or "abort")
    return json_response({"success": True, "status": "ok", "message": message})


async def continue_generation(front: ServingContext, request: web.Request) -> web.Response:
    """Go on after ``/pause_generation``."""
    front.serving_tokenizer()
    return json_response({"success": True, "status": "ok", "message": await front.client.resume()})


async def start_profile(front: ServingContext, request: web.Request) -> web.Response:
    body = _profile.decode(await _body(request))
    folder = body.output_dir or tempfile.gettempdir()
    return await _carry_out(front, StartProfile(
        folder, body.num_steps, body.activities or ("CPU", "GPU"), bool(body.with_stack), bool(body.record_shapes)))


async def stop_profile(front: ServingContext, request: web.Request) -> web.Response:
    return await _carry_out(front, StopProfile(), LOAD_SECONDS)


async def start_expert_distribution_record(front: ServingContext, request: web.Request) -> web.Response:
    """Count the tokens of every expert from now on; 400 without --expert-distribution-recorder-mode."""
    return await _carry_out(front, RecordExperts("start"))


async def stop_expert_distribution_record(front: ServingContext, request: web.Request) -> web.Response:
    return await _carry_out(front, RecordExperts("stop"))


async def dump_expert_distribution_record(front: ServingContext, request: web.Request) -> web.Response:
    """Write what was recorded, so far or last, as JSON; the answer's message is the file's path."""
    folder = _dump.decode(await _body(request)).output_dir
    return await _carry_out(front, RecordExperts("dump", folder or tempfile.gettempdir()))


async def set_internal_state(front: ServingContext, request: web.Request) -> web.Response:
    """Change limits of the scheduler while it runs."""
    given: dict[str, Any] = msgspec.structs.asdict(_internal_state.decode(await _body(request)).server_args)
    if all(value is None for value in given.values()):
        raise InvalidRequest(f"server_args must hold one of {', '.join(given)}.", param="server_args")
    return await _carry_out(front, SetLimits(**given))
