"""``/v1/completions``: text completions."""

from __future__ import annotations

from aiohttp import web

from ..context.serving_context import ServingContext
from ..context.session_turn import session_turn
from ..protocol.grammar_fields import grammar_field
from ..protocol.logprobs import LogprobOptions
from ..protocol.prompts import parse_prompts
from ..protocol.sampling import sampling_params
from ..respond import PlannedResponse, respond
from .echo import Echo
from .fill_in_the_middle import with_suffix
from .formatter import CompletionFormatter
from .schema import Completion, CompletionRequest, decode_completion

DEFAULT_TOKENS = 16  # OpenAI's


async def completions(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """OpenAI's text completions."""
    return await respond(context, request, decode_completion, plan_completion)


async def plan_completion(context: ServingContext, body: CompletionRequest, *, arrived: float,
                          with_ids: bool = False) -> PlannedResponse[Completion, Completion]:
    """Checks and plans a text completion; parameters as of ``plan_chat``."""
    model, planner = context.model, context.planner
    model.check_name(body.model)
    body.set_defaults(context.config.answers)
    prompts = with_suffix(body, parse_prompts(body.prompt, "prompt"), context.config.model.completion_template)
    ids = await planner.prompt_ids(prompts, "prompt")
    session = session_turn(context, body.session_params, ids, body.num_generated, body)
    asked = grammar_field(body, body.response_format)
    samplings = []
    for prompt in ids:
        limit, asked_tokens = planner.output_limit(prompt, body.max_tokens, tokens_name="max_tokens")
        samplings.append(sampling_params(body, asked_tokens, min(DEFAULT_TOKENS, limit),
                                         vocab_size=model.spec.vocab_size, grammar=asked and asked.spec,
                                         defaults=model.sampling_defaults))
    ranked = body.num_generated > body.num_choices
    start = 0 if body.echo and body.logprobs is not None else -1
    logprobs = LogprobOptions(body.logprobs is not None or ranked, start, body.logprobs or 0)
    requests, continued = await planner.plan(body, ids, samplings, body.num_generated, logprobs,
                                             asked.param if asked else "tools")
    echo = Echo(prompts, body.num_generated, context.status.serving_tokenizer()) if body.echo else None
    answer = CompletionFormatter(context, body, echo, with_ids=with_ids)
    return PlannedResponse(context, requests, answer, arrived=arrived, continued=continued, session=session)
