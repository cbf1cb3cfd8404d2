"""The prompt of a chat request, rendered by the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ...api.errors import InvalidRequest
from ...config.server import AnswerArgs
from ...tokenizer.tokenizer import Tokenizer
from ..protocol.unsupported_fields import MESSAGE, TOOL, refuse
from .schema import ChatRequest, ContentPart, Message, MessageToolCall, Reasoning, Tool
from .tool_choice import ToolChoice


def chat_prompt(tokenizer: Tokenizer, request: ChatRequest, choice: ToolChoice, args: AnswerArgs) -> str:
    """``choice`` is the request's own, see ``tool_choice``. Raises InvalidRequest."""
    continued = bool(request.continue_final_message)
    if continued and request.add_generation_prompt:
        raise InvalidRequest("continue_final_message continues the last message, add_generation_prompt begins a new "
                             "one; send one of them.", param="continue_final_message")
    template, options = request_template(request, template_options(request), args)
    knows_developer = "developer" in (template or tokenizer.chat_template or "")
    messages, tools = template_messages(request, knows_developer=knows_developer), template_tools(choice.tools)
    return tokenizer.render_chat(
        messages, tools=tools, template=template, continue_final_message=continued,
        add_generation_prompt=not continued and request.add_generation_prompt is not False,
        options={**args.template_defaults, **options})


def request_template(request: ChatRequest, options: dict[str, Any],
                     args: AnswerArgs) -> tuple[str | None, dict[str, Any]]:
    """Returns the request's own template, also one in chat_template_kwargs, and the other variables. Raises
    InvalidRequest where the server does not trust it."""
    template = options.pop("chat_template", None) or request.chat_template
    if template is None:
        return None, options
    if not args.trust_request_chat_template:
        raise InvalidRequest("chat_template is a program, and a client's is not run here: start the server with "
                             "--chat-template, or where clients are trusted with --trust-request-chat-template.",
                             param="chat_template", code="unsupported_parameter")
    if not isinstance(template, str):
        raise InvalidRequest("chat_template must be a text of jinja.", param="chat_template")
    return template, options


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""``function`` is the older name of ``tool``."""


def template_messages(request: ChatRequest, *, knows_developer: bool = True) -> list[dict[str, Any]]:
    """Messages as plain dicts with text content; without ``knows_developer`` the role developer becomes system.

    Raises InvalidRequest for no messages and for content parts that are no text.
    """
    if not request.messages:
        raise InvalidRequest("messages is empty; send at least one message.", param="messages")
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise InvalidRequest("continue_final_message needs a last message of the assistant.", param="messages")
    messages = [_plain(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    if not knows_developer:
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
    return messages


def template_tools(tools: Iterable[Tool]) -> list[dict[str, Any]] | None:
    """Tool definitions for the template, None where there are none."""
    definitions = []
    for tool in tools:
        for deferred in (tool.defer_loading, tool.function.defer_loading):
            refuse(TOOL, "defer_loading", deferred)
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
        definitions.append({"type": "function", "function": function})
    return definitions or None


def template_options(request: ChatRequest) -> dict[str, Any]:
    """Further variables of the template: ``chat_template_kwargs``, and reasoning effort as templates name it."""
    options = dict(request.chat_template_kwargs or {})
    asked = request.reasoning or Reasoning()
    effort = asked.effort or request.reasoning_effort
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
    thinks = asked.enabled if effort is None else effort != "none"
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
        options.setdefault("thinking_mode", request.thinking.type)
    if thinks is not None:  # models' templates know either of these names
        options.setdefault("enable_thinking", thinks)
        options.setdefault("thinking", thinks)
    return options


class CallArguments(dict[str, Any]):
    """A call's arguments: an object for templates that print JSON, and its JSON for those that print a string."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _plain(message: Message, path: str) -> dict[str, Any]:
    role = _role(message, path)
    plain: dict[str, Any] = {"role": role, "content": _text(message.content, path)}
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.reasoning_content and not plain["content"]:  # gpt-oss's name of it; it refuses both
        plain["thinking"] = message.reasoning_content
    return plain


def _role(message: Message, path: str) -> str:
    """The role, checked. Raises InvalidRequest for an unknown role, and for a message without content."""
    for name in MESSAGE:
        refuse(MESSAGE, name, getattr(message, name))
    role = message.role.lower()
    if role not in _ROLES:
        raise InvalidRequest(f"{path}.role must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, got "
                             f"{message.role[:80]!r}.", param=f"{path}.role")
    says_more = role == "assistant" and (message.tool_calls or message.reasoning_content is not None)
    if message.content is None and not says_more:
        raise InvalidRequest(f"{path}.content is missing; send a string.", param=f"{path}.content")
    return "tool" if role == "function" else role


def _text(content: str | list[str | ContentPart] | None, path: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif part.type == "text" and part.text is not None:
            texts.append(part.text)
        else:
            raise InvalidRequest(f"{path}.content[{i}] is of type {part.type!r}; this model takes text only.",
                                 param=f"{path}.content[{i}]", code="unsupported_content")
    return "".join(texts)


def _call(call: MessageToolCall, path: str) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{path}.function.arguments must be a JSON object in a string.",
                                 param=f"{path}.function.arguments")
    return {"id": call.id, "type": "function", "function": {
        "name": call.function.name, "arguments": CallArguments(arguments)}}
