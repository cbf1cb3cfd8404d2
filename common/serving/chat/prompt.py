"""The prompt of a chat request, rendered by the chat template."""

from __future__ import annotations

from ...api.errors import InvalidRequest
from ...tokenizer.tokenizer import Tokenizer
from ..protocol.sampling import ChatRequest
from .messages import template_messages, template_options, template_tools
from .tool_choice import ToolChoice


def chat_prompt(tokenizer: Tokenizer, request: ChatRequest, choice: ToolChoice) -> str:
    """``choice`` is the request's own, see ``tool_choice``. Raises InvalidRequest."""
    continued = bool(request.continue_final_message)
    if continued and request.add_generation_prompt:
        raise InvalidRequest("continue_final_message continues the last message, add_generation_prompt begins a new "
                             "one; send one of them.", param="continue_final_message")
    messages = template_messages(request, knows_developer="developer" in (tokenizer.chat_template or ""))
    tools, options = template_tools(choice.tools), template_options(request)
    return tokenizer.render_chat(
        messages, tools=tools, continue_final_message=continued,
        add_generation_prompt=not continued and request.add_generation_prompt is not False, options=options)
