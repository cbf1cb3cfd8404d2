"""Telling a chat's answers in the structs of ``/v1/chat/completions``, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from hashlib import blake2b

from msgspec import UNSET

from ...parsers.answer_parts import Arguments, CallBegun, Part, Reader, Thought, joined
from ...parsers.reading import Reading, count_thought_tokens
from ..context import ServingContext
from ..generation import Choice
from ..protocol.logprobs import chat_logprobs
from ..protocol.logprobs import joined as logprobs_of
from ..protocol.requests import ChatRequest
from ..protocol.responses import (
    CalledFunction,
    CalledFunctionDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    CompletionTokensDetails,
    FinishReason,
    ToolCallDelta,
    ToolCallOut,
    Usage,
)
from ..protocol.usage import usage_of


class _Telling:
    """What is told of one choice: its reader, the calls it has made, and token ids that wait for the next chunk."""

    def __init__(self, reader: Reader, name: str):
        """``name``: the answer's and the choice's."""
        self.reader = reader
        self.num_calls = 0
        self.token_ids: list[int] = []
        self._name = name

    def catch_up(self, text: str) -> list[ChatDelta]:
        """Read what another server has told; returns it."""
        return [self.delta(part) for part in joined(self.reader.push(text))]

    def delta(self, part: Part) -> ChatDelta:
        match part:
            case Thought(text):
                return ChatDelta(reasoning_content=text)
            case CallBegun(name):
                self.num_calls += 1
                call = ToolCallDelta(self.num_calls - 1, CalledFunctionDelta("", name), self._call_id(), "function")
                return ChatDelta(tool_calls=[call])
            case Arguments(text):
                return ChatDelta(tool_calls=[ToolCallDelta(self.num_calls - 1, CalledFunctionDelta(text))])
        return ChatDelta(content=part)

    def _call_id(self) -> str:
        """The same on every server that tells this answer."""
        name = f"{self._name}/{self.num_calls}"
        return f"call_{blake2b(name.encode(), digest_size=12).hexdigest()}"


class ChatAnswer:
    """Tells one chat, see ``run.Answer``."""

    def __init__(self, front: ServingContext, body: ChatRequest, reading: Reading, *, with_ids: bool,
                 name: str | None = None):
        """``name``: its id, where another than that of its chunks is told."""
        begun = body.continuation
        self.told_before: list[ChatDelta] = []
        """What another server has told of the only choice."""
        self._front = front
        self._id = name or (begun and begun.id) or f"chatcmpl-{uuid.uuid4().hex}"
        self._created = (begun and begun.created) or int(time.time())
        self._with_ids = with_ids
        self._model = body.model or front.config.model_name
        self._body = body
        self._reading = reading
        self._tokenizer = front.serving_tokenizer()
        self._piece = self._tokenizer.piece
        self._tellings: list[_Telling] = []

    # ------------------------------------------------------------------ whole

    def whole(self, choices: Sequence[Choice]) -> ChatCompletion:
        readers = [self._reading.reader() for _ in choices]
        told = [self._choice(choice, reader) for choice, reader in zip(choices, readers)]
        return ChatCompletion(self._id, self._created, self._model, told, self._usage(choices, readers))

    def _choice(self, choice: Choice, reader: Reader) -> ChatChoice:
        assert choice.ended is not None
        message = message_of([*reader.push(choice.text), *reader.finish()])
        logprobs = choice.visible(choice.logprobs)
        return ChatChoice(choice.index, message, None if logprobs is None else chat_logprobs(logprobs, self._piece),
                          _reason(choice, bool(message.tool_calls)), choice.ended.matched)

    # ------------------------------------------------------------------ chunks

    def begin(self, choices: Sequence[Choice]) -> None:
        self._tellings = [_Telling(self._reading.reader(), f"{self._id}/{choice.index}") for choice in choices]
        for choice, telling in zip(choices, self._tellings):
            self.told_before += telling.catch_up(choice.text)

    def gained(self, choice: Choice) -> list[ChatChunk]:
        telling = self._tellings[choice.index]
        first = not choice.started
        delta = choice.take_delta()
        events = [ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""))] if first else []
        found = choice.visible(logprobs_of(delta.logprobs))
        logprobs = chat_logprobs(found, self._piece) if found is not None and found.token_ids else None
        parts = telling.reader.push(delta.text)
        for part in joined([*parts, *telling.reader.finish()] if choice.ended else parts):
            events.append(ChatChunkChoice(choice.index, telling.delta(part), logprobs))
            logprobs = None
        if logprobs is not None:  # tokens whose text is held back
            events.append(ChatChunkChoice(choice.index, ChatDelta(content=""), logprobs))
        if choice.ended is not None:
            events.append(ChatChunkChoice(choice.index, ChatDelta(), None, _reason(choice, telling.num_calls > 0),
                                          matched_stop=choice.ended.matched))
        if self._with_ids:
            telling.token_ids += delta.token_ids
            if events:
                events[-1].token_ids, telling.token_ids = telling.token_ids, []
        usage = self._usage([choice], [telling.reader]) if self._body.wants_usage_always else None
        return [ChatChunk(self._id, self._created, self._model, [said], usage) for said in events]

    def end(self, choices: Sequence[Choice]) -> list[ChatChunk]:
        if not self._body.wants_usage:
            return []
        usage = self._usage(choices, [telling.reader for telling in self._tellings])
        return [ChatChunk(self._id, self._created, self._model, [], usage)]

    def _usage(self, choices: Sequence[Choice], readers: Sequence[Reader]) -> Usage:
        usage = usage_of(self._front, choices, self._body.num_choices)
        if self._reading.reasoning is not None:
            usage.reasoning_tokens = sum(self._thought_tokens(choice, reader)
                                         for choice, reader in zip(choices, readers))
            usage.completion_tokens_details = CompletionTokensDetails(usage.reasoning_tokens)
        return usage

    def _thought_tokens(self, choice: Choice, reader: Reader) -> int:
        spans = reader.thought_spans
        if not spans:
            return 0
        hidden = self._tokenizer.special_ids if choice.request.sampling.skip_special_tokens else frozenset()
        pieces = (b"" if token in hidden else self._piece(token) for token in choice.token_ids)
        return count_thought_tokens(spans, choice.text, pieces)


def message_of(parts: list[Part]) -> ChatMessage:
    """The message that the parts of a whole answer make."""
    calls: list[ToolCallOut] = []
    content = thought = ""
    for part in joined(parts):
        match part:
            case Thought(text):
                thought += text
            case CallBegun(name):
                calls.append(ToolCallOut(_call_id(), CalledFunction(name, "")))
            case Arguments(text):
                calls[-1].function.arguments += text
            case _:
                content += part
    return ChatMessage(content if content or not calls else None, calls or UNSET,
                       reasoning_content=thought or UNSET)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _reason(choice: Choice, called: bool) -> FinishReason:
    assert choice.ended is not None
    return "tool_calls" if called and choice.ended.reason == "stop" else choice.ended.reason  # type: ignore[return-value]
