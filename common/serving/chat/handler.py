"""``/v1/chat/completions``: a chat request, planned and answered.

Handlers of other APIs for chats translate their request into a ``ChatRequest``, plan it, and adapt the chunks
(see ``stream_adapter.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web

from ...api.messages import Generate
from ..context.serving_context import ServingContext
from ..context.session_turn import session_turn
from ..context.sessions import SessionTurn
from ..protocol.grammar_fields import grammar_field
from ..protocol.logprobs import LogprobOptions
from ..protocol.prompts import Prompts
from ..protocol.sampling import sampling_params
from ..respond import PlannedResponse, respond
from .answer_form import answer_form
from .formatter import ChatFormatter
from .prompt import chat_prompt
from .schema import ChatChunk, ChatCompletion, ChatDelta, ChatRequest, decode_chat
from .tool_choice import tool_choice


class PlannedChat(PlannedResponse[ChatCompletion, ChatChunk]):
    """A planned chat."""

    def __init__(self, context: ServingContext, requests: list[Generate], formatter: ChatFormatter, *, arrived: float,
                 continued: Sequence[int], session: SessionTurn | None):
        super().__init__(context, requests, formatter, arrived=arrived, continued=continued, session=session)
        self._chat_formatter = formatter

    @property
    def continued_deltas(self) -> list[ChatDelta]:
        """The deltas that another server sent of an answer that is continued here; known from the first chunk on."""
        return self._chat_formatter.continued_deltas


async def plan_chat(context: ServingContext, body: ChatRequest, *, arrived: float, with_ids: bool = False,
                    name: str | None = None) -> PlannedChat:
    """Checks and plans a chat.

    ``arrived``: the HTTP request's arrival, on the monotonic clock; ``with_ids``: chunks have their token ids;
    ``name``: the answer's id, where the API does not send the chunks' own.

    Raises InvalidRequest, NotFound for another model, and WorkerUnavailable.
    """
    model, planner = context.model, context.planner
    model.check_name(body.model)
    choice = tool_choice(body)
    tokenizer = context.status.serving_tokenizer()
    body.set_defaults(context.config.answers)
    prompt = chat_prompt(tokenizer, body, choice, context.config.answers)
    asked = grammar_field(body, body.response_format)
    form = answer_form(model.chat_formats, body, choice, prompt, asked and asked.spec)
    ids = await planner.prompt_ids(Prompts(texts=[prompt]), "messages", add_special_tokens=False)
    session = session_turn(context, body.session_params, ids, body.num_choices, body)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit, asked_tokens = planner.output_limit(ids[0], body.requested_tokens, tokens_name=limit_name)
    params = sampling_params(body, asked_tokens, limit, vocab_size=model.spec.vocab_size,
                             grammar=form.grammar, tokens_name=limit_name,
                             defaults=model.sampling_defaults)
    stops, stop_ids = tokenizer.chat_stops(model.spec.vocab_size)
    if stops or stop_ids:
        params = msgspec.structs.replace(params, stop=(*params.stop, *stops),
                                         stop_token_ids=(*params.stop_token_ids, *stop_ids))
    if tokenizer.any_special(form.output_format.markers):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    logprobs = LogprobOptions(bool(body.logprobs), -1, body.top_logprobs or 0)
    requests, continued = await planner.plan(body, ids, [params], body.num_choices, logprobs,
                                             asked.param if asked else "tools")
    formatter = ChatFormatter(context, body, form.output_format, with_ids=with_ids, name=name)
    return PlannedChat(context, requests, formatter, arrived=arrived, continued=continued, session=session)


async def chat_completions(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """OpenAI's chat completions."""
    return await respond(context, request, decode_chat, plan_chat)
