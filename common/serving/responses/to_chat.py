"""The conversion of requests of ``/v1/responses`` to chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...api.errors import InvalidRequest
from ..chat.schema import ChatRequest, Function, FunctionCall, Message, MessageToolCall, Tool
from ..protocol.bootstrap import BootstrapFields
from ..protocol.decoding import required
from ..protocol.sampling import StreamOptions
from .request_tools import RequestTools
from .schema import FunctionTool, InputItem, InputPart, ResponseRequest, TextOptions

WITH_LOGPROBS = "message.output_text.logprobs"


_SAME = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "stop_regex", "seed", "frequency_penalty",
         "presence_penalty", "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos", "skip_special_tokens",
         "no_stop_trim", "json_schema", "regex", "ebnf", "structural_tag", "rid", "priority", "chat_template_kwargs",
         "continuation", *BootstrapFields.__struct_fields__)
"""Fields that have the same meaning in a chat."""
_NAMES = {"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}


def as_chat(request: ResponseRequest, before: Sequence[InputItem], server_tools: RequestTools,
            after: Iterable[InputItem] = ()) -> ChatRequest:
    """The equivalent chat request, with the conversation ``before`` its input, and what came ``after`` it. Raises
    InvalidRequest."""
    tools, choice = _tools(request, server_tools)
    with_logprobs = WITH_LOGPROBS in (request.include or ())
    return ChatRequest(
        messages=_messages(request, before, after, server_tools), model=request.model, stream=request.stream,
        stream_options=StreamOptions(include_usage=True) if request.stream else None,
        max_completion_tokens=request.max_output_tokens, tools=tools, tool_choice=choice,
        response_format=_response_format(request.text), logprobs=with_logprobs or None,
        top_logprobs=request.top_logprobs if with_logprobs else None, parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        **{name: getattr(request, name) for name in _SAME})


def translate_error(error: InvalidRequest) -> InvalidRequest:
    """An error about the chat's fields, in the names of this API's."""
    message, param = error.message, error.param
    for theirs, ours in _NAMES.items():
        message = message.replace(theirs, ours)
        param = param and param.replace(theirs, ours)
    return InvalidRequest(message, param=param, code=error.code)


# ---------------------------------------------------------------- input


def _messages(request: ResponseRequest, before: Sequence[InputItem], after: Iterable[InputItem],
              server_tools: RequestTools) -> list[Message]:
    items = request.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    conversation = _Conversation(request.instructions, server_tools)
    for i, item in enumerate(before):
        conversation.add(item, f"previous_items[{i}]")
    for i, item in enumerate(items):
        conversation.add(item, f"input[{i}]")
    for item in after:
        conversation.add(item, "output")
    return conversation.messages


class _Conversation:
    """Items to messages: reasoning, text and calls that follow each other are one message of the assistant."""

    def __init__(self, instructions: str | None, server_tools: RequestTools):
        self._server_tools = server_tools
        self.messages = [] if instructions is None else [Message("system", instructions)]
        self._names: dict[str, str] = {}  # of functions, by the ids of their calls

    def add(self, item: InputItem, path: str) -> None:
        kind = item.type or "message"
        if kind == "message":
            self._add_message(item, path)
        elif kind == "function_call":
            self._add_call(item, path)
        elif kind == "function_call_output":
            call_id = required(item.call_id, f"{path}.call_id")
            self.messages.append(Message("tool", _text(item.output, f"{path}.output"), self._names.get(call_id),
                                         tool_call_id=call_id))
        elif kind == "mcp_call":
            call_id, name = required(item.id, f"{path}.id"), required(item.name, f"{path}.name")
            name = self._server_tools.function_of(item.server_label, name)
            self._add_call(InputItem(call_id=call_id, name=name, arguments=item.arguments), path)
            self.messages.append(Message("tool", _text(item.output, f"{path}.output") or item.error or "", name,
                                         tool_call_id=call_id))
        elif kind == "reasoning":
            reasoning_text = _text(item.content, f"{path}.content") or _text(item.summary, f"{path}.summary")
            if reasoning_text:
                self.messages.append(Message("assistant", reasoning_content=reasoning_text))
        else:
            raise InvalidRequest(f"{path} is of type {kind[:80]!r}, which this server does not take.",
                                 param=f"{path}.type", code="unsupported_content")

    def _add_message(self, item: InputItem, path: str) -> None:
        role = required(item.role, f"{path}.role")
        text = _text(item.content, f"{path}.content")
        if role in ("system", "developer") and len(self.messages) == 1 and self.messages[0].role == "system":
            self.messages[0].content = f"{self.messages[0].content}\n\n{text}"  # templates take one
        elif role == "assistant" and (last := self._last_assistant_message()) is not None and last.content is None \
                and not last.tool_calls:
            last.content = text
        else:
            self.messages.append(Message(role, text))

    def _add_call(self, item: InputItem, path: str) -> None:
        call_id, name = required(item.call_id, f"{path}.call_id"), required(item.name, f"{path}.name")
        self._names[call_id] = name
        message = self._last_assistant_message()
        if message is None:
            message = Message("assistant")
            self.messages.append(message)
        message.tool_calls = [*(message.tool_calls or ()), MessageToolCall(FunctionCall(name, item.arguments or "{}"),
                                                                    call_id)]

    def _last_assistant_message(self) -> Message | None:
        return self.messages[-1] if self.messages and self.messages[-1].role == "assistant" else None


def _text(content: str | list[InputPart] | None, path: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None or part.type not in ("input_text", "output_text", "text", "refusal", "reasoning_text",
                                             "summary_text"):
            raise InvalidRequest(f"{path}[{i}] is of type {part.type[:80]!r}; this model takes text only.",
                                 param=f"{path}[{i}]", code="unsupported_content")
        texts.append(text)
    return "".join(texts)


# ---------------------------------------------------------------- options


def _tools(request: ResponseRequest,
           server_tools: RequestTools) -> tuple[list[Tool] | None, str | dict[str, Any] | None]:
    """The chat's tools and tool_choice; ``allowed_tools`` leaves the others out."""
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ()) if tool.type == "function"]
    tools += [Tool(Function(name, tool.description, tool.parameters))
              for name, tool in server_tools.functions.items()]
    choice = request.tool_choice
    if not isinstance(choice, dict):
        return tools or None, choice
    if choice.get("type") == "function":
        return tools or None, {"type": "function", "function": {"name": choice.get("name")}}
    allowed = choice.get("tools")
    if choice.get("type") != "allowed_tools" or not isinstance(allowed, list):
        raise InvalidRequest("tool_choice must be 'none', 'auto', 'required', a function or allowed_tools.",
                             param="tool_choice", code="unsupported_parameter")
    names = [tool.get("name") for tool in allowed if isinstance(tool, dict)]
    mode = choice.get("mode")
    return [tool for tool in tools if tool.function.name in names] or None, mode if isinstance(mode, str) else None


def _tool(tool: FunctionTool, path: str) -> Tool:
    return Tool(Function(required(tool.name, f"{path}.name"), tool.description, tool.parameters, tool.strict))


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    text_format = text.format if text is not None else None
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    if text_format.name is None or text_format.schema is None:
        raise InvalidRequest("text.format of type 'json_schema' needs a name and a schema.", param="text.format")
    fields = {"name": text_format.name, "schema": text_format.schema, "strict": text_format.strict,
              "description": text_format.description}
    return {"type": "json_schema", "json_schema": {name: value for name, value in fields.items() if value is not None}}
