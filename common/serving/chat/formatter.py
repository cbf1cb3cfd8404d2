"""A chat's answers in the structs of ``/v1/chat/completions``, in full or as chunks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from hashlib import blake2b

from msgspec import UNSET, UnsetType

from ...parsers.output_format import OutputFormat, count_reasoning_tokens
from ...parsers.output_parser import (
    OutputDelta,
    OutputParser,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    joined,
)
from ..context.generation import Choice, usage_of
from ..context.serving_context import ServingContext
from ..protocol.answer_metadata import AnswerMetadata
from ..protocol.continuation import ResponseHeader
from ..protocol.logprobs import chat_logprobs
from ..protocol.logprobs import joined as logprobs_of
from ..protocol.row_extras import last_state
from ..protocol.usage import CompletionTokensDetails, FinishReason, SglExt, Usage
from .schema import (
    CalledFunction,
    CalledFunctionDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    ToolCallDelta,
    ToolCallOut,
)


class _ChoiceStream:
    """The state of one choice's stream: its parser, the calls so far, and token ids that wait for the next chunk."""

    def __init__(self, parser: OutputParser, name: str):
        """``name`` is the answer's id and the choice's index."""
        self.parser = parser
        self.num_calls = 0
        self.token_ids: list[int] = []
        self._name = name

    def catch_up(self, text: str) -> list[ChatDelta]:
        """Reads the text that another server sent; returns its deltas."""
        return [self.delta(part) for part in joined(self.parser.push(text))]

    def delta(self, part: OutputDelta) -> ChatDelta:
        match part:
            case ReasoningDelta(text):
                return ChatDelta(reasoning_content=text)
            case ToolCallStart(name):
                self.num_calls += 1
                call = ToolCallDelta(self.num_calls - 1, CalledFunctionDelta("", name), self._call_id(), "function")
                return ChatDelta(tool_calls=[call])
            case ToolArgumentsDelta(text):
                return ChatDelta(tool_calls=[ToolCallDelta(self.num_calls - 1, CalledFunctionDelta(text))])
        return ChatDelta(content=part)

    def _call_id(self) -> str:
        """The same on every server that sends a part of this answer."""
        name = f"{self._name}/{self.num_calls}"
        return f"call_{blake2b(name.encode(), digest_size=12).hexdigest()}"


