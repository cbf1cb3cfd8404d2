"""Chat messages as a template wants them."""

from __future__ import annotations

import json
from typing import Any

from ..api.errors import InvalidRequest
from .protocol import ChatRequest, ContentPart, Message, MessageToolCall, Tool


def template_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """Plain dicts with text content. Raises InvalidRequest for no messages and for parts that are no text."""
    if not request.messages:
        raise InvalidRequest("messages is empty; send at least one message.", param="messages")
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise InvalidRequest("continue_final_message needs a last message of the assistant.", param="messages")
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(request.messages)]


def template_tools(tools: list[Tool]) -> list[dict[str, Any]] | None:
    """Tool definitions, None where there are none. Raises InvalidRequest for a tool that is no function."""
    found = []
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise InvalidRequest(f"tools[{i}].type must be 'function', got {tool.type!r}.", param=f"tools[{i}].type")
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": function})
    return found or None


def _plain(message: Message, path: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _text(message.content, path)}
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    return plain


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
    """Templates print arguments as JSON themselves, so they get an object and not OpenAI's string."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{path}.function.arguments must be a JSON object in a string.",
                                 param=f"{path}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
