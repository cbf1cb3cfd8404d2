"""A chat request, planned and told in the structs of ``/v1/chat/completions``.

Routes that speak of chats in other words make a ``ChatRequest``, plan a run of it, and translate what it tells.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from ..api.messages import Generate
from ..openai.chat import template_messages, template_tools
from ..openai.continuation import continue_after
from ..openai.logprobs import chat_logprobs, joined
from ..openai.native import LogprobOptions
from ..openai.prompts import Prompts
from ..openai.protocol import ChatRequest, sampling_params
from ..openai.responses import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinishReason,
    ToolCallOut,
)
from ..openai.tool_calls import HermesParser, Part, ToolCallParser
from .front import Front, plan
from .generation import Choice, Delta
from .run import Run
from .usage import usage_of

ChatRun = Run[ChatCompletion, ChatChunk]


async def plan_chat(front: Front, body: ChatRequest, *, arrived: float, with_ids: bool = False) -> ChatRun:
    """``arrived``: when the HTTP request came, on the monotonic clock; ``with_ids``: chunks tell their token ids.

    Raises InvalidRequest, NotFound for another model, and WorkerUnavailable.
    """
    front.check_model(body.model)
    requests = await _plan(front, body)
    continued = continue_after(body.continuation, requests, front.model.vocab_size)
    return ChatRun(front, requests, _Answer(front, body, with_ids=with_ids), arrived=arrived, continued=continued)


async def _plan(front: Front, body: ChatRequest) -> list[Generate]:
    tokenizer = front.serving_tokenizer()
    text = tokenizer.render_chat(
        template_messages(body), tools=template_tools(body.offered_tools),
        continue_final_message=bool(body.continue_final_message), options=body.chat_template_kwargs or {})
    ids = await front.prompt_ids(Prompts(texts=[text]), "messages", add_special_tokens=False)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    room = front.room_for_output(ids[0], body.requested_tokens, name)
    params = sampling_params(body, body.requested_tokens, room, vocab_size=front.model.vocab_size, tokens_name=name)
    n = body.num_choices
    logprobs = LogprobOptions(bool(body.logprobs), -1, body.top_logprobs or 0)
    return plan(ids, [params], n, body.rid, front.meeting_points(body, 1, n), [logprobs], body.priority)


@dataclass
class _Spoken:
    """A streamed choice: its parser, the calls it has made, and token ids that wait for the next event."""

    parser: ToolCallParser | None
    num_calls: int = 0
    token_ids: list[int] = field(default_factory=list)


class _Answer:
    """Tells one chat, see ``run.Answer``."""

    def __init__(self, front: Front, body: ChatRequest, *, with_ids: bool):
        begun = body.continuation
        self._id = (begun and begun.id) or f"chatcmpl-{uuid.uuid4().hex}"
        self._created = (begun and begun.created) or int(time.time())
        self._with_ids = with_ids
        self._model = body.model or front.config.model_name
        self._body = body
        self._piece = front.serving_tokenizer().piece
        self._spoken: list[_Spoken] = []

    def _parser(self) -> ToolCallParser | None:
        return HermesParser() if self._body.offered_tools else None

    # ------------------------------------------------------------------ whole

    def whole(self, choices: Sequence[Choice]) -> ChatCompletion:
        return ChatCompletion(self._id, self._created, self._model, [self._choice(choice) for choice in choices],
                              usage_of(choices, self._body.num_choices))

    def _choice(self, choice: Choice) -> ChatChoice:
        assert choice.ended is not None
        parser = self._parser()
        parts: list[Part] = [choice.text] if parser is None else [*parser.push(choice.text), *parser.finish()]
        calls = [_call(part.name, part.arguments) for part in parts if not isinstance(part, str)]
        content = "".join(part for part in parts if isinstance(part, str))
        message = ChatMessage(content if content or not calls else None, calls or UNSET)
        logprobs = choice.visible(choice.logprobs)
        return ChatChoice(choice.index, message, None if logprobs is None else chat_logprobs(logprobs, self._piece),
                          _reason(choice, bool(calls)), choice.ended.matched)

    # ------------------------------------------------------------------ chunks

    def begin(self, choices: Sequence[Choice]) -> None:
        self._spoken = [self._start(choice) for choice in choices]

    def _start(self, choice: Choice) -> _Spoken:
        """Where a choice stands: at its beginning, or behind what another server told."""
        spoken = _Spoken(self._parser())
        if spoken.parser is not None:
            spoken.num_calls = sum(not isinstance(part, str) for part in spoken.parser.push(choice.text))
        return spoken

    def gained(self, choice: Choice) -> list[ChatChunk]:
        spoken = self._spoken[choice.index]
        first = not choice.started
        delta = choice.take_delta()
        events = [ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""))] if first else []
        logprobs = self._logprobs(choice, delta)
        for part in self._parts(choice, delta, spoken):
            said = self._said(part, spoken)
            events.append(ChatChunkChoice(choice.index, said, logprobs))
            logprobs = None
        if logprobs is not None:  # tokens whose text is held back
            events.append(ChatChunkChoice(choice.index, ChatDelta(content=""), logprobs))
        if choice.ended is not None:
            events.append(ChatChunkChoice(choice.index, ChatDelta(), None, _reason(choice, spoken.num_calls > 0)))
        if self._with_ids:
            spoken.token_ids += delta.token_ids
            if events:
                events[-1].token_ids, spoken.token_ids = spoken.token_ids, []
        return [ChatChunk(self._id, self._created, self._model, [said]) for said in events]

    def end(self, choices: Sequence[Choice]) -> list[ChatChunk]:
        if not self._body.wants_usage:
            return []
        return [ChatChunk(self._id, self._created, self._model, [], usage_of(choices, self._body.num_choices))]

    def _parts(self, choice: Choice, delta: Delta, spoken: _Spoken) -> list[Part]:
        if spoken.parser is None:
            return [delta.text] if delta.text else []
        parts = spoken.parser.push(delta.text)
        return [*parts, *spoken.parser.finish()] if choice.ended else parts

    def _said(self, part: Part, spoken: _Spoken) -> ChatDelta:
        if isinstance(part, str):
            return ChatDelta(content=part)
        call = _call(part.name, part.arguments)
        call.index = spoken.num_calls
        spoken.num_calls += 1
        return ChatDelta(tool_calls=[call])

    def _logprobs(self, choice: Choice, delta: Delta) -> ChatLogprobs | None:
        found = choice.visible(joined(delta.logprobs))
        return chat_logprobs(found, self._piece) if found is not None and found.token_ids else None


def _call(name: str, arguments: str) -> ToolCallOut:
    return ToolCallOut(f"call_{uuid.uuid4().hex[:24]}", CalledFunction(name, arguments))


def _reason(choice: Choice, called: bool) -> FinishReason:
    assert choice.ended is not None
    return "tool_calls" if called and choice.ended.reason == "stop" else choice.ended.reason  # type: ignore[return-value]
