"""The conversion of requests of ``/v1/messages`` to chats."""

from __future__ import annotations

from typing import Any

from ...api.errors import InvalidRequest
from ..chat.schema import ChatRequest, Function, FunctionCall, Message, MessageToolCall, Tool
from ..protocol.bootstrap import BootstrapFields
from ..protocol.decoding import required
from ..protocol.sampling import StreamOptions
from .schema import ContentBlock, Conversation, MessagesRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(request: Conversation) -> ChatRequest:
    """The equivalent chat request. Raises InvalidRequest."""
    messages = _messages(request)
    chat = ChatRequest(
        messages=messages, model=request.model, tools=_tools(request) or None, tool_choice=_tool_choice(request),
        continue_final_message=bool(messages) and messages[-1].role == "assistant" or None,
        chat_template_kwargs=_template_options(request), response_format=_response_format(request),
        **{name: getattr(request, name) for name in BootstrapFields.__struct_fields__})
    if request.output_config is not None:
        chat.reasoning_effort = request.output_config.effort
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    if isinstance(request, MessagesRequest):
        chat.max_tokens, chat.stop, chat.stream = request.max_tokens, request.stop_sequences, request.stream
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        chat.rid, chat.priority, chat.continuation = request.rid, request.priority, request.continuation
        chat.stream_options = StreamOptions(include_usage=True) if request.stream else None
    return chat


# ---------------------------------------------------------------- messages


def _messages(request: Conversation) -> list[Message]:
    if not request.messages:
        raise InvalidRequest("messages is empty; send at least one message.", param="messages")
    system = _text(request.system, "system")
    messages = [Message("system", system)] if system else []
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    for i, message in enumerate(request.messages):
        path = f"messages[{i}].content"
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [ContentBlock("text", blocks)]
        if message.role == "assistant":
            messages.append(_assistant_message(blocks, path, names))
        elif message.role in ("user", "system"):
            messages += _user_messages(message.role, blocks, path, names)
        else:
            raise InvalidRequest(f"messages[{i}].role must be 'user' or 'assistant', got {message.role[:80]!r}.",
                                 param=f"messages[{i}].role")
    return messages


def _assistant_message(blocks: list[ContentBlock], path: str, names: dict[str, str]) -> Message:
    """A message of the assistant."""
    reply = Message("assistant")
    for i, block in enumerate(blocks):
        at = f"{path}[{i}]"
        if block.type == "text":
            reply.content = f"{reply.content or ''}{required(block.text, f'{at}.text')}"
        elif block.type == "thinking":
            reply.reasoning_content = f"{reply.reasoning_content or ''}{required(block.thinking, f'{at}.thinking')}"
        elif block.type == "tool_use":
            call_id, name = required(block.id, f"{at}.id"), required(block.name, f"{at}.name")
            names[call_id] = name
            call = MessageToolCall(FunctionCall(name, block.input or {}), call_id)
            reply.tool_calls = [*(reply.tool_calls or ()), call]
        elif block.type != "redacted_thinking":
            raise _unknown(block, at)
    return reply


def _user_messages(role: str, blocks: list[ContentBlock], path: str, names: dict[str, str]) -> list[Message]:
    """The messages of a user's reply: one for each tool result, and one for the text between them."""
    messages: list[Message] = []
    for i, block in enumerate(blocks):
        at = f"{path}[{i}]"
        if block.type == "tool_result":
            call_id = required(block.tool_use_id, f"{at}.tool_use_id")
            messages.append(Message("tool", _text(block.content, f"{at}.content"), names.get(call_id),
                                 tool_call_id=call_id))
        elif block.type != "text":
            raise _unknown(block, at)
        elif messages and messages[-1].role == role:
            messages[-1].content = f"{messages[-1].content}{required(block.text, f'{at}.text')}"
        else:
            messages.append(Message(role, required(block.text, f"{at}.text")))
    return messages or [Message(role, "")]


def _text(content: str | list[ContentBlock] | None, path: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for i, block in enumerate(content):
        if block.type != "text":
            raise _unknown(block, f"{path}[{i}]")
    return "\n".join(required(block.text, f"{path}[{i}].text") for i, block in enumerate(content))


def _unknown(block: ContentBlock, path: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is of type {block.type[:80]!r}, which this model does not take here.", param=path,
                          code="unsupported_content")


# ---------------------------------------------------------------- options


def _tools(request: Conversation) -> list[Tool]:
    tools = []
    for i, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            raise InvalidRequest(f"tools[{i}] is of type {tool.type[:80]!r}, and this server runs no tools; it must "
                                 "be 'custom'.", param=f"tools[{i}].type", code="unsupported_parameter")
        tools.append(Tool(Function(tool.name, tool.description, tool.input_schema, tool.strict),
                          defer_loading=tool.defer_loading))
    return tools


def _tool_choice(request: Conversation) -> str | dict[str, Any] | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": required(choice.name, "tool_choice.name")}}
    if choice.type not in _CHOICES:
        raise InvalidRequest(f"tool_choice.type must be 'auto', 'any', 'tool' or 'none', got {choice.type[:80]!r}.",
                             param="tool_choice.type")
    return _CHOICES[choice.type]


def _template_options(request: Conversation) -> dict[str, Any] | None:
    """The template's variables; templates of models that can skip reasoning name that ``enable_thinking``."""
    if request.thinking is None:
        return request.chat_template_kwargs
    return {"enable_thinking": request.thinking.type != "disabled", **(request.chat_template_kwargs or {})}


def _response_format(request: Conversation) -> dict[str, Any] | None:
    output_format = request.output_config.format if request.output_config is not None else None
    if output_format is None:
        return None
    if output_format.type != "json_schema" or output_format.schema is None:
        raise InvalidRequest("output_config.format must be of type 'json_schema' and have a schema.",
                             param="output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format.schema, "strict": True}}
