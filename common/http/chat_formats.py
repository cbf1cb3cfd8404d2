"""Which markup a server's model writes: chosen when it starts, by name or by its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from ..api.errors import ConfigError
from ..api.grammar import GrammarSpec
from ..openai.protocol import ChatRequest
from ..openai.reading import Reading
from ..openai.reasoning import REASONING, ReasoningFormat, begins_inside
from ..openai.tool_calls import FORMATS, JSON_ARRAY, ToolFormat, detect
from ..openai.tool_calls.demand import allow_calls, demand_calls, reasoning_before
from ..openai.tool_choice import ToolChoice


@dataclass(frozen=True)
class ChatFormats:
    """None where answers are taken as they are."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def named(cls, tool_call_parser: str | None, reasoning_parser: str | None, template: str | None) -> ChatFormats:
        """``tool_call_parser`` 'auto' goes by the chat template's source. Raises ConfigError for unknown names."""
        if tool_call_parser == "auto":
            tool_call_parser = detect(template or "")
        return cls(_known("--tool-call-parser", tool_call_parser, FORMATS),
                   _known("--reasoning-parser", reasoning_parser, REASONING))


def _known(flag: str, name: str | None, formats: dict):
    if name is None or name == "none":
        return None
    if name not in formats:
        raise ConfigError(f"{flag} {name} is unknown; it is one of {', '.join(sorted(formats))}.")
    return formats[name]


@dataclass(frozen=True)
class AnswerForm:
    """How to read one request's answers, and the grammar that they obey for the sake of their calls."""

    reading: Reading
    grammar: GrammarSpec | None


def answer_form(formats: ChatFormats, body: ChatRequest, choice: ToolChoice, prompt: str) -> AnswerForm:
    """The form of answers to ``prompt``, the rendered request."""
    reasoning, tools = formats.reasoning, formats.tools
    if choice.required and (tools is None or tools.layout is None):
        tools = JSON_ARRAY
    inside = reasoning is not None and begins_inside(reasoning, prompt)
    reading = Reading(tools, choice.schemas, choice.max_calls, reasoning, inside,
                      separate=body.separate_reasoning is not False, stream=body.stream_reasoning is not False)
    return AnswerForm(reading, _grammar(reading, choice))


def _grammar(reading: Reading, choice: ToolChoice) -> GrammarSpec | None:
    layout = reading.tools.layout if reading.tools is not None else None
    if layout is None or not (choice.required or choice.strict):
        return None
    before, single = reasoning_before(reading.reasoning, reading.inside), choice.max_calls == 1
    if choice.required:
        return demand_calls(layout, choice.schemas, single=single, before=before)
    return allow_calls(layout, choice.schemas, choice.strict, single=single, before=before)
