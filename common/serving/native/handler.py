"""SGLang's ``/generate``."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ...api.errors import InvalidRequest
from ...api.messages import Generate
from ..context.request_planner import engine_requests
from ..context.serving_context import ServingContext
from ..context.sessions import SessionTurn
from ..protocol.namespaces import namespaces_of
from ..protocol.prompts import output_limit
from ..respond import PlannedResponse, respond
from .extras import check_hidden_bytes, embedded_prompts
from .formatter import GenerateFormatter
from .schema import GenerateAnswer, GenerateRequest, NativeSampling, decode_generate, logprob_options

DEFAULT_TOKENS = 128  # SGLang's
NativeRun = PlannedResponse[Any, GenerateAnswer]


async def generate(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """SGLang's native API for text and chat."""
    return await respond(context, request, decode_generate, plan_generate)


async def plan_generate(context: ServingContext, body: GenerateRequest, *, arrived: float,
                        with_ids: bool = False) -> NativeRun:
    """Checks and plans a request; parameters as of ``plan_chat``, but answers always hold their token ids."""
    requests, batched, session = await _plan(context, body)
    if body.continuation is not None and requests[0].return_hidden_states:
        raise InvalidRequest("continuation does not go with return_hidden_states.", param="continuation")
    if body.continuation is not None and body.continuation.id:
        requests[0].rid = body.continuation.id
    continued = await context.planner.resume(body.continuation, requests, None)
    token_bytes = context.status.serving_tokenizer().token_bytes if body.return_text_in_logprobs else None
    answer = GenerateFormatter(token_bytes, batched, session, context.model.spec.hidden_size)
    return NativeRun(context, requests, answer, arrived=arrived, continued=continued)


async def _plan(context: ServingContext, body: GenerateRequest) -> tuple[list[Generate], bool, SessionTurn | None]:
    """The engine's requests, whether the answer is a list, and the session's request that it is, if any."""
    ids, embeds, batched = await _prompts(context, body)
    session = _session_request(context, body, ids)
    given = body.samplings(len(ids))
    counts = {sampling.n or 1 for sampling in given}
    if len(counts) > 1:
        raise InvalidRequest("sampling_params must ask for the same n everywhere.", param="sampling_params.n")
    samplings = []
    for prompt, sampling in zip(ids, given):
        limit = output_limit(len(prompt), sampling.max_new_tokens, context.planner.token_limit,
                             tokens_name="max_new_tokens")
        samplings.append(sampling.params(min(DEFAULT_TOKENS, limit), context.model.spec.vocab_size))
    n = counts.pop()
    if session is not None and n > 1:
        raise InvalidRequest("A session's request has one answer: n must be 1.", param="sampling_params.n")
    placements = context.planner.placements(body, len(ids), n)
    options = logprob_options(body, [len(prompt) for prompt in ids], context.model.spec.vocab_size)
    requests = engine_requests(ids, context.planner.seeded(samplings), n, body.rid, placements, options, body.priority,
                               namespaces_of(body, len(ids)))
    _add_extras(context, body, requests, given, embeds)
    return requests, batched or n > 1, session


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


def _add_extras(context: ServingContext, body: GenerateRequest, requests: list[Generate],
                samplings: list[NativeSampling],
                embeds: list[bytes] | None) -> None:
    """Sets logit processors, hidden states and embeddings of ``requests``, n for each prompt; raises InvalidRequest."""
    args, count = context.config.answers, len(samplings)
    processors, hidden = body.processors(samplings), body.returns_hidden_states(count)
    for asked, allowed, name in ((any(processors), args.enable_custom_logit_processor, "custom_logit_processor"),
                                 (any(hidden), args.enable_return_hidden_states, "return_hidden_states")):
        if asked and not allowed:
            raise InvalidRequest(f"{name} needs a server that was started with --enable-{name.replace('_', '-')}; "
                                 "leave it out.", param=name, code="unsupported_parameter")
    for i, request in enumerate(requests):
        prompt = i * count // len(requests)
        request.processor, request.return_hidden_states = processors[prompt], hidden[prompt]
        if request.return_hidden_states:
            check_hidden_bytes(len(request.input_ids) + request.sampling.max_new_tokens, context.model.spec.hidden_size)
        if embeds is not None:
            request.input_embeds = embeds[prompt]
            if request.logprob_start_len >= 0:
                raise InvalidRequest("input_embeds hold no tokens that could have log-probabilities; leave out "
                                     "logprob_start_len.", param="logprob_start_len")


def _session_request(context: ServingContext, body: GenerateRequest, ids: list[list[int]]) -> SessionTurn | None:
    """The session's request, None without a session; prepends the stored conversation to the prompt in ``ids``."""
    if body.session_params is None:
        return None
    if len(ids) > 1 or body.bootstrap_host is not None:
        raise InvalidRequest("session_params go with one prompt, and with one server.", param="session_params")
    session = context.sessions.request(body.session_params, ids[0], context.status.serving_tokenizer().bos_id)
    ids[0] = session.prompt
    return session
