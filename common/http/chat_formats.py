"""Which markup a server's model writes: chosen when it starts, by name or by its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from ..api.errors import ConfigError
from ..openai.protocol import ChatRequest
from ..openai.reading import Reading
from ..openai.reasoning import REASONING, ReasoningFormat, begins_inside
from ..openai.tool_calls import FORMATS, ToolFormat, detect


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


def reading_of(formats: ChatFormats, body: ChatRequest, prompt: str) -> Reading:
    """How to read an answer to ``prompt``, the rendered request."""
    reasoning = formats.reasoning
    return Reading(
        formats.tools, {tool.function.name: tool.function.parameters or {} for tool in body.offered_tools},
        max_calls=1 if body.parallel_tool_calls is False else None,
        reasoning=reasoning, inside=reasoning is not None and begins_inside(reasoning, prompt),
        separate=body.separate_reasoning is not False, stream=body.stream_reasoning is not False)
