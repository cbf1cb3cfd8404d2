"""Which markup a server's model writes: chosen when it starts, by name or by its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from ...api.errors import InvalidRequest
from ...api.grammar import GrammarSpec
from ...config.server import ChatArgs
from ...parsers.reading import Reading
from ...parsers.reasoning import REASONING, ReasoningFormat, begins_behind, begins_inside, goes_on_inside
from ...parsers.reasoning.grammar import answer_head, reasoning_before
from ...parsers.structural_tags import Node, either, node_of, sequence, spec
from ...parsers.tools import FORMATS, JSON_ARRAY, ToolFormat, detect
from ...parsers.tools.grammars import allow_calls, demand_calls, loosened
from ..protocol.requests import ChatRequest
from .messages import text_of
from .tool_choice import ToolChoice


@dataclass(frozen=True)
class ChatFormats:
    """None where answers are taken as they are."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def chosen(cls, args: ChatArgs, template: str | None) -> ChatFormats:
        """``template`` is the source of the chat template, by which 'auto' goes."""
        tools = detect(template or "") if args.tool_call_parser == "auto" else args.tool_call_parser
        return cls(FORMATS.get(tools or ""), REASONING.get(args.reasoning_parser or ""))


@dataclass(frozen=True)
class AnswerForm:
    """How to read one request's answers, and the grammar that they obey."""

    reading: Reading
    grammar: GrammarSpec | None


def answer_form(formats: ChatFormats, body: ChatRequest, choice: ToolChoice, prompt: str,
                asked: GrammarSpec | None = None) -> AnswerForm:
    """The form of answers to ``prompt``, the rendered request; ``asked`` is the grammar that its fields state.

    Raises InvalidRequest where answers would have to be calls and obey another grammar, too.
    """
    reasoning, tools = formats.reasoning, formats.tools
    if choice.required and (tools is None or tools.layout is None):
        tools = JSON_ARRAY
    inside, behind = _reasoning_state(reasoning, body, prompt)
    reading = Reading(tools, choice.schemas, choice.max_calls, reasoning, inside,
                      separate=body.separate_reasoning is not False, stream=body.stream_reasoning is not False)
    answer = _answer(reading, choice, asked)
    if answer is None:
        return AnswerForm(reading, asked)
    before = [] if reasoning is None or behind else reasoning_before(reasoning, inside)
    return AnswerForm(reading, spec([*before, answer]))


def _reasoning_state(reasoning: ReasoningFormat | None, body: ChatRequest, prompt: str) -> tuple[bool, bool]:
    """Whether the prompt has opened the answer's reasoning, and whether it has left it behind."""
    if reasoning is None:
        return False, True
    if not body.continue_final_message:
        return begins_inside(reasoning, prompt), begins_behind(reasoning, prompt)
    inside = goes_on_inside(reasoning, text_of(body.messages[-1].content))
    return inside, not inside


def _answer(reading: Reading, choice: ToolChoice, asked: GrammarSpec | None) -> Node | None:
    """The grammar behind an answer's reasoning, None where ``asked`` (or nothing) is all that there is."""
    layout = reading.tools.layout if reading.tools is not None else None
    single = choice.max_calls == 1
    if choice.required:
        if asked is not None:
            raise InvalidRequest("tool_choice demands tool calls, which cannot obey response_format or another "
                                 "grammar; leave one of them out.", param="tool_choice")
        assert layout is not None
        return demand_calls(layout, choice.schemas, single=single)
    calls = layout if choice.tools else None
    if asked is None:
        return allow_calls(calls, choice.schemas, choice.strict, single=single) if calls and choice.strict else None
    node = node_of(asked)
    if node is None or (calls is None and reading.reasoning is None):
        return None
    harmony = reading.reasoning is not None and reading.reasoning.harmony
    words = sequence([answer_head(harmony), node])
    if calls is None:
        return words
    return either([demand_calls(calls, loosened(choice.schemas, choice.strict), single=single), words])
