"""The markup that a server's model writes, selected at start by name or by its chat template; and its grammar."""

from __future__ import annotations

from dataclasses import dataclass

from ...api.errors import InvalidRequest
from ...api.grammar import GrammarSpec
from ...parsers.output_format import OutputFormat
from ...parsers.reasoning import ReasoningFormat, begins_after, begins_inside, continues_inside
from ...parsers.reasoning.grammar import answer_head, reasoning_before
from ...parsers.structural_tags import Node, either, node_of, sequence, spec
from ...parsers.tools import JSON_ARRAY
from ...parsers.tools.grammars import allow_calls, relax, require_calls
from ..context.served_model import ChatFormats
from .schema import ChatRequest
from .tool_choice import ToolChoice


@dataclass(frozen=True)
class AnswerForm:
    """The parsing of one request's answers, and the grammar that they obey."""

    output_format: OutputFormat
    grammar: GrammarSpec | None


def answer_form(formats: ChatFormats, body: ChatRequest, choice: ToolChoice, prompt: str,
                asked: GrammarSpec | None = None) -> AnswerForm:
    """The form of answers to ``prompt``, the rendered request; ``asked`` is the grammar that its fields state.

    Raises InvalidRequest where answers would have to be tool calls and obey another grammar, too.
    """
    reasoning, tools = formats.reasoning, formats.tools
    if choice.required and (tools is None or tools.layout is None):
        tools = JSON_ARRAY
    inside, closed = _reasoning_state(reasoning, body, prompt)
    output_format = OutputFormat(tools, choice.schemas, choice.max_calls, reasoning, inside,
                           separate=body.separate_reasoning is not False, stream=body.stream_reasoning is not False)
    answer = _answer(output_format, choice, asked)
    if answer is None:
        return AnswerForm(output_format, asked)
    before = [] if reasoning is None or closed else reasoning_before(reasoning, inside)
    return AnswerForm(output_format, spec([*before, answer]))


def _reasoning_state(reasoning: ReasoningFormat | None, body: ChatRequest, prompt: str) -> tuple[bool, bool]:
    """Two flags: the prompt has opened the answer's reasoning; it has closed it."""
    if reasoning is None:
        return False, True
    if not body.continue_final_message:
        return begins_inside(reasoning, prompt), begins_after(reasoning, prompt)
    inside = continues_inside(reasoning, body.messages[-1].text)
    return inside, not inside


def _answer(output_format: OutputFormat, choice: ToolChoice, asked: GrammarSpec | None) -> Node | None:
    """The grammar that follows an answer's reasoning, None where only ``asked``, or nothing, constrains the answer."""
    layout = output_format.tools.layout if output_format.tools is not None else None
    single = choice.max_calls == 1
    if choice.required:
        if asked is not None:
            raise InvalidRequest("tool_choice demands tool calls, which cannot obey response_format or another "
                                 "grammar; leave one of them out.", param="tool_choice")
        assert layout is not None
        return require_calls(layout, choice.schemas, single=single)
    calls = layout if choice.tools else None
    if asked is None:
        return allow_calls(calls, choice.schemas, choice.strict, single=single) if calls and choice.strict else None
    node = node_of(asked)
    if node is None or (calls is None and output_format.reasoning is None):
        return None
    harmony = output_format.reasoning is not None and output_format.reasoning.harmony
    content = sequence([answer_head(harmony), node])
    if calls is None:
        return content
    return either([require_calls(calls, relax(choice.schemas, choice.strict), single=single), content])
