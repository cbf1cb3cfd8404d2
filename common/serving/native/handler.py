"""SGLang's ``/generate``."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import http, web

from ...api.errors import InvalidRequest
from ...api.messages import Generate
from ..context.request_planner import engine_requests
from ..context.serving_context import ServingContext
from ..context.session_turn import session_turn
from ..context.sessions import SessionTurn
from ..protocol.encoding import encode
from ..protocol.namespaces import namespaces_of
from ..protocol.row_extras import set_routed_experts, set_row_extras
from ..protocol.slo import slo_of
from ..respond import PlannedResponse, respond
from ..web import json_bytes
from .extras import Embeddings, embedded_prompts
from .formatter import GenerateFormatter
from .schema import (
    GenerateAnswer,
    GenerateRequest,
    NativeSampling,
    decode_generate,
    decode_vertex,
    logprob_options,
    preferred_sampling,
)

DEFAULT_TOKENS = 128  # SGLang's
_FILE_TOKENS = 512  # SGLang's
NativeRun = PlannedResponse[Any, GenerateAnswer]


async def generate(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """SGLang's native API for text and chat."""
    return await respond(context, request, decode_generate, plan_generate)


async def generate_from_file(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """``/generate`` of ``input_embeds`` that are the JSON in a form's field ``file``: greedy, up to 512 tokens."""
    async def read() -> GenerateRequest:
        embeds = await _embeds_of_form(request)
        longest = max(embedded_prompts(embeds, context.model.spec.hidden_size).counts)
        limit = max(1, min(_FILE_TOKENS, context.planner.token_limit - longest))
        return GenerateRequest(input_embeds=embeds, sampling_params=NativeSampling(
            temperature=0.0, max_new_tokens=limit))

    return json_bytes(encode(await _answer(context, read)))


async def vertex_generate(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """``/generate`` as Vertex AI calls it: ``predictions`` of ``instances``, all with ``parameters``."""
    async def read() -> GenerateRequest:
        return decode_vertex(await request.read())

    return json_bytes(encode({"predictions": await _answer(context, read)}))


async def _answer(context: ServingContext, read: Callable[[], Awaitable[GenerateRequest]]) -> Any:
    """The whole answer to the request that ``read`` gives; raises ServingError."""
    arrived = time.monotonic()
    with context.telemetry.counting_refusals():
        context.status.check_serving()
        run = await plan_generate(context, await read(), arrived=arrived)
    return await run.full()


async def _embeds_of_form(request: web.Request) -> Embeddings:
    """Raises InvalidRequest."""
    try:
        file = (await request.post()).get("file")
    except (ValueError, AssertionError, http.HttpProcessingError):  # aiohttp's, for a truncated or malformed form
        raise InvalidRequest("The form is not valid multipart/form-data.") from None
    if not isinstance(file, web.FileField):
        raise InvalidRequest("Send input_embeds as a file of JSON, in the field file of multipart/form-data.",
                             param="file")
    try:
        return msgspec.json.decode(file.file.read(), type=Embeddings)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The file must hold input_embeds as JSON, rows of numbers: {error}.",
                             param="file") from None


async def plan_generate(context: ServingContext, body: GenerateRequest, *, arrived: float,
                        with_ids: bool = False) -> NativeRun:
    """Checks and plans a request; parameters as of ``plan_chat``, but answers always hold their token ids."""
    requests, batched, session, intervals = await _plan(context, body)
    if body.continuation is not None and body.continuation.id:
        requests[0].rid = body.continuation.id
    continued = await context.planner.resume(body.continuation, requests, None)
    token_bytes = context.status.serving_tokenizer().token_bytes if body.return_text_in_logprobs else None
    answer = GenerateFormatter(token_bytes, batched, context.model.spec,
                               stream_output=context.config.answers.stream_output,
                               with_prompt=bool(body.return_prompt_token_ids),
                               experts_start=body.routed_experts_start_len or 0)
    return NativeRun(context, requests, answer, arrived=arrived, continued=continued, intervals=intervals,
                     session=session)


async def _plan(context: ServingContext, body: GenerateRequest) -> tuple[
        list[Generate], bool, SessionTurn | None, list[int | None]]:
    """The engine's requests, whether the answer is a list, the session's request that it is, if any, and the
    stream_interval of each request."""
    ids, embeds, batched = await _prompts(context, body)
    given = body.samplings(len(ids))
    session = session_turn(context, body.session_params, ids, given[0].n or 1, body)
    if (preferred := context.config.answers.preferred_sampling_params) is not None:
        for sampling in given:
            sampling.fill(preferred_sampling(preferred))
    counts = {sampling.n or 1 for sampling in given}
    if len(counts) > 1:
        raise InvalidRequest("sampling_params must ask for the same n everywhere.", param="sampling_params.n")
    samplings = []
    for prompt, sampling in zip(ids, given):
        limit, asked = context.planner.output_limit(prompt, sampling.max_new_tokens, tokens_name="max_new_tokens")
        sampling = msgspec.structs.replace(sampling, max_new_tokens=asked)
        samplings.append(sampling.params(min(DEFAULT_TOKENS, limit), context.model.spec.vocab_size))
    n = counts.pop()
    placements = context.planner.placements(body, len(ids), n)
    options = logprob_options(body, [len(prompt) for prompt in ids], context.model.spec.vocab_size)
    requests = engine_requests(ids, context.planner.seeded(samplings), n, body.rid, placements, options,
                               context.planner.priority(body.priority), namespaces_of(body, len(ids)),
                               slo_of(body.slo_ttft_ms, body.slo_tpot_ms))
    set_row_extras(requests, body.processors(given), body.returns_hidden_states(len(ids)), context.config.answers,
                   context.model.spec.hidden_size)
    set_routed_experts(requests, body.returns_routed_experts(len(ids)), body.routed_experts_start_len,
                       context.config.answers, context.model.spec)
    if embeds is not None:
        row_bytes = 4 * context.model.spec.hidden_size
        _set_embeds(requests, [rows[:len(prompt) * row_bytes] for rows, prompt in zip(embeds, ids)])
    return requests, batched or n > 1, session, [each.stream_interval for each in given for _ in range(n)]


async def _prompts(context: ServingContext, body: GenerateRequest) -> tuple[list[list[int]], list[bytes] | None, bool]:
    """Token ids of each prompt, its embeddings where it consists of these (the ids then mean nothing), and whether the
    request held a list of prompts."""
    if body.input_embeds is None:
        prompts = body.prompts()
        ids = await context.planner.prompt_ids(prompts, "text" if prompts.texts is not None else "input_ids")
        return ids, None, prompts.batched
    context.model.check_generates()
    if body.session_params is not None:
        raise InvalidRequest("session_params do not go with input_embeds.", param="session_params")
    embedded = embedded_prompts(body.input_embeds, context.model.spec.hidden_size)
    return [[0] * count for count in embedded.counts], embedded.rows, embedded.batched


def _set_embeds(requests: list[Generate], embeds: list[bytes]) -> None:
    """Sets the embeddings of ``requests``, n for each prompt; raises InvalidRequest."""
    for i, request in enumerate(requests):
        request.input_embeds = embeds[i * len(embeds) // len(requests)]
        if request.logprob_start_len >= 0:
            raise InvalidRequest("input_embeds hold no tokens that could have log-probabilities; leave out "
                                 "logprob_start_len.", param="logprob_start_len")
