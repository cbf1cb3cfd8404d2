"""The tools of one request that the server runs: chosen from its tool servers, and shown to the model as functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from ...api.errors import InvalidRequest
from ..tool_servers.base import ServerTool, ToolServers
from .schema import BUILT_IN_TOOLS, FunctionTool, ResponseRequest


class RequestTools:
    """Tools that the server runs, by the names that the model calls them by."""

    def __init__(self, functions: Mapping[str, ServerTool]):
        self.functions = functions

    def __bool__(self) -> bool:
        return bool(self.functions)

    def function_of(self, server: str | None, name: str) -> str:
        """The name that the model calls a server's tool by; its own where it is not offered any more."""
        return next((function for function, tool in self.functions.items()
                     if tool.name == name and tool.server == server), name)

    @classmethod
    def of(cls, body: ResponseRequest, servers: ToolServers) -> RequestTools:
        """Raises InvalidRequest for tools that this server does not run."""
        functions: dict[str, ServerTool] = {}
        taken = {tool.name for tool in body.tools or () if tool.type == "function"}
        for i, tool in enumerate(body.tools or ()):
            if tool.type == "function":
                continue
            for found in _chosen(tool, servers, f"tools[{i}]"):
                name = found.name if found.name not in taken else f"{found.server}_{found.name}"
                taken.add(name)
                functions[name] = found
        return cls(functions)


def _chosen(tool: FunctionTool, servers: ToolServers, path: str) -> list[ServerTool]:
    """The tools of a server that one entry of a request asks for."""
    label: Any = BUILT_IN_TOOLS.get(tool.type)
    if label is None and tool.type != "mcp":
        raise InvalidRequest(f"{path}.type must be 'function', 'mcp', {', '.join(map(repr, BUILT_IN_TOOLS))}, got "
                             f"{tool.type[:80]!r}.", param=f"{path}.type", code="unsupported_parameter")
    if label is None:
        label = _label(tool, path)
    server = servers.get(label)
    if server is None:
        known = f"its tool servers are {', '.join(servers)}" if servers else "it was started without --tool-server"
        raise InvalidRequest(f"{path} needs the tool server {label[:80]!r}, which this server does not have: {known}.",
                             param=f"{path}.type" if tool.type != "mcp" else f"{path}.server_label",
                             code="unsupported_parameter")
    names = _allowed_names(tool.allowed_tools, path)
    return [each for each in server.tools if names is None or each.name in names]


def _label(tool: FunctionTool, path: str) -> str:
    """The label that a tool of type mcp names."""
    for name in ("server_url", "connector_id"):
        if getattr(tool, name) not in (UNSET, None):
            raise InvalidRequest(f"{path}.{name} is not supported here: this server connects to the servers of "
                                 "--tool-server alone; name one of them in server_label.", param=f"{path}.{name}",
                                 code="unsupported_parameter")
    if tool.require_approval not in (UNSET, None, "never"):
        raise InvalidRequest(f"{path}.require_approval must be 'never': this server asks nobody before it runs a tool.",
                             param=f"{path}.require_approval", code="unsupported_parameter")
    if not isinstance(tool.server_label, str):
        raise InvalidRequest(f"{path}.server_label is missing.", param=f"{path}.server_label")
    return tool.server_label


def _allowed_names(allowed: Any, path: str) -> list[str] | None:
    """The names that ``allowed_tools`` has, a list or a filter with one; None where all are allowed."""
    if allowed in (UNSET, None):
        return None
    names = allowed.get("tool_names") if isinstance(allowed, dict) else allowed
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"{path}.allowed_tools must be a list of names.", param=f"{path}.allowed_tools")
    return names
