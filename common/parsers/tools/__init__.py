"""Tool calls in a model's answer: how each family of models writes them. One format a file, no torch."""

from .call_emitter import CallEmitter, Schemas
from .format import Layout, Tag, ToolFormat
from .json_array import JSON_ARRAY
from .registry import TOOL_FORMATS, detect

__all__ = ["JSON_ARRAY", "TOOL_FORMATS", "CallEmitter", "Layout", "Schemas", "Tag", "ToolFormat", "detect"]
