"""A chat request, planned and told in the structs of ``/v1/chat/completions``.

Routes that speak of chats in other words make a ``ChatRequest``, plan a run of it, and translate what it tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...api.messages import Generate
from ..context import ServingContext, plan
from ..native.schema import LogprobOptions
from ..protocol.continuation import continue_after
from ..protocol.prompts import Prompts
from ..protocol.requests import ChatRequest, sampling_params
from ..protocol.responses import ChatChunk, ChatCompletion, ChatDelta
from ..run import Run
from ..structured.fields import grammar_field
from .answer import ChatAnswer
from .formats import AnswerForm, answer_form
from .prompt import chat_prompt
from .tool_choice import tool_choice


class ChatRun(Run[ChatCompletion, ChatChunk]):
    """A planned chat."""

    def __init__(self, front: ServingContext, requests: list[Generate], answer: ChatAnswer, *, arrived: float,
                 continued: Sequence[int]):
        super().__init__(front, requests, answer, arrived=arrived, continued=continued)
        self._chat = answer

    @property
    def told_before(self) -> list[ChatDelta]:
        """What another server has told of an answer that goes on here; known from the first chunk on."""
        return self._chat.told_before


async def plan_chat(front: ServingContext, body: ChatRequest, *, arrived: float, with_ids: bool = False,
                    name: str | None = None) -> ChatRun:
    """``arrived``: when the HTTP request came, on the monotonic clock; ``with_ids``: chunks tell their token ids;
    ``name``: the answer's id, where another than its chunks' is told.

    Raises InvalidRequest, NotFound for another model, and WorkerUnavailable.
    """
    front.check_model(body.model)
    choice = tool_choice(body)
    prompt = chat_prompt(front.serving_tokenizer(), body, choice)
    asked = grammar_field(body, body.response_format)
    form = answer_form(front.chat_formats, body, choice, prompt, asked and asked.spec)
    requests = await _plan(front, body, prompt, form)
    continued = continue_after(body.continuation, requests, front.model.vocab_size)
    await front.prepare_grammars(requests, asked.param if asked else "tools")
    answer = ChatAnswer(front, body, form.reading, with_ids=with_ids, name=name)
    return ChatRun(front, requests, answer, arrived=arrived, continued=continued)


async def _plan(front: ServingContext, body: ChatRequest, prompt: str, form: AnswerForm) -> list[Generate]:
    ids = await front.prompt_ids(Prompts(texts=[prompt]), "messages", add_special_tokens=False)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    room = front.room_for_output(ids[0], body.requested_tokens, name)
    params = sampling_params(body, body.requested_tokens, room, vocab_size=front.model.vocab_size, tokens_name=name)
    tokenizer = front.serving_tokenizer()
    strings, tokens = tokenizer.chat_stops(front.model.vocab_size)
    params = msgspec.structs.replace(params, grammar=form.grammar, stop=(*params.stop, *strings),
                                     stop_token_ids=(*params.stop_token_ids, *tokens))
    if tokenizer.any_special(form.reading.markers):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    n = body.num_choices
    logprobs = LogprobOptions(bool(body.logprobs), -1, body.top_logprobs or 0)
    points = front.meeting_points(body, 1, n)
    return front.placed(body, plan(ids, [params], n, body.rid, points, [logprobs], body.priority))
