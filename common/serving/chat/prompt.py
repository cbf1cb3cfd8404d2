"""The text that a model reads of a chat request."""

from __future__ import annotations

from ...api.errors import InvalidRequest
from ...tokenizer.tokenizer import Tokenizer
from ..protocol.requests import ChatRequest
from .messages import template_messages, template_options, template_tools
from .tool_choice import ToolChoice, tool_choice


def chat_prompt(tokenizer: Tokenizer, request: ChatRequest, choice: ToolChoice | None = None) -> str:
    """``choice`` is the request's own, where it is known already. Raises InvalidRequest."""
    choice = choice or tool_choice(request)
    continued = bool(request.continue_final_message)
    if continued and request.add_generation_prompt:
        raise InvalidRequest("continue_final_message goes on with the last message, add_generation_prompt begins a new "
                             "one; send one of them.", param="continue_final_message")
    return tokenizer.render_chat(
        template_messages(request, knows_developer="developer" in (tokenizer.chat_template or "")),
        tools=template_tools(choice.tools), continue_final_message=continued,
        add_generation_prompt=not continued and request.add_generation_prompt is not False,
        options=template_options(request))
