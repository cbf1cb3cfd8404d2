"""The formats of tool calls by SGLang's names, and their detection in a chat template."""

from __future__ import annotations

from ...registry import Registry
from .format import ToolFormat

TOOL_FORMATS: Registry[ToolFormat] = Registry("tool-call parser", "baton.common.parsers.tools")


def detect(template: str) -> str | None:
    """The name of the format that a chat template's source describes, None where it is unknown."""
    found = {name: tool_format for name, tool_format in TOOL_FORMATS.entries().items()
             if any(all(word in template for word in words) for words in tool_format.signs)}
    return min(found, key=lambda name: found[name].generality, default=None)
