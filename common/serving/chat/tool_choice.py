"""The tools that an answer may call, or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...api.errors import InvalidRequest
from ...parsers.schema_rules import check_enforceable
from .schema import ChatRequest, Tool

_NAME = re.compile(r"[\w.\-]{1,256}")


@dataclass(frozen=True)
class ToolChoice:
    """``tools`` may be called; ``required``: the answer is at least one call, and nothing else."""

    tools: tuple[Tool, ...]
    required: bool = False
    max_calls: int | None = None

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    @property
    def strict(self) -> frozenset[str]:
        """Names of the tools whose arguments must be valid whenever they are called."""
        return frozenset(tool.function.name for tool in self.tools if tool.function.strict)


def tool_choice(request: ChatRequest) -> ToolChoice:
    """The tool choice of a request. Raises InvalidRequest for invalid tools and choices."""
    tools = tuple(request.tools or ())
    check_tools(tools)
    max_calls = 1 if request.parallel_tool_calls is False else None
    choice = request.tool_choice
    if choice is None or choice == "auto":
        return ToolChoice(tools, max_calls=max_calls)
    if choice == "none":
        return ToolChoice(())
    if not tools:
        raise InvalidRequest("tool_choice needs tools; send them or leave it out.", param="tool_choice")
    if choice == "required":
        return ToolChoice(tools, required=True, max_calls=max_calls)
    name = _named(choice)
    named = tuple(tool for tool in tools if tool.function.name == name)
    if not named:
        raise InvalidRequest(f"tool_choice names {name[:80]!r}, which is not among tools.", param="tool_choice")
    return ToolChoice(named, required=True, max_calls=1)


def _named(choice: str | dict[str, Any]) -> str:
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if isinstance(name, str):
            return name
    raise InvalidRequest("tool_choice must be 'none', 'auto', 'required' or "
                         "{\"type\": \"function\", \"function\": {\"name\": ...}}.", param="tool_choice")


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequest for tools that are no functions, whose names are not unique, or whose ``strict`` schema
    cannot be enforced."""
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool.function.name
        if tool.type != "function":
            raise InvalidRequest(f"tools[{i}].type must be 'function', got {tool.type[:80]!r}.",
                                 param=f"tools[{i}].type")
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"tools[{i}].function.name must have 1 to 256 letters, digits, '_', '-' or '.', got "
                                 f"{name[:80]!r}.", param=f"tools[{i}].function.name")
        if name in seen:
            raise InvalidRequest(f"tools[{i}].function.name {name!r} is there twice.",
                                 param=f"tools[{i}].function.name")
        seen.add(name)
        if tool.function.strict:
            check_enforceable(tool.function.parameters or {}, f"tools[{i}].function.parameters")