class ChatFormatter:
    """Formats one chat, see ``respond.ResponseFormatter``."""

    def __init__(self, context: ServingContext, body: ChatRequest, output_format: OutputFormat, *, with_ids: bool,
                 name: str | None = None):
        """``name``: the answer's id, where the API does not send the chunks' own."""
        self.continued_deltas: list[ChatDelta] = []
        """The deltas that another server sent of the only choice."""
        header = ResponseHeader.of(body, "chatcmpl-", context.model.name)
        self._id, self._created, self._model = name or header.id, header.created, header.model
        self._hidden_size = context.model.spec.hidden_size
        self._with_ids = with_ids or bool(body.return_token_ids)
        self._with_prompt = bool(body.return_token_ids or body.return_prompt_token_ids)
        self._body = body
        self._output_format = output_format
        self._answers = context.config.answers
        self._tokenizer = context.status.serving_tokenizer()
        self._token_bytes = self._tokenizer.token_bytes
        self._streams: list[_ChoiceStream] = []

    # ------------------------------------------------------------------ full

    def full(self, choices: Sequence[Choice]) -> ChatCompletion:
        parsers = [self._output_format.new_parser() for _ in choices]
        formatted = [self._choice(choice, parser) for choice, parser in zip(choices, parsers)]
        return ChatCompletion(self._id, self._created, self._model, formatted, self._usage(choices, parsers),
                              AnswerMetadata.of(choices), sglext=self._sglext(choices))

    def _choice(self, choice: Choice, parser: OutputParser) -> ChatChoice:
        assert choice.finish is not None
        message = message_of([*parser.push(choice.text), *parser.finish()])
        logprobs = choice.visible(choice.logprobs)
        return ChatChoice(choice.index, message,
                          None if logprobs is None else chat_logprobs(logprobs, self._token_bytes),
                          _finish_reason(choice, bool(message.tool_calls)), choice.finish.matched,
                          self._last_state(choice), choice.prompt_ids if self._with_prompt else UNSET,
                          choice.token_ids if self._body.return_token_ids else UNSET)

    # ------------------------------------------------------------------ chunks

    def start(self, choices: Sequence[Choice]) -> None:
        self._streams = [_ChoiceStream(self._output_format.new_parser(), f"{self._id}/{choice.index}")
                         for choice in choices]
        for choice, stream in zip(choices, self._streams):
            self.continued_deltas += stream.catch_up(choice.text)

    def delta(self, choice: Choice) -> list[ChatChunk]:
        stream = self._streams[choice.index]
        first = not choice.started
        delta = choice.take_delta()
        events = [ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""),
                                  prompt_token_ids=choice.prompt_ids if self._with_prompt else UNSET)] if first else []
        new_logprobs = choice.visible(logprobs_of(delta.logprobs))
        logprobs = (chat_logprobs(new_logprobs, self._token_bytes)
                    if new_logprobs is not None and new_logprobs.token_ids else None)
        parts = stream.parser.push(delta.text)
        for part in joined([*parts, *stream.parser.finish()] if choice.finish else parts):
            events.append(ChatChunkChoice(choice.index, stream.delta(part), logprobs))
            logprobs = None
        if logprobs is not None:  # tokens whose text is buffered
            events.append(ChatChunkChoice(choice.index, ChatDelta(content=""), logprobs))
        if choice.finish is not None:
            events.append(ChatChunkChoice(choice.index, ChatDelta(hidden_states=self._last_state(choice)), None,
                                          _finish_reason(choice, stream.num_calls > 0),
                                          matched_stop=choice.finish.matched))
        if self._with_ids:
            stream.token_ids += delta.token_ids
            if events:
                events[-1].token_ids, stream.token_ids = stream.token_ids, []
        usage = self._usage([choice], [stream.parser]) if self._body.reports_usage_always else None
        chunks = [ChatChunk(self._id, self._created, self._model, [event], usage) for event in events]
        if choice.finish is not None:
            chunks[-1].metadata = AnswerMetadata.of([choice])
        return chunks

    def finish(self, choices: Sequence[Choice]) -> list[ChatChunk]:
        chunks = []
        if sglext := self._sglext(choices):
            chunks.append(ChatChunk(self._id, self._created, self._model, [], sglext=sglext))
        if self._body.reports_usage:
            usage = self._usage(choices, [stream.parser for stream in self._streams])
            chunks.append(ChatChunk(self._id, self._created, self._model, [], usage))
        return chunks

    def _sglext(self, choices: Sequence[Choice]) -> SglExt | UnsetType:
        first, body, answers = choices[0], self._body, self._answers
        return SglExt(
            first.cached_tokens_details if body.return_cached_tokens_details and first.cached_tokens_details else UNSET,
            first.prompt_ids if body.return_input_ids_in_sglext or answers.return_input_ids else UNSET,
            [choice.token_ids for choice in choices] if body.return_output_ids_in_sglext or answers.return_output_ids
            else UNSET).or_unset

    def _usage(self, choices: Sequence[Choice], parsers: Sequence[OutputParser]) -> Usage:
        usage = usage_of(choices, self._body.num_choices, report_cached=self._answers.enable_cache_report)
        if self._output_format.reasoning is not None:
            usage.reasoning_tokens = sum(self._reasoning_tokens(choice, parser)
                                         for choice, parser in zip(choices, parsers))
            details = usage.completion_tokens_details or CompletionTokensDetails()
            details.reasoning_tokens = usage.reasoning_tokens
            usage.completion_tokens_details = details
        return usage

    def _last_state(self, choice: Choice) -> list[float] | UnsetType:
        return last_state(choice.hidden_states, self._hidden_size) if choice.request.return_hidden_states else UNSET

    def _reasoning_tokens(self, choice: Choice, parser: OutputParser) -> int:
        spans = parser.reasoning_spans
        if not spans:
            return 0
        hidden = self._tokenizer.special_ids if choice.request.sampling.skip_special_tokens else frozenset()
        token_bytes = (b"" if token in hidden else self._token_bytes(token) for token in choice.token_ids)
        return count_reasoning_tokens(spans, choice.text, token_bytes)


def message_of(parts: list[OutputDelta]) -> ChatMessage:
    """The message that consists of the parts of a complete answer."""
    calls: list[ToolCallOut] = []
    content = reasoning_text = ""
    for part in joined(parts):
        match part:
            case ReasoningDelta(text):
                reasoning_text += text
            case ToolCallStart(name):
                calls.append(ToolCallOut(_call_id(), CalledFunction(name, "")))
            case ToolArgumentsDelta(text):
                calls[-1].function.arguments += text
            case _:
                content += part
    return ChatMessage(content if content or not calls else None, calls or UNSET,
                       reasoning_content=reasoning_text or UNSET)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _finish_reason(choice: Choice, called: bool) -> FinishReason:
    assert choice.finish is not None
    return "tool_calls" if called and choice.finish.reason == "stop" else choice.finish.reason  # type: ignore[return-value]
